"""The scheduler's side of the vLLM adapter. The engine's hooks call it. It asks one cache manager which pages to load
and store, and makes orders for the workers from the manager's plans."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexkv.adapters.common.event_book import BOOK_NAME
from flexkv.adapters.common.settings_reader import SettingsReader
from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.blend.requests import BlendRequests
from flexkv.adapters.vllm.completions import CompletionHandler
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.handshakes import Handshakes
from flexkv.adapters.vllm.loads import Loads, forward_spares_loads
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, StepReport, WorkerMetadata
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.adapters.vllm.requests import RequestTable, RequestTracker
from flexkv.adapters.vllm.step_times import StepTimes
from flexkv.adapters.vllm.store_watch import BlockWatch
from flexkv.adapters.vllm.stored_block import hash_identity, hashed_request
from flexkv.adapters.vllm.stores import ScheduledBlocks, in_our_order, make_planner
from flexkv.adapters.vllm.weight_updates import reset_on_new_weights
from flexkv.adapters.vllm.worker import WorkerSide, current_device_is_host
from flexkv.cache.base import HUB, CacheListener
from flexkv.cache.stores.base import BlocksByGroup, StoreWatch
from flexkv.cache.stores.planner import StorePlanner
from flexkv.errors import ClosedError
from flexkv.facts.ranks import NO_UNIT
from flexkv.observe import BlendResult, Counters, PageLoss, get_logger
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
    """The scheduler's side of one ownership unit. The engine's scheduler thread calls all methods. Only two of them
    wait for copies: `close`, and `reset` if the engine may sleep afterwards.

    Attributes:
        requests: the live requests.
        events: KV cache events that the engine has not taken yet; None if it publishes none, or there is no unit yet.
        orders: orders for the workers, collected since the last step.
        unit: the engine's unit; a `NullUnit` until every rank has shaken hands.
        blend: decides which requests are blended; None if blending is off.
        workers: the worker sides of all ranks if the ranks run in this process; otherwise empty.
    """

    unit: EngineUnit
    workers: tuple[WorkerSide, ...]

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.counters = Counters()
        self.requests = RequestTable(spec, RequestFields(SettingsReader(self.counters, logger)))
        self.orders = ConnectorMetadata()
        self._watch = StoreWatch()
        self._watch_bound = False
        self._step = 0
        self._forward_step = 0
        self.handshakes = Handshakes(spec.ranks, self.counters)
        self.events: EventLog | None = None
        self._old_kv = False
        """Whether the engine may still have KV of weights that were replaced before the last reset."""
        self._was_asked = False
        """Whether the engine has looked up any request. Until then, none of its blocks has KV."""
        self.blend = (
            BlendRequests(spec.blend, spec.geometry.groups[0].block_tokens, spec.ranks, self.counters)
            if spec.blend is not None
            else None
        )
        self._serve(NullUnit(), (), StorePlanner())
        reset_on_new_weights(self)

    # --- set up ---

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Watches which blocks of the engine's block pool are reused."""
        share, groups = self._spec.config.store.max_reference_share, self._spec.geometry.groups
        self.bind_watch(BlockWatch(pool, share, groups[0].block_tokens))

    def bind_watch(self, watch: StoreWatch) -> None:
        """Sets the watch that reports which blocks are reused."""
        self._watch = watch
        self._watch_bound = True

    def take_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """Adds handshakes of ranks, and builds the unit when all ranks have sent theirs. Until then lookups miss.

        Raises:
            ContractError: a rank has already sent a handshake for another pool, so one of the two pools belongs to
                another engine.
            GeometryError: the ranks' handshakes do not agree.
            CapacityError: the host memory that flexkv may use is too small for one slot.
        """
        self.handshakes.take(ranks)
        if self.unit.state is UnitState.AWAITING_RANKS and self.handshakes.complete:
            was_reset = isinstance(self.unit, NullUnit) and self.unit.was_reset
            self._build()
            if was_reset:
                self._reset_built_unit()

    def _build(self) -> None:
        """Builds the unit, and attaches the workers that run in this process to it."""
        assert self._watch_bound, "the engine binds its block pool before the handshake"
        spec = self._spec
        self.handshakes.check_blocks(spec.geometry.num_blocks)
        workers = local_engines.workers_of_pools(self.handshakes.pools)
        unit = build_unit(
            spec.config,
            spec.geometry.kv_groups(),
            self.handshakes.of_rank,
            spec.owner,
            replace(spec.role, shared=not workers),
            prompt_limit=spec.prompt_limit,
            alignment_tokens=spec.geometry.alignment_tokens,
            prompt_keys=lambda tokens, salt: self.requests.keys_of(
                hashed_request(tokens, salt, spec.geometry.groups[0].hash_tokens, spec.block_hash)
            ),
        )
        with ExitStack() as on_error:
            on_error.callback(unit.close)
            for worker in workers:
                worker.attach(unit.unit_id, unit.pool, unit.places[worker.rank], unit.slabs)
            if not workers:
                unit.grant = unit.make_grant(not current_device_is_host())
            if spec.with_events:
                self.events = self._make_events(unit)
                unit.manager.hub.listeners.append(self.events)
            stores = make_planner(unit, spec, self._watch, self.counters, self.events)
            if isinstance(stores, CacheListener):
                unit.manager.hub.listeners.append(stores)
            if self.blend is not None:
                unit.manager.hub.listeners.append(self.blend)
            self._serve(unit, workers, stores)
            on_error.pop_all()
        if self.blend is not None:
            self.blend.take_verdicts([each.blend_refusal for each in self.handshakes.of_rank.values()])

    def _make_events(self, unit: LiveUnit) -> EventLog:
        """Makes the log of events. The log records in the folder of the unit's first disk which pages on disk were
        announced, so that the engine can announce them again after a restart."""
        geometry, algorithm = self._spec.geometry, self._spec.block_hash
        folder = None if unit.own_disks is None else unit.own_disks.volumes.folder
        return EventLog(
            geometry,
            self._spec.namespace,
            unit.manager.tiers[HUB],
            unit.own_disks,
            None if folder is None else folder / BOOK_NAME,
            lambda: hash_identity(geometry.groups[0].hash_tokens, algorithm),
        )

    def _serve(self, unit: EngineUnit, workers: tuple[WorkerSide, ...], stores: StorePlanner) -> None:
        """Makes `unit` serve the engine from now on."""
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

    def enter(self, request: Request) -> None:
        """Starts blending or prefetching a request that has entered the engine's queue."""
        if self.blend is not None:
            self.blend.enter(self._tracker(request))
        self.prefetch(request)

    def prefetch(self, request: Request) -> None:
        """Starts to fetch a request's pages from the tiers behind host memory while the request waits in the engine's
        queue."""
        if not self.unit.usable or not self.unit.has_tiers or not self._spec.role.loads:
            return
        self.unit.grow()
        if self._loads.prefetch(self._tracker(request), self._watch.has_cached):
            self._poll()

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Looks the request up. Returns how many tokens flexkv promises beyond the `computed_tokens` that the engine
        has, and whether the load is async.

        Returns (None, False) while more pages of the request are read from disk. Returns (None, False) for one step,
        too, if the load may get free blocks whose KV must be stored first. In either case the engine asks again in its
        next step.
        """
        unit = self.unit
        if self._old_kv and self._watch.is_empty():
            self._end_old_kv()
        self._was_asked = True
        if self.blend is not None and (blends := self.blend.match(request, computed_tokens)) is not False:
            self._begin_lookup(request, computed_tokens)
            return (0 if blends else None), False
        if not unit.usable:
            return 0, False
        if not self._spec.role.loads:
            self._begin_lookup(request, computed_tokens)
            return 0, False
        self._completions.collect_early()
        self._poll()
        unit.grow()
        tracker = self._begin_lookup(request, computed_tokens)
        if self.blend is None and tracker.settings.blend is not None:
            self.counters.add("flexkv_blend_requests_total", result=BlendResult.OFF.result)
            tracker.settings = replace(tracker.settings, blend=None)  # so that the request is counted once
        tokens = self._loads.match(tracker, computed_tokens)
        # This poll starts to read the pages that the lookup has found on disk.
        self._poll()
        if tokens is None or (tokens and self._store_before_load(tracker, tokens)):
            return None, False
        return tokens, tokens > 0 and self._spec.config.load.mode == "async"

    def _begin_lookup(self, request: Request, computed_tokens: int) -> RequestTracker:
        """Prepares the tracker of a request that the engine looks up, and returns it. Marks the request as stale if it
        may have found blocks with KV of replaced weights in the engine's own prefix cache.

        Such blocks cannot be listed by their hashes at the reset, because a block gets its hash only when it is full,
        or when its load has ended, which may be after the reset.
        """
        geometry, tracker = self._spec.geometry, self._tracker(request)
        self.requests.begin_lookup(tracker, self._preempted)
        has_old_kv = self._old_kv and (computed_tokens > 0 or geometry.has_hits_within_blocks)
        tracker.stale = tracker.adapter_changed or has_old_kv
        tracker.own_from = computed_tokens // geometry.groups[0].block_tokens
        return tracker

    def _end_old_kv(self) -> None:
        """Called when the engine's pool is empty, so that none of its blocks has KV of replaced weights any more."""
        self._old_kv = False
        self._stores.pool_emptied()

    def _store_before_load(self, tracker: RequestTracker, tokens: int) -> bool:
        """Orders the workers to store the free blocks that the engine may hand to a load of `tokens` tokens. Returns
        whether the load has to wait until they are stored. A load waits only once, for one step. Then the copies run
        during that step's forward pass, and not between two forward passes.
        """
        graph = self._stores.plan_before_load(-(-tokens // self._spec.geometry.groups[0].block_tokens))
        if graph is None:
            return False
        self.orders.early.append(graph)
        waits, tracker.made_way = not tracker.made_way, True
        return waits

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Orders the load of those `external_tokens` promised tokens that the engine takes. The engine calls this after
        it has allocated the request's blocks."""
        if self.unit.state is UnitState.AWAITING_RANKS:
            return
        tracker = self._tracker(request)
        if tracker.promise is None and external_tokens == 0:
            return
        job = self._loads.begin(tracker, blocks, external_tokens)
        if job is not None:
            self.orders.loads.append(job)

    def supplied(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Returns how many tokens of the request's last load came from each source; empty if that is not known."""
        tracker = self.requests.live.get(request.request_id)
        return self._loads.sources(tracker, external_tokens) if tracker is not None else {}

    def _tracker(self, request: Request) -> RequestTracker:
        """Returns the request's tracker. If blocks of an earlier request with the same id still wait to be stored,
        gives up storing them, because the manager identifies requests by their ids.
        """
        if self._stores.holds:
            self._stores.holds.end_request(request.request_id, PageLoss.HOLD_EXPIRED)
        return self.requests.of(request)

    # --- the step ---

    def build(self, output: SchedulerOutput) -> ConnectorMetadata:
        """Makes the workers' orders for the step `output`. Costs O(requests + new blocks)."""
        self._step += 1
        unit = self.unit
        if self.events is not None:
            self.events.begin_book()
        if unit.state is UnitState.AWAITING_RANKS:
            self.handshakes.warn_if_missing(self._step)
        scheduled = self.requests.follow(output, self._stores.started, self._preempted)
        if output.total_num_scheduled_tokens:
            self._forward_step = self._step
        self.orders.step = self._forward_step
        unit.grow()
        if unit.usable:
            blocks = ScheduledBlocks(self._spec.geometry, output)
            idle = not output.total_num_scheduled_tokens
            self._stores.plan_step(scheduled, blocks, self.orders, idle)
        elif self._stores.holds:
            self._stores.holds.end_all(PageLoss.NO_SLOT)
        if self.blend is not None:
            for tracker in scheduled:
                self.blend.chunk(tracker)
            self.orders.blend = self.blend.take_orders()
        if self._watch.ops and (reused := self._watch.take_reused()):
            self._order_ends(reused, output)
        self._poll()
        unit.expire_if_due(self.counters)
        self.orders.disk_busy = unit.busy or (self.blend is not None and self.blend.moves_pages)
        self.orders.grant = unit.grant
        if self._steps is not None and output.total_num_scheduled_tokens:
            sync = any(job.sync for job in self.orders.loads)
            self._steps.began(self._forward_step, output, sync)
        # The orders name the unit even if it is disabled, because the workers' reports on these orders end the unit's
        # last ops.
        self.orders.unit = unit.unit_id
        self.orders.idle = output.total_num_scheduled_tokens == 0
        self.orders.spares_loads = forward_spares_loads(self._spec.geometry, output)
        orders, self.orders = self.orders, ConnectorMetadata()
        return orders

    def update(self, output: KVConnectorOutput) -> None:
        """Handles the workers' reports of a step. Handles failed blocks first, so that flexkv publishes no block that
        was computed from a failed block."""
        if output.invalid_block_ids:
            self._completions.take_failed_blocks(set(output.invalid_block_ids))
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerMetadata):
            self._take_reports(report)

    def collect(self) -> None:
        """Handles the reports of workers in this process, for a connector class that does not pass reports to
        `update`."""
        for worker in self.workers:
            if (report := worker.take_metadata()) is not None:
                self._take_reports(report)

    def finished(self, request: Request, blocks: BlocksByGroup | None = None) -> None:
        """Ends the request. The engine calls this before it frees the request's blocks.

        Args:
            blocks: the request's current blocks, by the engine's group number; None if the engine does not pass them.
        """
        if self.blend is not None:
            self.blend.end(request.request_id)
        tracker = self.requests.live.pop(request.request_id, None)
        if tracker is None:
            return
        if tracker.loading is not None:
            # The load is no longer needed. The engine frees the load's blocks only after the workers have reported its
            # end.
            self.orders.cancel.append(tracker.loading)
        else:
            self._completions.collect_early()
            self._completions.retire(tracker, self._forward_step)
            self.requests.note_end(tracker)
            ours = None if blocks is None else in_our_order(self._spec.geometry, blocks)
            self.orders.early += self._stores.ended(tracker, ours)
            if self.orders.early and self.workers and current_device_is_host():
                self._submit_early()
        if not self._stores.holds or tracker.request_id not in self._stores.holds:
            # `end_request` comes last, because it records for eviction that all blocks of the request were used
            # together.
            self.unit.manager.end_request(tracker.request_id)

    def _submit_early(self) -> None:
        """Submits at once the early store operations, which otherwise wait for the next step. This is safe because the
        forward pass that wrote their blocks has returned, and necessary because there may be no further step.
        """
        early, self.orders.early = self.orders.early, []
        for worker in self.workers:
            worker.before_forward(ConnectorMetadata(self.unit.unit_id, step=self._forward_step, early=early))

    def _preempted(self, tracker: RequestTracker) -> None:
        if self.blend is not None:
            self.blend.preempted(tracker.request_id)
        self._stores.preempted(tracker)
        self._completions.retire(tracker, self._forward_step)

    def _take_reports(self, metadata: WorkerMetadata) -> None:
        ours: list[StepReport] = []
        for report in metadata.reports:
            own = self.unit.unit_id
            if self.blend is not None and report.unit in (own, NO_UNIT):
                self.blend.take_arrived(report.rank, report.blend_arrived)
                self.blend.take_stored(report.rank, report.blend_stored)
                if report.blend_disk is not None:
                    self.blend.take_disk_busy(report.rank, report.blend_disk)
            if report.unit == own != NO_UNIT:
                # The report counts even if the rank's engine has registered another pool since. The rank itself reports
                # such a change.
                ours.append(report)
            elif not self.handshakes.refuses(report, own) and report.handshake is not None and own == NO_UNIT:
                self.take_handshake({report.rank: report.handshake})
        for tracker in self._completions.end_changed():
            self.orders.void += self._loads.ops_of(tracker.request_id)
        step = self._completions.take(ours)
        if self._steps is not None and step:
            self._steps.ended(step)
        self._poll()

    def _poll(self) -> None:
        """Polls the unit's tiers, and notes whether the metrics may have changed."""
        if self.unit.poll():
            self._completions.changed = True

    def _order_ends(self, reused: dict[OpId, list[int]], output: SchedulerOutput) -> None:
        """Orders the workers to finish copies that read blocks which the engine has reused, before the step writes to
        those blocks. `reused` maps each op to the positions of its reused blocks.
        """
        self.orders.reused = reused
        if self._spec.geometry.has_states or output.kv_cache_block_copies or output.new_block_ids_to_zero:
            # Some model runners write to new blocks before they call the connector, when they copy, clear or move
            # states. The copies may then have read new bytes, so the copied bytes must not be used.
            self.orders.void += reused

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Whether the engine must continue to step although it has no requests."""
        self._completions.collect_early()
        if self.blend is not None and self.blend.has_work:
            return True
        unit = self.unit
        self._poll()
        if self.events is not None:
            # `has_work` also calls `begin_book`: an engine without requests steps only while `has_work` is true, and
            # only a step announces events.
            self.events.begin_book()
            if self.events.has_more:
                return True
        if unit.busy:
            return True
        if not unit.usable:
            # The engine need not wait for ops in flight: a rank that cannot use the pool may never report its ops.
            return False
        if unit.manager.inflight_ops() or self.orders.early or self.orders.cancel or unit.grant:
            return True
        if self._stores.holds:
            return True
        # If counts have changed, one more step is needed, so that metrics show the state after the last copy.
        return self._completions.changed

    def reset(self) -> bool:
        """Permanently turns all pages stored so far into misses. The engine calls this when it resets its caches, and
        before it sleeps.

        Returns:
            False if a load is in flight. The load is then reported as failed, because otherwise its request would
            continue with KV of the old weights. The engine should reset again when its own blocks are free. Also False
            if the engine may sleep after a reset and a copy could not be ended; vLLM then does not sleep. Otherwise
            True.
        """
        self.forget()
        if self._spec.role.ends_copies and not self._end_copies():
            return False
        return not self._loads.jobs

    def forget(self) -> None:
        """Permanently turns all pages stored so far into misses, because the weights may have changed. Loads in flight
        fail. If a rank has not shaken hands yet, the tiers are reset later, before anything is stored or promised.
        """
        self._completions.collect_early()
        if self.blend is not None:
            self.blend.reset()
        self.unit.manager.reset()
        self._old_kv = self._was_asked and not self._watch.is_empty()
        if self.unit.state is UnitState.AWAITING_RANKS:
            return
        self.orders.void.extend(self._loads.jobs)
        self.counters.add("flexkv_resets_total")
        for tracker in self.requests.live.values():
            tracker.stale = tracker.adapter_changed or bool(tracker.block_ids)
            tracker.promise = None
        # If the engine's own reset failed or did not happen, its blocks still have KV of the old weights.
        self._stores.reset(self._watch.hashes())
        if not self._old_kv:
            self._end_old_kv()

    def _reset_built_unit(self) -> None:
        """Repeats a reset that came before the unit was built, because disks may hold pages of the old weights.

        If the engine had computed KV before that reset, the KV that it has computed since may depend on the earlier KV,
        so nothing that the engine has now is stored.
        """
        if self._old_kv:
            self.forget()
        else:
            self.unit.manager.reset()
            self.counters.add("flexkv_resets_total")

    def _end_copies(self) -> bool:
        """Ends all copies, and drops store operations that were not submitted yet. Returns whether no copy is in
        flight."""
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
        """Returns the metrics counted since the last call as plain data; None if nothing was counted."""
        if self._completions.changed:
            self._completions.changed = False
            self.unit.count(self.counters)
        return self.counters.take() if self.counters.data else None

    def close(self) -> None:
        """Closes the workers in this process, the tiers and the host pool. Idempotent."""
        if self.unit.state is UnitState.CLOSED:
            return
        for worker in self.workers:
            worker.close_lanes()
        # `collect_early` publishes the pages that these workers have finished storing, so that `unit.close` writes them
        # to other tiers.
        self._completions.collect_early()
        self._watch.close()
        self.unit.close()
        if self.events is not None:
            # The events are closed after the unit, because the unit's close still writes pages that wait for the disk.
            self.events.close()
        # The workers are closed last: vLLM may kill its core process seconds after it asks the process to end, and the
        # unit must have written its pages by then.
        for worker in self.workers:
            worker.close()
