"""The scheduler's side: drives one cache manager with what the engine says, and turns its plans into orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flexkv.adapters.common.base import NO_UNIT, UnitOwner
from flexkv.adapters.common.capacity import PromptLimit
from flexkv.adapters.common.host_unit import HostUnit
from flexkv.adapters.vllm import local_link
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, WorkerMetadata
from flexkv.adapters.vllm.parts import Blueprint, Parts
from flexkv.adapters.vllm.request import RequestTracker
from flexkv.adapters.vllm.request_table import RequestTable
from flexkv.adapters.vllm.store_watch import BlockWatch, StoreWatch
from flexkv.adapters.vllm.use import Use
from flexkv.adapters.vllm.worker import current_device_is_host
from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError, ContractError
from flexkv.observe import Counters, get_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

HANDSHAKE_STEPS = 16
"""Steps after which a rank that has not shaken hands is missed. vLLM carries handshakes at its start, or with the
report of the first step; with two batches in flight that is heard with the third."""


class SchedulerSide:
    """One ownership unit. All methods are called by the engine's scheduler thread; none waits for a copy.

    Attributes:
        requests: the live requests.
        orders: what has been ordered since the last step.
        parts: None until every rank has shaken hands: until then nothing is promised and nothing stored.
    """

    def __init__(
        self,
        config: FlexKVConfig,
        geometry: BlockGeometry,
        namespace: bytes,
        ranks: int,
        step_tokens: int,
        with_events: bool = False,
        stores_end_in_step: bool = False,
        use: Use = Use(),  # noqa: B008 - frozen
        model: str = "",
        unit_name: str = "unit0",
        prompt_limit: PromptLimit | None = None,
    ) -> None:
        owner = UnitOwner(model, namespace, unit_name)
        self._blueprint = Blueprint(
            config, geometry, namespace, owner, step_tokens, stores_end_in_step, use, prompt_limit
        )
        self._config = config
        self._geometry = geometry
        self._ranks = ranks
        self.handshakes: dict[int, Handshake] = {}
        self.requests = RequestTable(namespace, geometry, config.keys.scheme)
        self.orders = ConnectorMetadata()
        self.parts: Parts | None = None
        self._watch: StoreWatch | None = None
        self._step = 0
        self._forward_step = 0
        self.counters = Counters()
        self.events = EventLog(with_events, geometry)
        self._owed_reset = False
        self._old_kv = False
        self._refused = False

    # --- set up ---

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Takes the engine's block pool, which says when a block is handed out again."""
        self.bind_watch(BlockWatch(pool, self._config.store.max_reference_share))

    def bind_watch(self, watch: StoreWatch) -> None:
        """Takes what says when a block is handed out again."""
        self._watch = watch

    def take_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """When every rank's geometry is known: sizes and creates the host pool. Until then nothing is promised.

        Raises:
            ContractError: a rank has shaken hands for another pool before. One of the two is another engine's.
            GeometryError: the ranks do not agree.
            CapacityError: not even one slot fits.
        """
        if foreign := self._foreign_pool(ranks):
            raise ContractError(foreign)
        self.handshakes.update(ranks)
        if self.parts is None and len(self.handshakes) == self._ranks:
            self.parts = self._make_parts()
            self._reset_if_owed(self.parts)

    def _foreign_pool(self, ranks: Mapping[int, Handshake]) -> str:
        """Why one of these handshakes is not of this engine's rank; empty where all are."""
        for rank, said in ranks.items():
            known = self.handshakes.get(rank, said)
            if known.pool_id != said.pool_id:
                return (
                    f"rank {rank} has shaken hands for KV pool {known.pool_id.hex()} and does so again for "
                    f"{said.pool_id.hex()}: a rank has one pool, so one of the two is another engine's"
                )
        return ""

    def _make_parts(self) -> Parts:
        assert self._watch is not None, "the engine binds its block pool before the handshake"
        workers = local_link.workers_of_pools([said.pool_id for _, said in sorted(self.handshakes.items())])
        return self._blueprint.make(
            self.handshakes, workers, self._watch, self.requests, self.counters, self.events
        )

    def _warn_of_missing_ranks(self) -> None:
        missing = [rank for rank in range(self._ranks) if rank not in self.handshakes]
        logger.warning(
            "no handshake from rank(s) %s of %d after %d steps of the engine: until every rank has shaken hands "
            "nothing is stored and nothing is loaded",
            ", ".join(map(str, missing)),
            self._ranks,
            self._step,
        )

    @property
    def unit(self) -> HostUnit | None:
        """The host memory, once it is made."""
        return self.parts.unit if self.parts is not None else None

    # --- lookups and loads ---

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether the load runs between its steps.

        (None, False) while more comes up from disk: the engine asks again with its next step.
        """
        parts = self.parts
        if parts is None or not parts.unit.usable or not self._blueprint.use.loads:
            return 0, False
        parts.outcomes.collect_early()
        self._pump(parts)
        parts.unit.grow()
        tracker = self.requests.of(request)
        self.requests.begin_lookup(tracker, self._preempted)
        tracker.stale = False
        tracker.own_from = computed_tokens // self._geometry.block_tokens
        tokens = parts.lookups.match(tracker, computed_tokens)
        # What the lookup found on disk is asked for at once.
        self._pump(parts)
        if tokens is None:
            return None, False
        return tokens, tokens > 0 and self._config.load.mode == "async"

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine gave the request its blocks, and takes `external_tokens` of what was promised."""
        if self.parts is None:
            return
        job = self.parts.loads.begin(self.requests.of(request), blocks, external_tokens)
        if job is not None:
            self.orders.loads.append(job)

    # --- the step ---

    def build(self, output: SchedulerOutput) -> ConnectorMetadata:
        """The step's orders. Costs O(requests + new blocks)."""
        self._step += 1
        parts = self.parts
        if parts is None and self._step == HANDSHAKE_STEPS:
            self._warn_of_missing_ranks()
        self.requests.follow(output, parts.stores if parts is not None else None, self._preempted)
        if output.total_num_scheduled_tokens:
            self._forward_step = self._step
        self.orders.step = self._forward_step
        if parts is not None and parts.unit.usable:
            parts.unit.grow()
            parts.stores.plan_step(output, self._step, self.orders)
            self._watch_reuse(parts.watch, output)
            self._pump(parts)
            self.orders.disk_busy = parts.unit.disk_busy
            self.orders.grant = parts.unit.grant
            parts.unit.expire_if_due(self.counters)
            if parts.steps is not None and output.total_num_scheduled_tokens:
                sync = any(job.sync for job in self.orders.loads)
                parts.steps.began(self._forward_step, output, sync)
        if parts is not None:
            # Also of a unit that is off: its last ops end by these orders' reports.
            self.orders.unit = parts.unit.unit_id
        self.orders.idle = output.total_num_scheduled_tokens == 0
        orders, self.orders = self.orders, ConnectorMetadata()
        return orders

    def update(self, output: KVConnectorOutput) -> None:
        """Takes the workers' reports of a step: failures first, so that nothing computed from them is published."""
        if output.invalid_block_ids and self.parts is not None:
            self.parts.outcomes.take_failed_blocks(set(output.invalid_block_ids))
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerMetadata):
            self._take_reports(report)

    def collect(self) -> None:
        """Takes the reports of workers in this process, for a connector class that does not carry them."""
        for worker in self.parts.workers if self.parts is not None else ():
            if (report := worker.take_metadata()) is not None:
                self._take_reports(report)

    def finished(self, request: Request) -> None:
        """The request has ended, its blocks are about to be freed."""
        tracker, parts = self.requests.pop(request.request_id), self.parts
        if tracker is None or parts is None:
            return
        if tracker.loading is not None:
            # Nobody waits for the load any more; its blocks stay with the request until the workers have reported.
            self.orders.cancel.append(tracker.loading)
        elif parts.unit.usable:
            parts.outcomes.collect_early()
            parts.outcomes.retire(tracker, self._forward_step)
            self.orders.early += parts.stores.ended(tracker, self._step)
            self._submit_early(parts)
        # Last, because it marks the request's blocks as used together.
        parts.unit.manager.end_request(tracker.request_id)

    def _submit_early(self, parts: Parts) -> None:
        if parts.workers and current_device_is_host() and self.orders.early:
            # The forward that wrote the blocks has returned, and no further step may ever come.
            early, self.orders.early = self.orders.early, []
            for worker in parts.workers:
                worker.before_forward(
                    ConnectorMetadata(parts.unit.unit_id, step=self._forward_step, early=early)
                )

    def _preempted(self, tracker: RequestTracker) -> None:
        if self.parts is not None:
            self.parts.stores.preempted(tracker)
            self.parts.outcomes.retire(tracker, self._forward_step)

    def _take_reports(self, report: WorkerMetadata) -> None:
        for part in (report, *report.others):
            if self.parts is not None and part.unit == self.parts.unit.unit_id:
                # Also of a rank whose engine has registered another pool, which says so itself.
                self._take_report(self.parts, part)
            elif foreign := self._foreign_pool(part.handshakes):
                self._refuse_report(foreign)
            elif self.parts is None and part.unit == NO_UNIT and part.handshakes:
                self.take_handshake(part.handshakes)
            elif part.unit != NO_UNIT:
                # Its ops have the numbers of ours, and say nothing of them.
                own = (
                    f"unit {self.parts.unit.unit_id.hex()}"
                    if self.parts is not None
                    else "one that is not made yet"
                )
                self._refuse_report(
                    f"a report of unit {part.unit.hex()} reached the scheduler's side of {own}"
                )

    def _take_report(self, parts: Parts, report: WorkerMetadata) -> None:
        parts.outcomes.take(report)
        if parts.steps is not None and report.step:
            parts.steps.ended(report.step)
        self._pump(parts)

    def _refuse_report(self, reason: str) -> None:
        """A rank of another unit reports."""
        self.counters.add("flexkv_refused_messages_total", kind="reports")
        if not self._refused:
            self._refused = True
            logger.error("%s: dropped, as all further ones", reason)

    def _pump(self, parts: Parts) -> None:
        """Gives the disks what there is to do, and takes what they have done."""
        if parts.unit.pump():
            parts.outcomes.changed = True

    def _watch_reuse(self, watch: StoreWatch, output: SchedulerOutput) -> None:
        reused = watch.take_reused()
        if reused:
            self.orders.reused = reused
            for op_id in reused if output.kv_cache_block_copies or output.new_block_ids_to_zero else ():
                # Some model runners copy into and clear new blocks before they call the connector.
                self.orders.void.append(op_id)

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Whether the engine has to keep stepping although no request runs."""
        parts = self.parts
        if parts is None or not parts.unit.usable:
            return False
        parts.outcomes.collect_early()
        self._pump(parts)
        if parts.unit.disk_busy:
            return True
        if parts.unit.manager.inflight_ops() or self.orders.early or self.orders.cancel or parts.unit.grant:
            return True
        # One more step, so that the gauges show the end of the last copy and not the state before.
        return parts.outcomes.changed

    def reset(self) -> bool:
        """New weights: nothing stored before is ever a hit again.

        Returns:
            False when a load is in flight: its request would go on with KV of the old weights, and so is told that
            the load failed. The engine should reset again when its own blocks are free. Where the engine may sleep
            after it, also when a copy is left that could not be ended: vLLM then does not sleep. True before every
            rank has shaken hands: then the reset is carried out as soon as they have, before anything is stored or
            promised.
        """
        parts = self.parts
        if parts is None:
            self._owed_reset = True
            self._old_kv = any(tracker.block_ids for tracker in self.requests) or bool(self._hashed_blocks())
            return True
        parts.outcomes.collect_early()
        parts.unit.manager.reset()
        self.orders.void.extend(parts.loads)
        self.counters.add("flexkv_resets_total")
        for tracker in self.requests:
            tracker.stale = bool(tracker.block_ids)
            tracker.promise = None
        # Blocks whose hash survived the engine's own reset (it failed, or there was none) hold KV of the old weights.
        parts.stores.reset(self._hashed_blocks())
        if self._blueprint.use.ends_copies and not self._end_copies(parts):
            return False
        return not parts.loads

    def _reset_if_owed(self, parts: Parts) -> None:
        """Carries out a reset that came before there was anything to reset: disks may hold pages of the old weights.

        What the engine had computed before it may have spread since, so then nothing of what it has now is stored.
        """
        if not self._owed_reset:
            return
        self._owed_reset = False
        if self._old_kv:
            self.reset()
        else:
            parts.unit.manager.reset()
            self.counters.add("flexkv_resets_total")

    def _hashed_blocks(self) -> dict[int, bytes]:
        """Blocks that the engine's own prefix cache knows, and their hashes."""
        assert self._watch is not None, "the engine binds its block pool before it resets"
        return {b.block_id: b.block_hash for b in self._watch.pool.blocks if b.block_hash is not None}

    def _end_copies(self, parts: Parts) -> bool:
        """Ends every copy, and drops stores that are not begun yet; whether nothing moves any more."""
        if not parts.workers:
            pending = parts.unit.manager.inflight_ops()
            if pending:
                logger.error(
                    "%d copies are in flight on workers in other processes, so the engine must not sleep; step it "
                    "until it has no work left, then try again",
                    pending,
                )
            return not pending
        early, self.orders.early = self.orders.early, []
        ended = True
        for worker in parts.workers:
            try:
                worker.end_copies(early)
            except ClosedError as error:
                logger.error("the engine must not sleep: %s", error)
                ended = False
        parts.outcomes.collect_early()
        return ended

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV cache events since the last call."""
        return self.events.take()

    def take_counters(self) -> Counters | None:
        """Values of the metrics since the last call; None when nothing happened."""
        if self.parts is not None and self.parts.outcomes.changed:
            self.parts.outcomes.changed = False
            self.parts.unit.count(self.counters)
        return self.counters.take() if self.counters else None

    def close(self) -> None:
        """Ends disks and host pool; the workers' lanes have ended, or end by themselves."""
        if self.parts is not None:
            for worker in self.parts.workers:
                worker.close()
            # What has ended in these workers, also while they closed, is stored, and so goes to disk.
            self.parts.outcomes.collect_early()
            self.parts.watch.close()
            self.parts.unit.close()
            self.parts = None
