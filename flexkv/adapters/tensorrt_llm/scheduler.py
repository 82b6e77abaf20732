"""The scheduler's side: drives one cache manager by the engine's hooks, and orders all ranks' copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.loads import Loads
from flexkv.adapters.tensorrt_llm.messages import CancelOrder, SaveOrder, StepMetadata
from flexkv.adapters.tensorrt_llm.rank_coordinator import Joined, RankCoordinator
from flexkv.adapters.tensorrt_llm.requests import GROUP, RequestTracker, present_runs
from flexkv.config import FlexKVConfig
from flexkv.observe import Counters, PageLoss, get_logger
from flexkv.transfer.graph import OpResult, TransferGraph, TransferOp
from flexkv.unit.base import EngineUnit

logger = get_logger(__name__)


class SchedulerSide:
    """One ownership unit. Rank 0's executor thread calls all methods. None waits for a copy; only `match` waits for the
    tiers behind host memory, for a bounded time.

    Attributes:
        sync: loads run inside the step that needs them.
        by_layer: such a step waits for each layer just before it reads the layer.
    """

    def __init__(self, config: FlexKVConfig, arguments: EngineArguments) -> None:
        self._arguments = arguments
        self.sync = config.load.mode != "async"
        self.by_layer = config.load.mode == "layerwise" and _has_hooks(config, arguments)
        self.counters = Counters()
        self.ranks = RankCoordinator(config, arguments, self.counters)
        self._loads = Loads(
            self.ranks,
            self.counters,
            self.sync,
            self.by_layer,
            config.load.lease_s,
            config.load.lookup_wait_s,
        )
        self._prompt_only = config.store.tokens == "prompt"
        self._step = 0

    @property
    def address(self) -> str:
        return self.ranks.address

    @property
    def usable(self) -> bool:
        """Whether promises can be made, which needs the host pool on every rank."""
        return self.ranks.usable

    @property
    def unit(self) -> EngineUnit:
        """The engine's unit; a `NullUnit` until every rank has reported its pool."""
        return self.ranks.unit

    # --- lookups and loads ---

    def match(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Promises tokens beyond those that the engine has; returns their number, and whether the load runs between
        steps."""
        self.poll()
        joined = self.ranks.joined
        if joined is None:
            return 0, False
        if (tracker := joined.requests.get(int(request.request_id))) is not None:
            # The engine asks only for requests that hold no block, so it has taken this one's blocks away.
            self._count_preempted(joined, tracker)
        tokens = self._loads.match(joined, request, computed_tokens)
        return tokens, bool(tokens) and not self.sync

    def allocated(self, request: Any, block_ids: list[int]) -> None:
        """Called when the engine has given the request its blocks: orders the load that was promised.

        Raises:
            TransferError: the engine took the promise up too late.
        """
        if self.ranks.joined is not None:
            self._loads.allocated(self.ranks.joined, request, block_ids)

    # --- the step ---

    def build(self, output: Any) -> StepMetadata:
        """Makes the step's metadata. Costs O(requests). An idle engine does not call this, so no work depends on it."""
        self._step += 1
        named = (*output.new_requests, *output.cached_requests)
        joined = self.ranks.joined
        for said in named:
            tracker = joined.requests.get(int(said.request_id)) if joined is not None else None
            if tracker is not None:
                # The engine's first report leaves out the matched tokens. It does not say how many of them it took, so
                # the two numbers are not added up.
                computed = int(said.computed_position) + int(said.num_scheduled_tokens)
                tracker.computed = max(computed, tracker.step_loaded)
                tracker.step_loaded = 0
        self.poll()
        batch = tuple(int(said.request_id) for said in named)
        return StepMetadata(self._step, self.address, self._loads.take_planned(), batch)

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """Called when the request has ended: orders its stores. Returns whether its blocks must stay until the workers
        have returned its id."""
        self.poll()
        joined = self.ranks.joined
        if joined is None:
            return False
        tracker = joined.requests.of(request)
        joined.requests.pop(tracker.request_id)
        self._drop_planned(joined, tracker.request_id)
        graph = None
        if tracker.may_be_named:
            self.ranks.order(CancelOrder(tracker.request_id))
        if not tracker.load and self.usable:
            joined.unit.grow()
            graph = self._plan_stores(joined, tracker, request, block_ids)
        # After the stores, because this marks all the request's blocks as used together.
        joined.unit.manager.end_request(str(tracker.request_id))
        if graph is None and not tracker.may_be_named:
            return False
        self.ranks.order(SaveOrder(tracker.request_id, graph))
        return True

    def _plan_stores(
        self, joined: Joined, tracker: RequestTracker, request: Any, block_ids: list[int]
    ) -> TransferGraph | None:
        """Plans stores of the whole blocks that an ended request has certainly computed; None if there are none."""
        if tracker.keys is None:
            return None
        tokens = request.get_tokens(0)
        certain = tracker.certain_tokens(len(tokens), self._prompt_only)
        blocks = np.asarray(block_ids[: certain // joined.block_tokens], np.int32)
        keys = tracker.keys.of(tokens)
        ops: list[TransferOp] = []
        for first, last in present_runs(blocks):
            plan = joined.unit.manager.begin_store(
                str(tracker.request_id), GROUP, keys[first:last], blocks[first:last], first
            )
            PageLoss.NO_SLOT.count(self.counters, plan.dropped)
            if plan.graph is not None:
                ops += plan.graph.ops
        return TransferGraph(tuple(ops)) if ops else None

    def cancel_load(self, request_id: int, start: int = 0, end: int | None = None) -> None:
        """The engine hands back prompt tokens [start, end) of its promise; None stands for all from `start` on."""
        joined = self.ranks.joined
        tracker = joined.requests.get(request_id) if joined is not None else None
        if joined is not None and tracker is not None:
            self._loads.cancel(joined, tracker, start, end)

    def forget(self, request_id: int) -> None:
        """Forgets a request that lost its blocks and starts again: its new blocks hold nothing that it has computed."""
        joined = self.ranks.joined
        tracker = joined.requests.get(request_id) if joined is not None else None
        if joined is not None and tracker is not None:
            self._count_preempted(joined, tracker)
            self.cancel_load(request_id)
            self._drop_planned(joined, request_id)
            joined.unit.manager.release(str(request_id))
            joined.requests.reset(request_id)

    def _count_preempted(self, joined: Joined, tracker: RequestTracker) -> None:
        """Counts the whole blocks that a preempted request had computed and no other request has stored: they are lost,
        because stores come at a request's end. Blocks of generated tokens have no key here, and count as lost."""
        if tracker.keys is None or tracker.load or not self.usable:
            return
        computed = min(tracker.computed, tracker.prompt_tokens) if self._prompt_only else tracker.computed
        blocks = computed // joined.block_tokens
        stored = int(joined.unit.manager.present(GROUP, tracker.keys.made[:blocks]).sum())
        PageLoss.PREEMPTED.count(self.counters, blocks - stored)

    def _drop_planned(self, joined: Joined, request_id: int) -> None:
        joined.unit.manager.abandon_loads(str(request_id))
        for op in (op for job in self._loads.drop_planned(request_id) for op in job.graph.ops):
            dropped = OpResult.cancelled(op.op_id, op.pages, "the request ended first")
            for rank in range(self._arguments.ranks):
                joined.unit.manager.complete(rank, dropped)

    # --- the ranks ---

    def poll(self) -> None:
        """Takes the ranks' reports, drives the disks, ends expired leases and reports metrics. Never waits."""
        self.ranks.poll()

    def close(self) -> None:
        """Closes the disks and the host pool; logs the cache's statistics."""
        self.ranks.close()


def _has_hooks(config: FlexKVConfig, arguments: EngineArguments) -> bool:
    """Whether a forward may start before its loads have ended, because it waits for each layer."""
    if arguments.ranks > 1:
        logger.warning(
            "load.mode=layerwise: a rank that lost a layer could not tell the other %d before they sample; loads end "
            "before the forward starts, as with sync",
            arguments.ranks - 1,
        )
        return False
    if not arguments.without_hooks or config.load.layer_hooks == "trust":
        return True
    logger.warning(
        "load.mode=layerwise: with the engine's %s a forward may run without the hooks of its layers; loads end before "
        "it starts, as with sync. Set that to null, or load.layer_hooks to trust",
        arguments.without_hooks,
    )
    return False
