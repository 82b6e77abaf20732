"""The scheduler's side: drives one cache manager with what the engine says, and turns its plans into orders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexkv.adapters.vllm import local_link
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.lazy import LazyPlanner
from flexkv.adapters.vllm.lookups import Lookups
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, LoadJob, WorkerMetadata
from flexkv.adapters.vllm.references import BlockWatch, StoreWatch
from flexkv.adapters.vllm.request import RequestTracker, wants_no_store
from flexkv.adapters.vllm.stores import StorePlanner, StoreRules, first_failed
from flexkv.adapters.vllm.unit import HostUnit
from flexkv.adapters.vllm.worker import WorkerSide, current_device_is_host
from flexkv.cache.base import Completion, OpRole
from flexkv.cache.keys import EngineKeyChain
from flexkv.config import FlexKVConfig
from flexkv.observe import Counters, get_logger
from flexkv.transfer.graph import OpId, OpResult, TransferGraph

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

EXPIRE_EVERY_S = 1.0
"""How often leases of lookups that were never followed up are looked through; they live for a minute by default."""


@dataclass(frozen=True, slots=True)
class Use:
    """What the engine wants of the cache.

    Attributes:
        loads: answer lookups (vLLM's kv_role is kv_both or kv_consumer).
        stores: store blocks (kv_both or kv_producer).
        drop_last_block: see `Lookups`.
    """

    loads: bool = True
    stores: bool = True
    drop_last_block: bool = False


class SchedulerSide:
    """One ownership unit. All methods are called by the engine's scheduler thread; none waits for a copy."""

    def __init__(
        self,
        config: FlexKVConfig,
        geometry: BlockGeometry,
        namespace: bytes,
        engine_id: str,
        ranks: int,
        step_tokens: int,
        with_events: bool = False,
        stores_end_in_step: bool = False,
        use: Use = Use(),
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._namespace = namespace
        self._engine_id = engine_id
        self._ranks = ranks
        self._step_tokens = step_tokens
        self._stores_end_in_step = stores_end_in_step
        self._use = use
        self.handshakes: dict[int, Handshake] = {}
        self.trackers: dict[str, RequestTracker] = {}
        self.orders = ConnectorMetadata()
        self._loading: dict[OpId, LoadJob] = {}
        self.unit: HostUnit | None = None
        self._lookups: Lookups | None = None
        self._stores: StorePlanner | None = None
        self._lazy: LazyPlanner | None = None
        self._watch: StoreWatch | None = None
        self._local: tuple[WorkerSide, ...] = ()
        self._step = 0
        self._levels_changed = False
        self._expire_at_s = 0.0
        self.counters = Counters()
        self.events = EventLog(with_events, geometry)

    # --- set up ---

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Takes the engine's block pool, which says when a block is handed out again."""
        self.bind_watch(BlockWatch(pool, self._config.store.max_reference_share))

    def bind_watch(self, watch: StoreWatch) -> None:
        """Takes what says when a block is handed out again."""
        self._watch = watch

    def find_ranks(self) -> None:
        """Takes the handshake of workers in this process from themselves."""
        workers = local_link.workers_here(self._engine_id, self._ranks)
        handshakes = {worker.rank: worker.handshake() for worker in workers}
        self.take_handshake({rank: said for rank, said in handshakes.items() if said is not None})

    def take_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """When every rank's geometry is known: sizes and creates the host pool. Until then nothing is promised.

        Raises:
            GeometryError: the ranks do not agree.
            CapacityError: not even one slot fits.
        """
        self.handshakes.update(ranks)
        if self.unit is not None or len(self.handshakes) < self._ranks:
            return
        assert self._watch is not None, "the engine binds its block pool before the handshake"
        self._local = local_link.workers_here(self._engine_id, self._ranks)
        unit = HostUnit.create(self._config, self._geometry, self.handshakes, not self._local, self.events)
        for worker in self._local:
            worker.attach(unit.pool, unit.places[worker.rank])
        unit.grant = None if self._local else unit.make_grant()
        manager, store = unit.manager, self._config.store
        rules = StoreRules(self._geometry.block_tokens, store.tokens == "prompt", store.partial_blocks)
        self.unit = unit
        self._lookups = Lookups(
            manager,
            self._geometry,
            self._namespace,
            store.partial_blocks,
            self.counters,
            self._use.drop_last_block,
        )
        self._stores = StorePlanner(manager, self._watch, rules, self._namespace, self.counters, self.events)
        if store.mode == "lazy":
            self._lazy = LazyPlanner(
                manager,
                self._watch,
                self._geometry,
                self._namespace,
                self._step_tokens,
                self.counters,
                self.events,
            )

    # --- lookups and loads ---

    def match(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether the load runs between its steps."""
        if self.unit is None or self._lookups is None or not self.unit.usable or not self._use.loads:
            return 0, False
        self._collect_early()
        self.unit.grow()
        tracker = self._tracker(request)
        # The engine asks only for requests that hold no block.
        tracker.stale = False
        tracker.own_from = computed_tokens // self._geometry.block_tokens
        tokens = self._lookups.match(tracker, computed_tokens)
        return tokens, tokens > 0 and self._config.load.mode == "async"

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave the request its blocks, and takes `external_tokens` of what was promised."""
        if self._lookups is None:
            return
        tracker = self._tracker(request)
        if external_tokens == 0 and tracker.lookup is None:
            return
        promised = tracker.lookup is not None
        graph = self._lookups.begin_load(tracker, blocks, external_tokens)
        sync = self._config.load.mode == "sync"
        if graph is not None:
            job = LoadJob(tracker.request_id, graph, sync)
            self.orders.loads.append(job)
            for op in job.ops:
                self._loading[op.op_id] = job
                if not sync:
                    tracker.loading = op.op_id
        elif external_tokens > 0 and not promised:
            # The engine counts on blocks that nobody fills. It must hear that they failed.
            logger.error(
                "request %s: %d tokens were taken without a promise", tracker.request_id, external_tokens
            )
            self.orders.loads.append(
                LoadJob(tracker.request_id, None, sync, tuple(blocks.get_block_ids()[0]))
            )

    # --- the step ---

    def build(self, output: SchedulerOutput) -> ConnectorMetadata:
        """The step's orders. Costs O(requests + new blocks)."""
        self._step += 1
        self._follow(output)
        if self.unit is not None and self.unit.usable:
            self.unit.grow()
            if self._lazy is not None and self._use.stores:
                self._note_certain(output)
                self._add(self.orders.early, self._lazy.plan())
            elif self._use.stores:
                self._plan_eager(output)
            self._watch_reuse(output)
            self.orders.grant = self.unit.grant
            self._expire()
        self.orders.idle = output.total_num_scheduled_tokens == 0
        orders, self.orders = self.orders, ConnectorMetadata()
        return orders

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the workers' reports of a step: failures first, so that nothing computed from them is published."""
        if output.invalid_block_ids:
            self._take_failed_blocks(set(output.invalid_block_ids))
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerMetadata):
            self._take_report(report)

    def collect(self) -> None:
        """Takes the reports of workers in this process, for a connector class that does not carry them."""
        for worker in self._local:
            if (report := worker.take_metadata()) is not None:
                self._take_report(report)

    def finished(self, request: Request) -> None:
        """The request has ended, its blocks are about to be freed."""
        tracker = self.trackers.pop(request.request_id, None)
        if tracker is None or self.unit is None or self._stores is None:
            return
        if tracker.loading is not None:
            # Nobody waits for the load any more; its blocks stay with the request until the workers have reported.
            self.orders.cancel.append(tracker.loading)
        elif self._lazy is not None:
            assert self._stores is not None
            self._settle_suspects(tracker, self._stores.certain_at_end(tracker))
        elif self._use.stores and not self._stores_end_in_step and self.unit.usable:
            self._store_rest(tracker)
        # Last, because it marks the request's blocks as used together.
        self.unit.manager.release(tracker.request_id)

    def _settle_suspects(self, tracker: RequestTracker, certain_tokens: int) -> None:
        """For lazy stores: which of the request's blocks hold what their hash says, now that it lets go of them."""
        assert self._lazy is not None
        assert self._stores is not None
        if tracker.stale:
            self._lazy.suspect(tracker.block_ids)
            self._stores.taint(tracker, 0, len(tracker.block_ids))
            return
        good = max(0, certain_tokens) // self._geometry.block_tokens
        if tracker.suspect_from is not None:
            self._lazy.trust(tracker.block_ids[tracker.suspect_from : good])
        self._hold_back(tracker, good)

    def _hold_back(self, tracker: RequestTracker, good: int) -> None:
        """For lazy stores: the engine names a block by its hash when it plans to compute it, so a free block may carry
        a hash and not the KV. Nor may it be stored when the caller or `store.tokens` says so."""
        assert self._lazy is not None
        first = min(good, tracker.own_from) if tracker.skip_save else good
        self._lazy.suspect(tracker.block_ids[first:])

    def _store_rest(self, tracker: RequestTracker) -> None:
        """What was generated since the last whole block was stored, and the tail, before their blocks are freed."""
        assert self._stores is not None
        self._collect_early()
        self._bar_doubtful(tracker)
        certain = self._stores.certain_at_end(tracker)
        tracker.retry_step = 0
        graphs = (self._stores.plan(tracker, certain, self._step), self._stores.plan_tail(tracker, certain))
        for graph in graphs:
            self._add(self.orders.early, graph)
        if self._local and current_device_is_host() and self.orders.early:
            # The forward that wrote the blocks has returned, and no further step may ever come.
            early, self.orders.early = self.orders.early, []
            for worker in self._local:
                worker.before_forward(ConnectorMetadata(early=early))

    def _bar_doubtful(self, tracker: RequestTracker) -> None:
        """The request may share targets of another's load within a step, whose end nobody knows yet. Once the request
        is gone, nobody could tell any more which of its stores were computed from a target that failed."""
        assert self.unit is not None
        others = (job for job in self._loading.values() if job.sync and job.request_id != tracker.request_id)
        targets = {block for job in others for op in job.ops for block in op.blocks.tolist()}
        if targets and (first := first_failed(tracker, targets)) is not None:
            self.unit.manager.discard_from(tracker.request_id, first)

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Whether the engine has to keep stepping although no request runs."""
        unit = self.unit
        if unit is None or not unit.usable:
            return False
        self._collect_early()
        if unit.manager.inflight_ops() or self.orders.early or self.orders.cancel or unit.grant:
            return True
        # One more step, so that the gauges show the end of the last copy and not the state before.
        return self._levels_changed

    def reset(self) -> bool:
        """New weights: nothing stored before is ever a hit again.

        Returns:
            False when a load is in flight: its request would go on with KV of the old weights, and so is told that
            the load failed. The engine should reset again when its own blocks are free.
        """
        if self.unit is None or self._stores is None:
            return True
        self._collect_early()
        self.unit.manager.reset()
        self.orders.void.extend(self._loading)
        self.counters.add("flexkv_resets_total")
        for tracker in self.trackers.values():
            tracker.stale = bool(tracker.block_ids)
            tracker.lookup = None
        assert self._watch is not None
        # Blocks whose hash survived the engine's own reset (it failed, or there was none) hold KV of the old weights.
        stale = {b.block_id: b.block_hash for b in self._watch.pool.blocks if b.block_hash is not None}
        self._stores.stale_hashes = stale
        if self._lazy is not None:
            self._lazy.reset(stale)
        return not self._loading

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV cache events since the last call."""
        return self.events.take()

    def take_counters(self) -> Counters | None:
        """Values of the metrics since the last call; None when nothing happened."""
        if self.unit is not None and self._levels_changed:
            self._levels_changed = False
            self.unit.count(self.counters)
        return self.counters.take() if self.counters else None

    def close(self) -> None:
        """Ends the host pool; the workers' lanes have ended, or end by themselves."""
        if self.unit is not None:
            for worker in self._local:
                worker.close()
            self.unit.close()
            self.unit = None

    # --- internals ---

    def _tracker(self, request: Request) -> RequestTracker:
        tracker = self.trackers.get(request.request_id)
        if tracker is None:
            chain = EngineKeyChain(self._namespace, 0)
            ratio = self._geometry.hashes_per_block
            tracker = RequestTracker(request, chain, wants_no_store(request), ratio)
            self.trackers[request.request_id] = tracker
        return tracker

    def _follow(self, output: SchedulerOutput) -> None:
        """Keeps the block tables: O(new blocks)."""
        trackers = self.trackers
        for request_id in output.preempted_req_ids or ():
            if tracker := trackers.get(request_id):
                if self._lazy is not None:
                    # The engine has already set the request back to nothing computed.
                    self._settle_suspects(tracker, tracker.certain)
                tracker.restart()
        for new in output.scheduled_new_reqs:
            if tracker := trackers.get(new.req_id):
                self._start(tracker, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if tracker := trackers.get(request_id):
                if request_id in cached.resumed_req_ids:
                    self._start(tracker, blocks[0])
                else:
                    tracker.block_ids.extend(blocks[0])

    def _start(self, tracker: RequestTracker, block_ids: list[int]) -> None:
        """The request begins, or begins again, with this block table."""
        # What was loaded before a reset is still there; only losing the blocks ends that.
        stale = tracker.stale
        tracker.restart()
        tracker.stale = stale
        tracker.block_ids.extend(block_ids)
        if self._stores is not None:
            self._stores.mark_stale(tracker)

    def _plan_eager(self, output: SchedulerOutput) -> None:
        stores = self._stores
        assert stores is not None
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self.trackers.get(request_id)
            if tracker is not None:
                certain = stores.certain_after_step(tracker, scheduled)
                self._add(self.orders.stores, stores.plan(tracker, certain, self._step))

    def _note_certain(self, output: SchedulerOutput) -> None:
        """For lazy stores, which look at a request only when it has lost its blocks."""
        assert self._stores is not None
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if tracker := self.trackers.get(request_id):
                tracker.certain = self._stores.certain_after_step(tracker, scheduled)

    def _watch_reuse(self, output: SchedulerOutput) -> None:
        assert self._watch is not None
        reused = self._watch.take_reused()
        if reused:
            self.orders.reused = reused
            for op_id in reused if output.kv_cache_block_copies or output.new_block_ids_to_zero else ():
                # Some model runners copy into and clear new blocks before they call the connector.
                self.orders.void.append(op_id)

    @staticmethod
    def _add(graphs: list[TransferGraph], graph: TransferGraph | None) -> None:
        if graph is not None:
            graphs.append(graph)

    def _expire(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._expire_at_s and self.unit is not None:
            self._expire_at_s = now_s + EXPIRE_EVERY_S
            self.counters.add("flexkv_expired_leases_total", self.unit.manager.expire())

    def _collect_early(self) -> None:
        """Takes results from workers in this process without waiting for a step's report."""
        if self._local and self.unit is not None and self.unit.manager.inflight_ops():
            # Never ahead of a failed load: see WorkerSide.take_results_early.
            for worker in self._local:
                for result in worker.take_results_early():
                    self._complete(worker.rank, result)

    def _take_report(self, report: WorkerMetadata) -> None:
        if report.handshakes:
            self.take_handshake(report.handshakes)
        if self.unit is None:
            return
        for rank, error in report.errors.items():
            self.unit.disable(rank, error)
        self.unit.heard(report.ready)
        for rank, result in sorted(report.results, key=lambda item: item[1].op_id not in self._loading):
            self._complete(rank, result)
        for worker in self._local:
            worker.heard(result.op_id for _, result in report.results)

    def _complete(self, rank: int, result: OpResult) -> None:
        assert self.unit is not None
        completion = self.unit.manager.complete(rank, result)
        if completion is None:
            return
        self._levels_changed = True
        if completion.role is OpRole.LOAD:
            self._end_load(completion)
        else:
            self._end_store(completion)

    def _end_load(self, completion: Completion) -> None:
        self._loading.pop(completion.op_id, None)
        tracker = self.trackers.get(completion.request_id)
        if tracker is not None and tracker.loading == completion.op_id:
            tracker.loading = None
        if len(completion.failed_blocks):
            self._take_failed_blocks(set(completion.failed_blocks.tolist()))

    def _end_store(self, completion: Completion) -> None:
        assert self._watch is not None
        self._watch.end(completion.op_id)
        self.counters.add("flexkv_unpublished_pages_total", len(completion.failed_blocks))
        self.events.ended(completion.op_id)
        if self._lazy is not None:
            self._lazy.offer_again(completion.failed_blocks)

    def _take_failed_blocks(self, failed: set[int]) -> None:
        """Nothing that was computed from these blocks is published; the engine computes them again."""
        assert self.unit is not None
        for tracker in self.trackers.values():
            first = first_failed(tracker, failed)
            if first is None:
                continue
            self.unit.manager.discard_from(tracker.request_id, first)
            tracker.cursor = min(tracker.cursor, first)
            tracker.retry_step = 0
            tracker.suspect_from = first if tracker.suspect_from is None else min(first, tracker.suspect_from)
