"""Reports of one rank: its messages to the scheduler's side, and terminal results, ended requests, and blocks that hold
no valid KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flexkv.adapters.common.load_job import LoadJob
from flexkv.facts.ranks import NO_UNIT, UnitId
from flexkv.transfer.graph import OpResult, TransferOp
from flexkv.unit.base import EngineUnit


@dataclass(slots=True)
class RankReport:
    """One rank's report to the scheduler's side. A field that has its default says nothing. Plain and picklable.

    Attributes:
        unit: the unit whose orders this reports on; NO_UNIT for a rank that serves none yet.
        results: terminal results of ops on this rank, in order of arrival.
        ready: host slots that the rank can use; sent when the number has changed.
        error: why the rank cannot use the pool at all.
        no_gds: why the rank cannot load from the disks without a page of host memory.
    """

    rank: int
    unit: UnitId = NO_UNIT
    results: list[OpResult] = field(default_factory=list)
    ready: int | None = None
    error: str = ""
    no_gds: str = ""

    def pass_news(self, unit: EngineUnit) -> None:
        """Passes everything but the results to the unit."""
        if self.error:
            unit.disable(self.rank, self.error)
        if self.no_gds:
            unit.stop_straight_loads(self.rank, self.no_gds)
        if self.ready is not None:
            unit.rank_ready({self.rank: self.ready})


@dataclass(frozen=True, slots=True)
class Ended:
    """An op's terminal result, with the facts that decide when it may be taken.

    Attributes:
        step: number of the last forward pass that was ordered when the op was submitted.
        failed_load: the op is a load's, and some of its blocks hold no valid KV.
    """

    result: OpResult
    step: int
    failed_load: bool = False


class RankReports:
    """Collects the reports of one rank; each result, request and block is taken once.

    Attributes:
        ended: results not taken yet, in order of arrival.
        finished: requests whose async load has ended, not taken yet.
        failed: requests whose async load lacks pages, not taken yet; the load itself may not have ended.
        failed_blocks: engine blocks that a load should have filled and did not, not taken yet.
    """

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.failed_blocks: set[int] = set()

    def add(self, result: OpResult, step: int, load: LoadJob | None = None) -> None:
        """Adds the result of an op; `load` is the job that the op belongs to, if any."""
        self.ended.append(Ended(result, step, load is not None and bool(len(result.failed))))
        if load is not None and len(result.failed):
            blocks = next(op.blocks for op in load.graph.ops if op.op_id == result.op_id)
            self.add_failed(load, blocks[result.failed].tolist())

    def add_failed(self, load: LoadJob, blocks: Iterable[int]) -> None:
        """Adds engine blocks that a load should have filled and did not."""
        self.failed_blocks.update(blocks)
        if not load.sync:
            self.failed.add(load.request_id)

    def add_finished(self, request_id: str) -> None:
        """Adds a request whose async load has ended."""
        self.finished.add(request_id)

    def invalidate(self, load: LoadJob, op: TransferOp, reason: str) -> None:
        """Makes all blocks of an ended op of a load count as failed, whatever its result, even if that was taken."""
        self.add_failed(load, op.blocks.tolist())
        for at, entry in enumerate(self.ended):
            if entry.result.op_id == op.op_id:
                result = OpResult.cancelled(op.op_id, op.pages, reason)
                self.ended[at] = Ended(result, entry.step, failed_load=True)

    # --- taken ---

    def take_results(self) -> list[OpResult]:
        """Takes all terminal results, in order of arrival."""
        ended, self.ended = self.ended, []
        return [entry.result for entry in ended]

    def take_settled(self, settled_step: int) -> list[OpResult]:
        """Takes the results that no later report can invalidate: those of ops submitted up to forward pass
        `settled_step`.

        The result of a load that lost blocks stays for the step's report, which names these blocks first.
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
        """Takes the requests whose async load has ended on this rank."""
        finished, _ = self.take_finished_and_failed()
        return finished

    def take_finished_and_failed(self) -> tuple[set[str], set[str]]:
        """Takes the requests whose async load has ended; also returns those whose load lacks pages."""
        finished, self.finished = self.finished, set()
        failed = self.failed & finished
        self.failed -= failed
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Takes the engine blocks that a load should have filled and did not."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed
