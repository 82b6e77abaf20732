"""What one rank reports of its ops: terminal results, ended requests, and blocks that hold no valid KV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexkv.adapters.common.base import LoadJob
from flexkv.transfer.graph import OpResult, TransferOp


@dataclass(frozen=True, slots=True)
class Ended:
    """An op's terminal result and what decides when it may be taken.

    Attributes:
        step: the last forward that was ordered when the op was submitted.
        failed_load: blocks of a load hold no valid KV.
    """

    result: OpResult
    step: int
    failed_load: bool = False


class RankReports:
    """Collects what one rank reports; each result, request and block is taken once.

    Attributes:
        ended: results that were not taken, in the order in which they came.
        finished: requests whose async load has ended, not taken yet; `failed` are those of them, and of loads that
            have not ended yet, of which pages are missing.
        failed_blocks: engine blocks that a load should have filled and did not, not taken yet.
    """

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.failed_blocks: set[int] = set()

    def add(self, result: OpResult, step: int, load: LoadJob | None = None) -> None:
        """An op has ended; `load` is the job that it belongs to, if it is of one."""
        self.ended.append(Ended(result, step, load is not None and bool(len(result.failed))))
        if load is not None and len(result.failed):
            blocks = next(op.blocks for op in load.graph.ops if op.op_id == result.op_id)
            self.add_failed(load, blocks[result.failed].tolist())

    def add_failed(self, load: LoadJob, blocks: Iterable[int]) -> None:
        """Engine blocks that a load should have filled and did not."""
        self.failed_blocks.update(blocks)
        if not load.sync:
            self.failed.add(load.request_id)

    def add_finished(self, request_id: str) -> None:
        """The request's async load has ended."""
        self.finished.add(request_id)

    def invalidate(self, load: LoadJob, op: TransferOp, reason: str) -> None:
        """All blocks of a load's op that has ended count as failed, however it ended, also where its result was
        taken."""
        self.add_failed(load, op.blocks.tolist())
        for at, entry in enumerate(self.ended):
            if entry.result.op_id == op.op_id:
                result = OpResult.cancelled(op.op_id, op.pages, reason)
                self.ended[at] = Ended(result, entry.step, failed_load=True)

    # --- taken ---

    def take_results(self) -> list[OpResult]:
        """Terminal results not taken yet, in the order in which they came."""
        ended, self.ended = self.ended, []
        return [entry.result for entry in ended]

    def take_settled(self, settled_step: int) -> list[OpResult]:
        """Of those results the ones that no later report makes wrong: of ops ordered up to `settled_step`.

        A load that lost blocks is left for the step's report, which names these blocks first.
        """
        settled: list[OpResult] = []
        held: list[Ended] = []
        for entry in self.ended:
            if entry.failed_load or entry.step > settled_step:
                held.append(entry)
            else:
                settled.append(entry.result)
        self.ended = held
        return settled

    def take_finished(self) -> set[str]:
        """Requests whose async load has ended on this rank, each exactly once."""
        finished, _ = self.take_finished_and_failed()
        return finished

    def take_finished_and_failed(self) -> tuple[set[str], set[str]]:
        """The same, and those of them whose load has failed."""
        finished, self.finished = self.finished, set()
        failed = self.failed & finished
        self.failed -= failed
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Engine blocks that a load should have filled and did not."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed
