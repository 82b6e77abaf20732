"""The scheduler's side: drives one cache manager with what the engine says, and turns its plans into orders."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.completions import CompletionHandler
from flexkv.adapters.vllm.eager_stores import EagerStores
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.handshakes import Handshakes
from flexkv.adapters.vllm.lazy_stores import LazyStores
from flexkv.adapters.vllm.loads import Loads, forward_spares_loads
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, WorkerMetadata
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.adapters.vllm.requests import RequestTable, RequestTracker
from flexkv.adapters.vllm.step_times import StepTimes
from flexkv.adapters.vllm.store_watch import BlockWatch, NoWatch, StoreWatch
from flexkv.adapters.vllm.stores import BlocksByGroup, NoStores, StoreMode, StoreTables
from flexkv.adapters.vllm.worker import WorkerSide, current_device_is_host
from flexkv.cache.base import CacheListener
from flexkv.errors import ClosedError
from flexkv.facts.ranks import NO_UNIT
from flexkv.observe import Counters, PageLoss, get_logger
from flexkv.transfer.graph import OpId
from flexkv.unit.base import EngineUnit, UnitState
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.null_unit import NullUnit

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class SchedulerSide:
    """One ownership unit. All methods are called by the engine's scheduler thread; none waits for a copy.

    Args:
        with_events: the engine publishes KV cache events.

    Attributes:
        requests: the live requests.
        events: KV cache events that the engine has not taken yet; None where it publishes none.
        orders: what has been ordered since the last step.
        unit: one that has nothing until every rank has shaken hands.
        workers: all ranks' worker sides if they live in this process, else none.
    """

    unit: EngineUnit
    workers: tuple[WorkerSide, ...]

    def __init__(self, spec: EngineSpec, with_events: bool = False) -> None:
        self._spec = spec
        self.counters = Counters()
        fields = RequestFields(self.counters, logger)
        scheme = spec.config.keys.scheme
        self.requests = RequestTable(spec.namespace, spec.geometry, scheme, spec.names, spec.adapters, fields)
        self.orders = ConnectorMetadata()
        self._watch: StoreWatch = NoWatch()
        self._watch_bound = False
        self._step = 0
        self._forward_step = 0
        self.handshakes = Handshakes(spec.ranks, self.counters)
        self.events = EventLog(spec.geometry) if with_events else None
        self._old_kv = False
        self._serve(NullUnit(), (), NoStores())

    # --- set up ---

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Takes the engine's block pool, which says when a block is handed out again."""
        self.bind_watch(BlockWatch(pool, self._spec.config.store.max_reference_share))

    def bind_watch(self, watch: StoreWatch) -> None:
        """Takes what says when a block is handed out again."""
        self._watch = watch
        self._watch_bound = True

    def take_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """When every rank's geometry is known: builds the unit. Until then nothing is promised.

        Raises:
            ContractError: a rank has shaken hands for another pool before. One of the two is another engine's.
            GeometryError: the ranks do not agree.
            CapacityError: not even one slot fits.
        """
        self.handshakes.take(ranks)
        if self.unit.state is UnitState.AWAITING_RANKS and self.handshakes.complete:
            was_reset = isinstance(self.unit, NullUnit) and self.unit.was_reset
            self._build()
            if was_reset:
                self._reset_built_unit()

    def _build(self) -> None:
        """Makes the unit, and what serves the engine with it."""
        assert self._watch_bound, "the engine binds its block pool before the handshake"
        spec = self._spec
        self.handshakes.check_blocks(spec.geometry.num_blocks)
        workers = local_engines.workers_of_pools(self.handshakes.pools)
        unit = build_unit(
            spec.config,
            spec.geometry.kv_groups(),
            self.handshakes.of_rank,
            spec.owner,
            spec.cache_role(shared=not workers),
            self.events,
            spec.prompt_limit,
            alignment_tokens=spec.geometry.alignment_tokens,
        )
        with ExitStack() as on_error:
            on_error.callback(unit.close)
            for worker in workers:
                worker.attach(unit.unit_id, unit.pool, unit.places[worker.rank], unit.slabs)
            if not workers:
                unit.grant = unit.make_grant(not current_device_is_host())
            stores = self._make_stores(unit)
            if isinstance(stores, CacheListener):
                unit.manager.hub.listeners.append(stores)
            self._serve(unit, workers, stores)
            on_error.pop_all()

    def _make_stores(self, unit: LiveUnit) -> StoreMode:
        spec = self._spec
        if not spec.role.stores:
            return NoStores()
        mode = LazyStores if spec.config.store.mode == "lazy" else EagerStores
        return mode(StoreTables(unit, spec, self.requests, self._watch, self.counters, self.events))

    def _serve(self, unit: EngineUnit, workers: tuple[WorkerSide, ...], stores: StoreMode) -> None:
        """From now on the engine is served by `unit`."""
        self.unit, self.workers, self._stores = unit, workers, stores
        self._loads = Loads(unit, self._spec, self.counters)
        self._completions = CompletionHandler(
            unit,
            workers,
            self.requests,
            self._loads,
            stores,
            self._watch,
            self.counters,
            self.events,
            self._spec,
        )
        self._steps = (
            StepTimes(unit.manager.cost.compute) if isinstance(unit, LiveUnit) and unit.has_tiers else None
        )

    # --- lookups and loads ---

    def prefetch(self, request: Request) -> None:
        """Reads of what tiers behind host memory have of a request begin while it waits in the engine's queue."""
        if not self.unit.usable or not self.unit.has_tiers or not self._spec.role.loads:
            return
        if self.unit.growing:
            self.unit.grow()
        if self._loads.prefetch(self._tracker(request), self._watch.has_cached):
            self._poll()

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether the load runs between its steps.

        (None, False) while more is read from disk, or for a step in which blocks are stored that the load would be
        handed: the engine asks again with its next step.
        """
        unit = self.unit
        if not unit.usable or not self._spec.role.loads:
            return 0, False
        self._completions.collect_early()
        if unit.has_tiers:
            self._poll()
        if unit.growing:
            unit.grow()
        tracker = self._tracker(request)
        self.requests.begin_lookup(tracker, self._preempted)
        tracker.stale = False
        tracker.own_from = computed_tokens // self._spec.geometry.groups[0].block_tokens
        tokens = self._loads.match(tracker, computed_tokens)
        if unit.has_tiers:
            # What the lookup found on disk is asked for at once.
            self._poll()
        if tokens is None or (tokens and self._awaits_stores(tracker, tokens)):
            return None, False
        return tokens, tokens > 0 and self._spec.config.load.mode == "async"

    def _awaits_stores(self, tracker: RequestTracker, tokens: int) -> bool:
        """Begins the stores of free blocks that a load of so many tokens may be handed; whether it waits for them. It
        waits one step, so that the copies run beside that step's forward, and not between two of them."""
        graph = self._stores.before_load(-(-tokens // self._spec.geometry.groups[0].block_tokens))
        if graph is None:
            return False
        self.orders.early.append(graph)
        waits, tracker.made_way = not tracker.made_way, True
        return waits

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave the request its blocks, and takes `external_tokens` of what was promised."""
        if self.unit.state is UnitState.AWAITING_RANKS:
            return
        tracker = self._tracker(request)
        if tracker.promise is None and external_tokens == 0:
            return
        job = self._loads.begin(tracker, blocks, external_tokens)
        if job is not None:
            self.orders.loads.append(job)

    def supplied(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of the load that was begun last for the request, by where they came from; empty where that is not
        known."""
        tracker = self.requests.live.get(request.request_id)
        return self._loads.sources(tracker, external_tokens) if tracker is not None else {}

    def _tracker(self, request: Request) -> RequestTracker:
        """The request's tracker. The manager knows requests by their ids: one that is used again ends its hold."""
        if self._stores.holds:
            self._stores.holds.end_request(request.request_id, PageLoss.HOLD_EXPIRED)
        return self.requests.of(request)

    # --- the step ---

    def build(self, output: SchedulerOutput) -> ConnectorMetadata:
        """The step's orders. Costs O(requests + new blocks)."""
        self._step += 1
        unit = self.unit
        if unit.state is UnitState.AWAITING_RANKS:
            self.handshakes.warn_if_missing(self._step)
        self.requests.follow(output, self._stores, self._preempted)
        if output.total_num_scheduled_tokens:
            self._forward_step = self._step
        self.orders.step = self._forward_step
        if unit.growing:
            unit.grow()
        if unit.usable:
            self._stores.plan_step(output, self._step, self.orders)
        elif self._stores.holds:
            self._stores.holds.end_all(PageLoss.NO_SLOT)
        if self._watch.ops and (reused := self._watch.take_reused()):
            self._order_ends(reused, output)
        if unit.has_tiers:
            self._poll()
        unit.expire_if_due(self.counters)
        self.orders.disk_busy = unit.has_tiers and unit.busy
        self.orders.grant = unit.grant
        if self._steps is not None and output.total_num_scheduled_tokens:
            sync = any(job.sync for job in self.orders.loads)
            self._steps.began(self._forward_step, output, sync)
        # Also of a unit that is disabled: its last ops end by these orders' reports.
        self.orders.unit = unit.unit_id
        self.orders.idle = output.total_num_scheduled_tokens == 0
        self.orders.spares_loads = forward_spares_loads(self._spec.geometry, output)
        orders, self.orders = self.orders, ConnectorMetadata()
        return orders

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the workers' reports of a step: failures first, so that nothing computed from them is published."""
        if output.invalid_block_ids:
            self._completions.take_failed_blocks(set(output.invalid_block_ids))
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerMetadata):
            self._take_reports(report)

    def collect(self) -> None:
        """Takes the reports of workers in this process, for a connector class that does not carry them."""
        for worker in self.workers:
            if (report := worker.take_metadata()) is not None:
                self._take_reports(report)

    def finished(self, request: Request, blocks: BlocksByGroup | None = None) -> None:
        """The request has ended, its blocks are about to be freed; see `StoreMode.ended`."""
        tracker = self.requests.live.pop(request.request_id, None)
        if tracker is None:
            return
        if tracker.loading is not None:
            # Nobody waits for the load any more; its blocks stay with the request until the workers have reported.
            self.orders.cancel.append(tracker.loading)
        else:
            self._completions.collect_early()
            self._completions.retire(tracker, self._forward_step)
            self.orders.early += self._stores.ended(tracker, self._step, blocks)
            if self.orders.early and self.workers and current_device_is_host():
                self._submit_early()
        if not self._stores.holds or tracker.request_id not in self._stores.holds:
            # Last, because it marks the request's blocks as used together.
            self.unit.manager.end_request(tracker.request_id)

    def _submit_early(self) -> None:
        """The forward that wrote the blocks has returned, and no further step may ever come."""
        early, self.orders.early = self.orders.early, []
        for worker in self.workers:
            worker.before_forward(ConnectorMetadata(self.unit.unit_id, step=self._forward_step, early=early))

    def _preempted(self, tracker: RequestTracker) -> None:
        self._stores.preempted(tracker)
        self._completions.retire(tracker, self._forward_step)

    def _take_reports(self, report: WorkerMetadata) -> None:
        for part in (report, *report.others):
            own = self.unit.unit_id
            if part.unit == own != NO_UNIT:
                # Also of a rank whose engine has registered another pool, which reports so itself.
                self._completions.take(part)
                if self._steps is not None and part.step:
                    self._steps.ended(part.step)
            elif not self.handshakes.refuses(part, own) and own == NO_UNIT and part.handshakes:
                self.take_handshake(part.handshakes)
        if self.unit.has_tiers:
            self._poll()

    def _poll(self) -> None:
        """Gives the tiers of the unit what there is to do, and takes what they have done."""
        if self.unit.poll():
            self._completions.changed = True

    def _order_ends(self, reused: dict[OpId, list[int]], output: SchedulerOutput) -> None:
        """Orders that blocks which the engine has handed out again are read by their stores before the step writes
        them."""
        self.orders.reused = reused
        if self._spec.geometry.has_states or output.kv_cache_block_copies or output.new_block_ids_to_zero:
            # Some model runners copy, clear and move states into new blocks before they call the connector.
            self.orders.void += reused

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Whether the engine has to keep stepping although no request runs."""
        self._completions.collect_early()
        unit = self.unit
        if unit.has_tiers:
            self._poll()
            if unit.busy:
                return True
        if not unit.usable:
            # A rank that cannot use the pool may never report its ops.
            return False
        if unit.manager.inflight_ops() or self.orders.early or self.orders.cancel or unit.grant:
            return True
        if self._stores.holds:
            return True
        # One more step, so that the gauges show the end of the last copy and not the state before.
        return self._completions.changed

    def reset(self) -> bool:
        """New weights: nothing stored before is ever a hit again.

        Returns:
            False when a load is in flight: its request would go on with KV of the old weights, and so is told that
            the load failed. The engine should reset again when its own blocks are free. Where the engine may sleep
            after it, also when a copy is left that could not be ended: vLLM then does not sleep. True before every
            rank has shaken hands: then the reset is carried out as soon as they have, before anything is stored or
            promised.
        """
        self._completions.collect_early()
        self.unit.manager.reset()
        if self.unit.state is UnitState.AWAITING_RANKS:
            self._old_kv = any(tracker.block_ids for tracker in self.requests.live.values()) or bool(
                self._hashed_blocks()
            )
            return True
        self.orders.void.extend(self._loads)
        self.counters.add("flexkv_resets_total")
        for tracker in self.requests.live.values():
            tracker.stale = bool(tracker.block_ids)
            tracker.promise = None
        # Blocks whose hash survived the engine's own reset (it failed, or there was none) hold KV of the old weights.
        self._stores.reset(self._hashed_blocks())
        if self._spec.role.ends_copies and not self._end_copies():
            return False
        return not self._loads

    def _reset_built_unit(self) -> None:
        """Carries out a reset that came before there was anything to reset: disks may hold pages of the old weights.

        What the engine had computed before it may have spread since, so then nothing of what it has now is stored.
        """
        if self._old_kv:
            self.reset()
        else:
            self.unit.manager.reset()
            self.counters.add("flexkv_resets_total")

    def _hashed_blocks(self) -> dict[int, bytes]:
        """Blocks that the engine's own prefix cache knows, and their hashes."""
        if not self._watch_bound:
            return {}  # there is no block pool yet, so nothing was computed
        return {b.block_id: b.block_hash for b in self._watch.pool.blocks if b.block_hash is not None}

    def _end_copies(self) -> bool:
        """Ends every copy, and drops stores that are not begun yet; whether nothing moves any more."""
        if not self.workers:
            pending = self.unit.manager.inflight_ops()
            if pending:
                logger.error(
                    "%d copies are in flight on workers in other processes, so the engine must not sleep; step it "
                    "until it has no work left, then try again",
                    pending,
                )
            return not pending
        early, self.orders.early = self.orders.early, []
        ended = True
        for worker in self.workers:
            try:
                worker.end_copies(early)
            except ClosedError as error:
                logger.error("the engine must not sleep: %s", error)
                ended = False
        self._completions.collect_early()
        return ended

    def take_counters(self) -> dict[str, Any] | None:
        """Values of the metrics since the last call, as plain data; None when nothing happened."""
        if self._completions.changed:
            self._completions.changed = False
            self.unit.count(self.counters)
        return self.counters.take() if self.counters.data else None

    def close(self) -> None:
        """Ends tiers and host pool; the workers' lanes have ended, or end by themselves. Idempotent."""
        if self.unit.state is UnitState.CLOSED:
            return
        for worker in self.workers:
            worker.close()
        # What has ended in these workers, also while they closed, is stored, and so goes to other tiers.
        self._completions.collect_early()
        self._watch.close()
        self.unit.close()
