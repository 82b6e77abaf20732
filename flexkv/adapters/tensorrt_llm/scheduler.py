"""The scheduler's side: translates the engine's calls into calls of the cache manager, and orders all ranks' copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.adapters.common.prompt_keys import GROUP, TokenKeys
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.identity import request_namespace
from flexkv.adapters.tensorrt_llm.loads import Loads
from flexkv.adapters.tensorrt_llm.messages import CancelOrder, SaveOrder, StepMetadata
from flexkv.adapters.tensorrt_llm.rank_coordinator import RankCoordinator
from flexkv.adapters.tensorrt_llm.requests import RequestTracker, present_runs
from flexkv.config import FlexKVConfig
from flexkv.observe import Counters, PageLoss, get_logger
from flexkv.transfer.graph import TransferGraph, TransferOp

logger = get_logger(__name__)


class SchedulerSide:
    """The scheduler's side of one ownership unit. Rank 0's executor thread calls all methods. No method waits for a
    copy; only `match` waits for the tiers behind host memory, for a bounded time.

    Attributes:
        by_layer: whether a step waits for each layer of its loads just before it reads the layer.
        counters: the scheduler's counters.
        ranks: the ranks and their unit.
        sync: True if loads run inside the step that needs them, False if they run between steps.
    """

    def __init__(self, config: FlexKVConfig, arguments: EngineArguments) -> None:
        self.by_layer = config.load.mode == "layerwise" and _has_hooks(config, arguments)
        self.counters = Counters()
        self.ranks = RankCoordinator(config, arguments, self.counters)
        self._loads = Loads(config.load, self.ranks, self.counters, self.by_layer)
        self.sync = self._loads.sync
        self._prompt_only = config.store.tokens == "prompt"
        self._step = 0

    # --- lookups and loads ---

    def match(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Promises tokens beyond the `computed_tokens` that the engine has.

        Returns:
            The number of promised tokens, and whether their load runs between steps.
        """
        self.ranks.poll()
        if not self.ranks.block_tokens:
            return 0, False
        request_id = int(request.request_id)
        tracker = self.ranks.requests.get(request_id)
        if tracker is None:
            namespace = request_namespace(self.ranks.namespace, request)
            keys = None if namespace is None else TokenKeys(self.ranks.block_tokens, namespace)
            tracker = self.ranks.requests[request_id] = RequestTracker(request_id, keys)
        else:
            # The engine asks only about requests that hold no blocks. So if it asks about a request again, the request
            # was preempted.
            self._count_preempted(tracker)
        tokens = self._loads.match(tracker, request.get_tokens(0), computed_tokens)
        return tokens, bool(tokens) and not self.sync

    def allocated(self, request: Any, block_ids: list[int]) -> None:
        """Called when the engine has allocated the request's blocks. Orders the load that was promised.

        Raises:
            TransferError: the promised blocks are gone, because the engine allocated the request's blocks too late.
        """
        if (tracker := self.ranks.requests.get(int(request.request_id))) is not None:
            self._loads.allocated(tracker, request, block_ids)

    # --- the step ---

    def build(self, output: Any) -> StepMetadata:
        """Makes the step's metadata. Costs O(requests). An idle engine does not call this, so nothing else may rely on
        its being called."""
        self._step += 1
        named = (*output.new_requests, *output.cached_requests)
        for said in named:
            tracker = self.ranks.requests.get(int(said.request_id))
            if tracker is not None and tracker.told is not None:
                # When the engine schedules the request for the first time, `computed` does not include the promised
                # tokens. The engine does not say how many of the promised tokens it accepted, so the larger of
                # `computed` and `step_loaded` is used, not their sum.
                computed = int(said.computed_position) + int(said.num_scheduled_tokens)
                tracker.computed = max(computed, tracker.step_loaded)
                tracker.step_loaded = 0
                tracker.first_step = tracker.first_step or self._step
        self.ranks.poll()
        return StepMetadata(self._step, self.ranks.address, self._loads.take_planned(), bool(named))

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """Called when a request has finished. Orders the ranks to store its blocks. Returns whether the engine must
        keep the request's blocks until the workers have returned its id."""
        self.ranks.poll()
        tracker = self.ranks.requests.pop(int(request.request_id), None)
        if tracker is None:
            return False
        self._loads.drop_planned(tracker)
        graph = None
        if tracker.may_be_named:
            self.ranks.order(CancelOrder(tracker.request_id))
        if not tracker.load and self.ranks.usable:
            self.ranks.unit.grow()
            graph = self._plan_stores(tracker, request, block_ids)
        # `end_request` must be called after `_plan_stores`, because it marks all blocks of the request as used
        # together.
        self.ranks.unit.manager.end_request(tracker.name)
        if graph is None and not tracker.may_be_named:
            return False
        self.ranks.order(SaveOrder(tracker.request_id, graph, tracker.first_step))
        return True

    def _plan_stores(
        self, tracker: RequestTracker, request: Any, block_ids: list[int]
    ) -> TransferGraph | None:
        """Plans the store ops for the full blocks whose KV a finished request has certainly computed; None if nothing
        has to be stored."""
        if tracker.keys is None:
            return None
        tokens = request.get_tokens(0)
        certain = tracker.certain_tokens(len(tokens), self._prompt_only)
        blocks = np.asarray(block_ids[: certain // self.ranks.block_tokens], np.int32)
        keys = tracker.keys.of(tokens)
        ops: list[TransferOp] = []
        for first, last in present_runs(blocks):
            plan = self.ranks.unit.manager.begin_store(
                tracker.name, GROUP, keys[first:last], blocks[first:last], first
            )
            PageLoss.NO_SLOT.count(self.counters, plan.dropped)
            if plan.graph is not None:
                ops += plan.graph.ops
        return TransferGraph(tuple(ops)) if ops else None

    def cancel_load(self, request_id: int, start: int = 0, end: int | None = None) -> None:
        """Called when the engine declines the promised prompt tokens [start, end). If `end` is None, it declines all
        tokens from `start` on."""
        if (tracker := self.ranks.requests.get(request_id)) is not None:
            self._loads.cancel(tracker, start, end)

    def forget(self, request_id: int) -> None:
        """Called when a request has lost its blocks and starts again. Resets its record, because its new blocks will
        hold nothing that it has computed so far."""
        if (tracker := self.ranks.requests.get(request_id)) is not None:
            self._count_preempted(tracker)
            self._loads.cancel(tracker, 0, None)
            self._loads.drop_planned(tracker)
            self.ranks.unit.manager.release(tracker.name)
            self.ranks.requests[request_id] = tracker.restarted()

    def _count_preempted(self, tracker: RequestTracker) -> None:
        """Counts the full blocks that a preempted request had computed and that no other request has stored. They are
        lost, because a request's blocks are stored only when it finishes. Blocks of generated tokens have no keys at
        this point, so they count as lost."""
        if tracker.keys is None or tracker.load or not self.ranks.usable:
            return
        computed = min(tracker.computed, tracker.prompt_tokens) if self._prompt_only else tracker.computed
        blocks = computed // self.ranks.block_tokens
        stored = int(self.ranks.unit.manager.known(GROUP, tracker.keys.made[:blocks]).sum())
        PageLoss.PREEMPTED.count(self.counters, blocks - stored)


def _has_hooks(config: FlexKVConfig, arguments: EngineArguments) -> bool:
    """Whether a forward pass may start before its loads have finished, because it waits for each layer. Logs the reason
    if not."""
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
