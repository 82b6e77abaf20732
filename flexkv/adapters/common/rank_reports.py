"""The reports of one rank to the scheduler's side: the results of its ops, the requests whose loads have finished, and
the blocks that hold no valid KV.
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
    """One rank's message to the scheduler's side, plain and picklable. A field with its default value reports nothing.

    Attributes:
        rank: number of the rank.
        unit: the unit whose ops the report is about; NO_UNIT if the rank serves no unit yet.
        results: terminal results of ops on this rank, in order of arrival.
        ready: number of host slots that the rank can use; None if it has not changed since the last report.
        error: why the rank cannot use the host pool at all; empty if it can or has reported this before.
        no_gds: why the rank cannot load from the disks without a slot in host memory; empty if it can, does not have
            to, or has reported this before.
    """

    rank: int
    unit: UnitId = NO_UNIT
    results: list[OpResult] = field(default_factory=list)
    ready: int | None = None
    error: str = ""
    no_gds: str = ""

    def pass_news(self, unit: EngineUnit) -> None:
        """Passes everything except the results on to the unit."""
        if self.error:
            unit.disable(self.rank, self.error)
        if self.no_gds:
            unit.stop_straight_loads(self.rank, self.no_gds)
        if self.ready is not None:
            unit.rank_ready({self.rank: self.ready})


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished op's terminal result, with the facts that decide when the result may be taken.

    Attributes:
        result: the terminal result.
        step: number of the last forward pass that had been ordered when the op was submitted.
        failed_load: whether the op belongs to a load and some of its blocks hold no valid KV.
    """

    result: OpResult
    step: int
    failed_load: bool = False


class RankReports:
    """Collects the facts that one rank has to report, until its next report.

    Attributes:
        ended: terminal results that have not been taken yet, in order of arrival.
        finished: ids, not yet taken, of requests whose async load has finished.
        failed: ids, not yet taken, of requests whose async load lacks pages. The load may still be in flight.
        failed_blocks: engine blocks, not yet taken, that a load should have filled but did not.
    """

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.failed_blocks: set[int] = set()

    def add(self, result: OpResult, step: int, load: LoadJob | None = None) -> None:
        """Adds the result of a finished op, and the op's failed blocks if it belongs to a load.

        Args:
            step: number of the last forward pass that had been ordered when the op was submitted.
            load: the job that the op belongs to; None for a store op.
        """
        self.ended.append(Ended(result, step, load is not None and bool(len(result.failed))))
        if load is not None and len(result.failed):
            blocks = next(op.blocks for op in load.graph.ops if op.op_id == result.op_id)
            self.add_failed(load, blocks[result.failed].tolist())

    def add_failed(self, load: LoadJob, blocks: Iterable[int]) -> None:
        """Adds engine blocks that a load should have filled but did not."""
        self.failed_blocks.update(blocks)
        if not load.sync:
            self.failed.add(load.request_id)

    def add_finished(self, request_id: str) -> None:
        self.finished.add(request_id)

    def invalidate(self, load: LoadJob, op: TransferOp, reason: str) -> None:
        """Makes all blocks of a load's finished op count as failed, even if the op succeeded and its result was already
        taken."""
        self.add_failed(load, op.blocks.tolist())
        for at, entry in enumerate(self.ended):
            if entry.result.op_id == op.op_id:
                result = OpResult.cancelled(op.op_id, op.pages, reason)
                self.ended[at] = Ended(result, entry.step, failed_load=True)

    # --- taken for reports ---

    def take_results(self) -> list[OpResult]:
        """Removes and returns all terminal results, in order of arrival."""
        ended, self.ended = self.ended, []
        return [entry.result for entry in ended]

    def take_settled(self, settled_step: int) -> list[OpResult]:
        """Removes and returns the results that no later report can invalidate: those of ops that were submitted up to
        forward pass `settled_step`.

        The result of a load that lost blocks is not taken here. It is left for the step's report, which must list the
        lost blocks first.
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
        """Removes and returns the ids of requests whose async load has finished on this rank."""
        finished, _ = self.take_finished_and_failed()
        return finished

    def take_finished_and_failed(self) -> tuple[set[str], set[str]]:
        """Removes and returns the ids of requests whose async load has finished, and the subset of them whose load
        lacks pages."""
        finished, self.finished = self.finished, set()
        failed = self.failed & finished
        self.failed -= failed
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Removes and returns the engine blocks that a load should have filled but did not."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed
