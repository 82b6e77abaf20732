"""The scheduler's side: drives one cache manager with what the engine says, and orders all ranks' copies."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from flexkv.adapters.common.base import LoadJob, RankFacts, UnitOwner
from flexkv.adapters.common.host_unit import HostUnit
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.identity import engine_namespace
from flexkv.adapters.tensorrt_llm.link import Listener
from flexkv.adapters.tensorrt_llm.messages import (
    CancelOrder,
    LoadOrder,
    RankReport,
    SaveOrder,
    StepMetadata,
)
from flexkv.adapters.tensorrt_llm.requests import (
    GROUP,
    NO_BLOCKS,
    NO_TOKENS,
    RequestTable,
    Tracked,
    blocks_of,
    still_wanted,
    tokens_of,
)
from flexkv.cache.base import NO_BLOCK, OpRole
from flexkv.config import FlexKVConfig
from flexkv.errors import FlexKVError, GeometryError, TransferError
from flexkv.observe import Counters, get_logger
from flexkv.transfer.graph import OpResult, TransferGraph, TransferOp

logger = get_logger(__name__)


class SchedulerSide:
    """One ownership unit. All methods are called by rank 0's executor thread; none waits for a copy.

    Attributes:
        unit: None until every rank has said what its pool is: until then nothing is promised and nothing stored.
    """

    def __init__(self, config: FlexKVConfig, arguments: EngineArguments) -> None:
        self._config = config
        self._arguments = arguments
        self._sync = config.load.mode != "async"
        self._by_layer = config.load.mode == "layerwise" and _has_hooks(config, arguments)
        self._listener = Listener()
        self._facts: dict[int, tuple[RankFacts, int]] = {}
        self._ready: set[int] = set()
        self._block_tokens = 0
        self._requests: RequestTable | None = None
        self._loads: list[LoadJob] = []
        self._step = 0
        self._off = ""
        self.unit: HostUnit | None = None
        self.counters = Counters()

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def usable(self) -> bool:
        """Whether promises can be made: every rank has the host pool."""
        return self.unit is not None and self.unit.usable and len(self._ready) == self._arguments.ranks

    # --- lookups and loads ---

    def match(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether the load runs between its steps.

        Only what is verified in host memory. What lies on disk is brought up meanwhile, for whoever asks next: the
        engine cannot be told to ask again. Nothing where ranks may have to do with an earlier load of the request yet:
        see `Tracked.spent`.
        """
        self.poll()
        if self._requests is None or self.unit is None:
            return 0, False
        tracked = self._requests.of(request)
        # The engine asks only for requests that hold no block, so what was computed in former ones counts no more.
        tracked.offer, tracked.wanted = NO_BLOCKS, NO_TOKENS
        tracked.step_loaded = tracked.computed = 0
        tokens = request.get_tokens(0)
        tracked.prompt_tokens = len(tokens)
        if not self.usable or tracked.keys is None or computed_tokens % self._block_tokens:
            return 0, False
        if tracked.ordered:
            return 0, False
        self.unit.grow()
        # The engine has to compute at least one token to sample from.
        end = (len(tokens) - 1) // self._block_tokens
        start = computed_tokens // self._block_tokens
        if start >= end:
            return 0, False
        keys = tracked.keys.of(tokens)[:end]
        match = self.unit.manager.match(str(tracked.request_id), [keys], start)
        self.counters.add("flexkv_lookup_tokens_total", (end - start) * self._block_tokens)
        self.unit.pump()
        if not match.blocks:
            self.unit.manager.release(str(tracked.request_id))
            return 0, False
        tracked.offer = range(start, start + match.blocks)
        tracked.wanted = tokens_of(tracked.offer, self._block_tokens)
        return match.blocks * self._block_tokens, not self._sync

    def allocated(self, request: Any, block_ids: list[int]) -> None:
        """The engine gave the request its blocks: orders the load that was promised.

        An async load goes to the ranks at once: its request is in no step's metadata, and there may be no step.
        """
        tracked = self._requests.of(request) if self._requests is not None else None
        if tracked is None or not tracked.offer or self.unit is None:
            return
        offer, taken = tracked.offer, tracked.wanted
        wanted = blocks_of(taken, self._block_tokens)
        tracked.offer, tracked.wanted = NO_BLOCKS, NO_TOKENS
        if not wanted:
            self._excuse(tracked)
            return
        self._renew(tracked, request, offer)
        # The engine may have found memory for less than it takes.
        given = block_ids[wanted.start : wanted.stop]
        targets = np.full(len(offer), NO_BLOCK, np.int32)
        first = wanted.start - offer.start
        targets[first : first + len(given)] = given
        graph = self.unit.manager.begin_load(str(tracked.request_id), [targets])
        self.counters.add("flexkv_hit_tokens_total", len(given) * self._block_tokens)
        if self._sync:
            if graph is not None:
                graph = graph.layerwise() if self._by_layer else graph
                self._loads.append(LoadJob(str(tracked.request_id), graph, sync=True))
            tracked.step_loaded = (wanted.start + len(given)) * self._block_tokens
            return
        if graph is not None:
            tracked.load, tracked.loading = graph.ops[0].op_id, taken
        else:
            # No rank will say that it has ended this one.
            tracked.spent = True
        job = LoadJob(str(tracked.request_id), graph, sync=False)
        self._listener.broadcast(LoadOrder(tracked.request_id, job))

    def _excuse(self, tracked: Tracked) -> None:
        """A promise was taken back whole. Of a load between steps the engine may wait for the end all the same."""
        if not self._sync:
            tracked.spent = True
            job = LoadJob(str(tracked.request_id), None, sync=False)
            self._listener.broadcast(LoadOrder(tracked.request_id, job))

    def _renew(self, tracked: Tracked, request: Any, offer: range) -> None:
        """Finds again what was promised, where the engine kept the offer for longer than its lease lives.

        Raises:
            TransferError: it is gone. The engine counts the tokens as loaded and knows no other way.
        """
        assert self.unit is not None
        assert tracked.keys is not None
        manager, request_id = self.unit.manager, str(tracked.request_id)
        if manager.leased_pages(request_id):
            return
        keys = tracked.keys.of(request.get_tokens(0))[: offer.stop]
        if manager.match(request_id, [keys], offer.start).blocks < len(offer):
            manager.release(request_id)
            raise TransferError(
                f"request {request_id}: the engine took up a promise of {len(offer)} blocks after more than "
                f"load.lease_s={self._config.load.lease_s:g} s, and they are not in host memory any more"
            )

    # --- the step ---

    def build(self, output: Any) -> StepMetadata:
        """The step's metadata. Costs O(requests). Nothing is started only here: an idle engine does not call it."""
        self._step += 1
        if self._requests is not None:
            for said in (*output.new_requests, *output.cached_requests):
                tracked = self._requests.get(int(said.request_id))
                if tracked is not None:
                    # The first report leaves out what was matched. Nobody says how much of it the engine took, so the
                    # two are not added up.
                    computed = int(said.computed_position) + int(said.num_scheduled_tokens)
                    tracked.computed = max(computed, tracked.step_loaded)
                    tracked.step_loaded = 0
        self.poll()
        loads, self._loads = tuple(self._loads), []
        batch = tuple(int(said.request_id) for said in (*output.new_requests, *output.cached_requests))
        return StepMetadata(self._step, self.address, loads, batch)

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """The request has ended; whether its blocks must stay until the workers have returned its id."""
        self.poll()
        tracked = self._requests.of(request) if self._requests is not None else None
        if tracked is None or self._requests is None or self.unit is None:
            return False
        self._requests.pop(tracked.request_id)
        self._drop_planned(tracked.request_id)
        graph = None
        loading = tracked.load is not None
        if tracked.ordered:
            self._listener.broadcast(CancelOrder(tracked.request_id))
        if not loading and self.usable:
            self.unit.grow()
            graph = self._plan_stores(tracked, request, block_ids)
        # After the stores, because it marks the request's blocks as used together.
        self.unit.manager.release(str(tracked.request_id))
        if graph is None and not tracked.ordered:
            return False
        self._listener.broadcast(SaveOrder(tracked.request_id, graph))
        return True

    def cancel_load(self, request_id: int, start: int = 0, end: int | None = None) -> None:
        """The engine will not take prompt tokens [start, end) of what it was promised; None for all from `start` on.

        A load under way can be taken back whole only: its blocks stay in use until the ranks return its id.
        """
        tracked = self._requests.get(request_id) if self._requests is not None else None
        if tracked is None or self.unit is None:
            return
        end = sys.maxsize if end is None else end
        if tracked.offer:
            tracked.wanted = still_wanted(tracked.wanted, start, end)
            if not tracked.wanted:
                self.unit.manager.release(str(request_id))
        elif tracked.load is not None:
            tracked.loading = still_wanted(tracked.loading, start, end)
            if not tracked.loading:
                tracked.spent = True
                self._listener.broadcast(CancelOrder(request_id))

    def forget(self, request_id: int) -> None:
        """The request lost its blocks and starts again: nothing that it computed may be stored from the new ones."""
        tracked = self._requests.get(request_id) if self._requests is not None else None
        if tracked is not None and self._requests is not None and self.unit is not None:
            self.cancel_load(request_id)
            self._drop_planned(request_id)
            self.unit.manager.release(str(request_id))
            self._requests.reset(request_id)

    def _drop_planned(self, request_id: int) -> None:
        """Loads inside the next step that no rank was told of: no rank will report them, and their blocks are freed."""
        assert self.unit is not None
        mine = [job for job in self._loads if job.request_id == str(request_id)]
        self._loads = [job for job in self._loads if job.request_id != str(request_id)]
        for op in (op for job in mine for op in job.ops):
            dropped = OpResult.cancelled(op.op_id, op.pages, "the request ended first")
            for rank in range(self._arguments.ranks):
                self.unit.manager.complete(rank, dropped)

    def _plan_stores(self, tracked: Tracked, request: Any, block_ids: list[int]) -> TransferGraph | None:
        if tracked.keys is None:
            return None
        assert self.unit is not None
        tokens = request.get_tokens(0)
        computed = tracked.computed
        if computed and len(tokens) > tracked.prompt_tokens:
            # A token was sampled, which takes all of the prompt.
            computed = max(computed, tracked.prompt_tokens)
        # The last token was sampled and not fed back, so it has no KV.
        end = min(computed, len(tokens) - 1)
        if self._config.store.tokens == "prompt" and tracked.prompt_tokens:
            end = min(end, tracked.prompt_tokens)
        blocks = np.asarray(block_ids[: max(0, end) // self._block_tokens], np.int32)
        keys = tracked.keys.of(tokens)
        ops: list[TransferOp] = []
        for first, last in present_runs(blocks):
            plan = self.unit.manager.begin_store(
                str(tracked.request_id), GROUP, keys[first:last], blocks[first:last], first
            )
            self.counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="busy")
            if plan.graph is not None:
                ops += plan.graph.ops
        return TransferGraph(tuple(ops)) if ops else None

    # --- the ranks ---

    def poll(self) -> None:
        """Takes what the ranks said, and gives the disks what there is to do. Never waits."""
        self._hear()
        unit = self.unit
        if unit is None:
            return
        if self._listener.broken and unit.usable:
            unit.disable(-1, f"a rank is gone: {self._listener.broken}")
        unit.pump()
        unit.expire_if_due(self.counters)

    def _hear(self) -> None:
        for report in self._listener.poll():
            self._take(report)

    def _take(self, report: RankReport) -> None:
        if report.facts is not None:
            self._facts[report.rank] = (report.facts, report.block_tokens)
            if len(self._facts) == self._arguments.ranks and self.unit is None and not self._off:
                self._make_unit()
        if self.unit is None or self._requests is None:
            return
        if report.error:
            self.unit.disable(report.rank, report.error)
        if report.ready is not None and report.ready >= 0:
            self.unit.heard({report.rank: report.ready})
            self._ready.add(report.rank)
        for result in report.results:
            done = self.unit.manager.complete(report.rank, result)
            if done is None or done.role is not OpRole.LOAD or len(done.failed_blocks):
                # A load that failed is reported nowhere, so its request still waits for it.
                continue
            tracked = self._requests.get(int(done.request_id))
            if tracked is not None and tracked.load == done.op_id:
                tracked.load = None

    def _make_unit(self) -> None:
        try:
            tokens = {tokens for _, tokens in self._facts.values()}
            if len(tokens) != 1:
                raise GeometryError(f"the ranks have blocks of {sorted(tokens)} tokens")
            self._block_tokens = tokens.pop()
            facts = {rank: said for rank, (said, _) in self._facts.items()}
            namespace = engine_namespace(self._arguments, self._config, self._block_tokens, facts[0].dtype)
            self.unit = HostUnit.create(
                self._config,
                self._block_tokens,
                facts[0].num_blocks,
                facts,
                True,
                None,
                UnitOwner(self._arguments.model, namespace, "rank0"),
            )
        except FlexKVError as error:
            # The engine is serving by now and can live without a cache.
            self._off = f"{type(error).__name__}: {error}"
            logger.error("nothing is cached: %s", self._off)
            return
        logger.warning(
            "TensorRT-LLM does not say when weights change: never update them in a running engine with this connector, "
            "or KV of the old ones is served; restart it with the new ones"
        )
        self._requests = RequestTable(self._block_tokens, namespace)
        self._listener.broadcast(self.unit.make_grant(on_device=True))

    def close(self) -> None:
        """Ends disks and host pool; says what the cache has done."""
        if self.unit is not None:
            # What has ended on all ranks is stored, and so goes to disk.
            self._hear()
            self.unit.count(self.counters)
            logger.info("rank 0: %s", self.unit.manager.stats())
            self.unit.close()
            self.unit = None
        self._listener.close()


def _has_hooks(config: FlexKVConfig, arguments: EngineArguments) -> bool:
    """Whether a forward may start before its loads have ended, because it asks for each layer."""
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


def present_runs(blocks: np.ndarray[Any, np.dtype[np.int32]]) -> list[tuple[int, int]]:
    """The ranges of positions whose block exists: the engine says -1 where it keeps no page."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (blocks >= 0).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]
