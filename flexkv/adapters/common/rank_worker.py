"""One rank's part of a unit: views of the engine's pool, the lanes, and the mapping of the unit's host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flexkv.adapters.common.layerwise import LayerLoads
from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.rank_lanes import attach_views, open_gds_lane, open_lanes
from flexkv.adapters.common.rank_ops import RankOps
from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.common.rank_reports import RankReport
from flexkv.c_ext import GdsLane
from flexkv.config import FlexKVConfig
from flexkv.errors import ContractError, FlexKVError
from flexkv.facts.ranks import (
    NO_POOL,
    NO_UNIT,
    GroupFacts,
    PoolGrant,
    PoolId,
    RankFacts,
    RankPlace,
    UnitId,
    random_id,
)
from flexkv.observe import Counters, get_logger
from flexkv.plugins.launcher import PluginLauncher
from flexkv.transfer import nvtx
from flexkv.transfer.engine import OnDevice
from flexkv.transfer.gds_lane import log_lost_registration
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap
from flexkv.transfer.ways_file import check_ways_file
from flexkv.unit.plugins import start_rank_plugins

logger = get_logger(__name__)


class RankWorker:
    """The part of the worker side that all adapters share.

    Args:
        rank: number of the rank in its unit.
        current_stream: takes a CUDA device; returns the stream on which the calling thread enqueues the engine's work,
            as an integer.

    Attributes:
        device: the CUDA device of the engine's pool; None if the pool is plain memory, and before `attach`.
        views: a `KvView` of the engine's pool for each KV group; empty before `take_pool`.
        pool_id: random id of the engine's pool; NO_POOL before `take_pool`.
        slots: number of slots of the host pool; -1 before `attach`.
        plugin_rank: number of the rank in the names of its plugins. Equal to `rank`, except if each rank has its own
            unit: then it is the engine's number of the rank.
        unit: the unit that this rank serves; NO_UNIT before `attach` or `take_grant`. Once set, it never changes.
        layer_loads: the layerwise loads of the current step.

    Raises:
        ConfigError: `observe.nvtx` names a library that does not exist, or the file of `transfer.ways_file` has no
            complete table. Both are checked here so that the engine fails at its start: if a rank in a separate process
            failed later, the engine would keep running without the cache.
    """

    def __init__(self, config: FlexKVConfig, rank: int, current_stream: Callable[[int], int]) -> None:
        nvtx.enable(config.observe.nvtx)
        check_ways_file(config.transfer)
        self.rank = rank
        self.counters = Counters()
        self.device: int | None = None
        self.views: tuple[Any, ...] = ()
        self.pool_id: PoolId = NO_POOL
        self.unit: UnitId = NO_UNIT
        self.slots = -1
        self._config = config
        self._current_stream = current_stream
        self._owners: Sequence[OnDevice] = ()
        self._groups: tuple[GroupFacts, ...] = ()
        self._replicas = 1
        self._pool: Any = None
        self._places: tuple[RankPlace, ...] = ()
        self._views_attached = False
        self._gds_lane: GdsLane | None = None
        self._ops = RankOps(config, rank, self.counters)
        self.layer_loads = LayerLoads(self._ops, config.load.deadline_s)
        self._reported = RankReport(rank, ready=-1)
        """The last reported value of each field that is sent only when it has changed."""
        self.plugin_rank = rank
        self._plugins: PluginLauncher | None = None

    def make_mover(self) -> Any:
        """The mover, the object that copies the pages of host lanes; None for the transfer engine's own. Subclasses
        override this method to wrap the mover."""
        return None

    def take_pool(self, groups: Sequence[RankPool]) -> None:
        """Registers the engine's pool, given by KV group. The pool's tensors are kept alive as long as a copy may touch
        them. If several ranks hold the same bytes, only the first of them stores pages.

        If this rank already serves a unit, that unit was made for an earlier pool. The rank then refuses every later
        op, so that a block number of the earlier pool is never mistaken for a block of the new pool.
        """
        if self.unit != NO_UNIT:
            self._ops.close()
            self._ops.refusal = "the engine registered another KV pool"
            logger.error("rank %d cannot use the host pool: %s", self.rank, self._ops.refusal)
        self.pool_id = PoolId(random_id())
        self.views = tuple(group.view for group in groups)
        self._groups = tuple(group.facts for group in groups)
        self._owners = tuple(tensor for group in groups for tensor in group.tensors)
        self._replicas = groups[0].replicas
        self._ops.stripe_bytes = tuple(view.stripe_bytes for view in self.views)
        self._ops.stores = self.rank % self._replicas == 0

    def take_group(self, pool: RankPool) -> None:
        """Registers an engine's pool that has one KV group; see `take_pool`."""
        self.take_pool([pool])

    def facts(self) -> RankFacts | None:
        """The facts about this rank that the scheduler's side needs to size the host pool; None before `take_pool`."""
        if not self.views:
            return None
        here = RankFacts.here(self.rank, self.views[0].num_blocks, *self._groups)
        return replace(here, replicas=self._replicas, pool_id=self.pool_id)

    def attach(
        self, unit: UnitId, pool: HostPool, places: tuple[RankPlace, ...], slabs: SlabMap | None = None
    ) -> None:
        """Starts the lanes between the engine's pool and the unit's host pool, and the rank's plugins. If `slabs` is
        given, also starts the lane between the slabs on disk and the engine's pool.

        Args:
            places: for each KV group, the position of this rank's blocks in a slot.
            slabs: the slabs on the unit's disks, if loads may bypass host memory; otherwise None.

        Raises:
            ContractError: this rank serves a different unit, or was attached before, so that its lanes may have ops in
                flight.
            GeometryError, ConfigError: see `open_lanes` and `open_gds_lane`.
        """
        if self.unit not in (NO_UNIT, unit):
            raise ContractError(
                f"rank {self.rank} serves unit {self.unit.hex()} and was asked to serve {unit.hex()}: a worker serves "
                "one unit as long as it lives"
            )
        if self._pool is not None:
            raise ContractError(f"rank {self.rank} was asked twice to serve unit {unit.hex()}")
        self.unit = unit
        mover = self.make_mover()
        gds_lane = None
        if slabs is not None:
            stripe = self.rank // self._replicas
            gds_lane, refusal = open_gds_lane(self._config, slabs, stripe, self.views, self._owners)
            self._ops.gds_refusal = refusal
        engine = open_lanes(
            self._config,
            self.views,
            self._owners,
            pool,
            places,
            stream_of=self._current_stream,
            mover=mover,
            gds_lane=gds_lane,
        )
        self._gds_lane = gds_lane
        self._ops.engine, self._pool, self.device = engine, pool, engine.device
        self._places, self._views_attached = places, True
        self.slots = pool.slots
        self._plugins = start_rank_plugins(self._config, self.plugin_rank, unit)

    def take_grant(self, grant: PoolGrant) -> None:
        """Maps the host pool of the scheduler's process and attaches it. If that fails, all ops are refused with the
        error.

        A grant is ignored if the rank already serves a unit, or if the grant is for an earlier pool of this rank.
        """
        if self.unit != NO_UNIT or grant.pools[self.rank : self.rank + 1] != (self.pool_id,):
            return
        self.unit = grant.unit
        try:
            self.attach(grant.unit, HostPool.attach(grant.descriptor), grant.places[self.rank], grant.slabs)
        except FlexKVError as error:
            # The engine can run without a cache. The next report sends the refusal to the scheduler's side, which then
            # promises nothing.
            self._ops.refusal = f"{type(error).__name__}: {error}"
            logger.error("rank %d cannot use the host pool: %s", self.rank, self._ops.refusal)

    def release_pool(self, reason: str) -> None:
        """Ends every op and detaches the views, because the engine is about to release its pool's memory. Idempotent.

        Args:
            reason: the reason with which ops are refused until `restore_pool` is called.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled, so the memory must not be released.
        """
        self._ops.release(reason)
        if self._views_attached and self._ops.engine is not None:
            for group in range(len(self.views)):
                self._ops.engine.detach_view(group)
            self._views_attached = False
        self.end_registrations()

    def restore_pool(self) -> None:
        """Attaches the views again. Must be called when the pool's memory is back at the same addresses; its content is
        lost. Idempotent."""
        if self._places and not self._views_attached and self._ops.engine is not None:
            attach_views(self._ops.engine, self.views, self._pool, self._places, self._owners)
            self._views_attached = True
            if self._gds_lane is not None:
                self._gds_lane.restore_pool()
                log_lost_registration(self._gds_lane.pool)
        self._ops.released = ""

    def end_registrations(self) -> None:
        """Ends the pool's registrations with cuFile, which pin the pool's memory. The next op between disk and pool
        registers the pool again. Precondition: no op is in flight."""
        if self._gds_lane is not None:
            self._gds_lane.release_pool()

    def current_stream(self) -> int | None:
        """The stream on which this thread enqueues the engine's work; None if the pool is plain memory."""
        return None if self.device is None else self._current_stream(self.device)

    @property
    def attached(self) -> bool:
        """Whether the host pool was ever attached on this rank."""
        return self._pool is not None

    @property
    def usable_slots(self) -> int:
        """Number of host slots that are ready in this process and, if this rank has a GPU, registered with the GPU."""
        pinned_first = self.device is not None
        return int(self._pool.pinned_slots if pinned_first else self._pool.ready_slots)

    def begin_step_loads(self, jobs: Sequence[LoadJob], by_layer: bool = True) -> bool:
        """Waits for those loads of a step that must be complete when its forward pass starts, and passes the layerwise
        loads to `layer_loads`. Must be called after the loads were submitted, just before the forward pass.

        Args:
            by_layer: whether the forward pass waits for each layer. If False, layerwise loads are treated like other
                loads.

        Returns:
            Whether any of the loads was not passed to `layer_loads`.

        Raises:
            ClosedError: see `RankOps.finish_load`.
        """
        layerwise: list[LoadJob] = []
        for job in jobs:
            if job.by_layer and by_layer:
                layerwise.append(job)
            elif job.sync:
                self._ops.finish_load(job)
        if layerwise or self.layer_loads.busy:
            self.layer_loads.begin(layerwise, self.views[0].num_layers)
        return len(layerwise) < len(jobs)

    def add_news(self, report: RankReport) -> None:
        """Adds to a report the values that have changed on this rank since its last report."""
        self.add_if_new(report, "error", self._ops.refusal)
        self.add_if_new(report, "no_gds", self._ops.gds_refusal)
        if self._reported.ready != self.slots:
            self.add_if_new(report, "ready", self.usable_slots)

    def add_if_new(self, report: RankReport, name: str, value: Any) -> None:
        """Sets the field `name` of the report to `value`, if the value differs from the last reported one."""
        if value != getattr(self._reported, name):
            setattr(self._reported, name, value)
            setattr(report, name, value)

    def close_lanes(self) -> None:
        """Asks the plugins to exit, and closes the lanes; waits up to `transfer.close_s` for copies in flight. The
        copies' results can still be taken."""
        if self._plugins is not None:
            self._plugins.begin_close()
        self._ops.close()

    def close(self) -> None:
        """Closes the lanes, then waits until the plugins have exited. Idempotent."""
        self.close_lanes()
        if self._plugins is not None:
            self._plugins.close()
