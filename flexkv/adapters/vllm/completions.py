"""Handles the workers' reports of ended ops and steps: publishes the blocks that were stored, and keeps bad blocks from
being published."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.request import RequestStatus

from flexkv.adapters.vllm.engine_spec import RUNNER_V2, EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.loads import Loads
from flexkv.adapters.vllm.metadata import StepReport
from flexkv.adapters.vllm.requests import RequestTable, RequestTracker
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.cache.base import Completion, OpRole
from flexkv.cache.stores.base import StoreWatch
from flexkv.cache.stores.planner import StorePlanner
from flexkv.facts.ranks import NO_UNIT
from flexkv.observe import Counters, PageLoss, get_logger, warn_once
from flexkv.transfer.graph import OpResult
from flexkv.unit.base import EngineUnit

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Retired:
    """A block table that its request has lost. The last step that may have used the table is not reported yet.

    Attributes:
        step: number of the last step that may have used the table.
        tracker: the request's tracker.
        block_ids: the blocks of the first group in the lost table.
    """

    step: int
    tracker: RequestTracker
    block_ids: list[int]


class CompletionHandler:
    """Passes the workers' reports to the manager, failures first.

    Blocks that a step computed are published only after the step's outcome was reported. Until then, it is not known
    whether the loads that the step used have failed. This includes loads of other connectors.

    Args:
        workers: the worker sides of all ranks if the ranks run in this process; otherwise empty.

    Attributes:
        changed: whether an op has ended since the scheduler's side last set this to False, so that metrics have
            changed. True at first, so that the gauges show the sizes of the tiers before the first op.
    """

    def __init__(
        self,
        unit: EngineUnit,
        workers: Collection[WorkerSide],
        requests: RequestTable,
        loads: Loads,
        stores: StorePlanner,
        watch: StoreWatch,
        counters: Counters,
        events: EventLog | None,
        spec: EngineSpec,
    ) -> None:
        self._unit = unit
        self._block_tokens = spec.geometry.groups[0].block_tokens
        self._keeps_computed = spec.role.keeps_computed
        self._workers = workers
        self._requests = requests
        self._loads = loads
        self._stores = stores
        self._watch = watch
        self._counters = counters
        self._events = events
        self.changed = True
        self._retired: list[Retired] = []

    def collect_early(self) -> None:
        """Handles results of workers in this process without waiting for a step's report."""
        if self._workers and self._unit.manager.inflight_ops():
            # `take_results_early` returns only results of steps whose outcome was reported.
            for worker in self._workers:
                for result in worker.take_results_early():
                    self._complete(worker.rank, result)

    def take(self, reports: Sequence[StepReport]) -> int:
        """Handles a step's reports.

        Call order:
            After `take_failed_blocks` with the blocks that failed in the step.

        Returns:
            The number of the last step that a rank reports as executed; 0 if none does.
        """
        for report in reports:
            report.pass_news(self._unit)
            if report.error and self._events is not None:
                self._events.end()
        results = [(report.rank, result) for report in reports for result in report.results]
        for rank, result in sorted(results, key=lambda item: item[1].op_id not in self._loads.jobs):
            self._complete(rank, result)
        step = max((report.step for report in reports), default=0)
        if step:
            for worker in self._workers:
                worker.settled_step = max(worker.settled_step, step)
            self._retired = [table for table in self._retired if table.step > step]
        return step

    def end_changed(self) -> list[RequestTracker]:
        """Finds and returns the requests whose adapter's files have changed. Revokes their stored blocks that are not
        published yet, so that these never will be, and drops their blocks that wait to be stored.

        Call order:
            Before a step's results are handled, because the step may have read the files after they changed.
        """
        if not self._requests.have_adapters:
            return []
        lately = (table.tracker for table in self._retired)
        changed = self._requests.take_changed([*self._requests.live.values(), *lately])
        for tracker in changed:
            self._unit.manager.discard_from(tracker.request_id, 0)
        if changed:
            left = (table.block_ids for table in self._retired if table.tracker.adapter_changed)
            self._stores.load_failed({block for blocks in left for block in blocks})
        return changed

    def take_failed_blocks(self, failed: set[int]) -> None:
        """Revokes the `failed` blocks and all blocks that were computed from them, so that none of them is published.
        The engine computes these blocks again, with one exception: Model Runner V2 does not do so for a running
        request. Nothing more of such a request is stored."""
        for tracker in self._requests.live.values():
            first = first_failed(tracker.block_ids, failed)
            if first is None:
                continue
            self._unit.manager.discard_from(tracker.request_id, first * self._block_tokens)
            tracker.tables[0].cursor = min(tracker.tables[0].cursor, first)
            tracker.next_offer = 0
            tracker.suspect_from = first if tracker.suspect_from is None else min(first, tracker.suspect_from)
            if self._keeps_computed and tracker.request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._keep_out(tracker, first)
        bad = set(failed)
        for table in self._retired:
            first = first_failed(table.block_ids, failed)
            if first is not None:
                self._unit.manager.discard_from(table.tracker.request_id, first * self._block_tokens)
                bad.update(table.block_ids[first:])
        self._stores.load_failed(bad)

    def _keep_out(self, tracker: RequestTracker, first_block: int) -> None:
        self._stores.load_kept(tracker, first_block)
        warn_once(
            logger,
            "runner-v2-load-failed",
            "a load failed within a step, ours or another connector's, and %s. flexkv stores nothing more of such a "
            "request. Set %s, or load between steps",
            *RUNNER_V2,
        )

    def retire(self, tracker: RequestTracker, step: int) -> None:
        """Keeps the block table of a request that loses its blocks, because the request's store operations may still be
        in flight. The table is dropped when `step` has been reported."""
        if tracker.block_ids and self._unit.unit_id != NO_UNIT:
            self._retired.append(Retired(step, tracker, tracker.block_ids))

    def _complete(self, rank: int, result: OpResult) -> None:
        completion = self._unit.manager.complete(rank, result)
        if completion is None:
            return
        self.changed = True
        if completion.role is OpRole.LOAD:
            self._end_load(completion)
        else:
            self._end_store(completion)

    def _end_load(self, completion: Completion) -> None:
        self._loads.end(completion.op_id, self._requests.live.get(completion.request_id))
        if len(completion.failed_blocks):
            self.take_failed_blocks(set(completion.failed_blocks.tolist()))

    def _end_store(self, completion: Completion) -> None:
        self._watch.end(completion.op_id)
        (completion.loss or PageLoss.UNPUBLISHED).count(self._counters, len(completion.failed_blocks))
        if self._events is not None:
            self._events.ended(completion.op_id)
        self._stores.unpublished(completion.failed_blocks)


def first_failed(block_ids: list[int], failed_blocks: set[int]) -> int | None:
    """Returns the index of the first block in a request's table that is in `failed_blocks`; None if none is."""
    if failed_blocks.isdisjoint(block_ids):
        return None
    held = np.array(block_ids, dtype=np.int64)
    return int(np.flatnonzero(np.isin(held, np.fromiter(failed_blocks, dtype=np.int64)))[0])
