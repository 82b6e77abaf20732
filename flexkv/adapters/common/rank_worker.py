"""One rank's share of the unit: its views of the engine's pool, the lanes, and the mapping of the host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flexkv.adapters.common.rank_lanes import attach_views, open_gds_lane, open_lanes
from flexkv.adapters.common.rank_ops import RankOps
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
from flexkv.transfer import nvtx
from flexkv.transfer.engine import OnDevice
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap

logger = get_logger(__name__)


class RankWorker:
    """What the worker's side of every adapter does alike.

    Args:
        current_stream: of a CUDA device, the stream that the calling thread gives the engine's work to, as an integer.

    Raises:
        ConfigError: `observe.nvtx` names no library that there is. Here, where the engine's start ends with it: a rank
            in a process of its own that failed later would live without the cache.

    Attributes:
        device: the CUDA device of the engine's pool; None for plain memory, and before it is attached.
        views: of the engine's pool, one a KV group; none before `take_pool`.
        pool_id: of the engine's pool; NO_POOL before `take_pool`.
        slots: of the host pool; -1 before it is attached.
        unit: that this rank serves, from its grant on and for good; NO_UNIT before.
    """

    def __init__(self, config: FlexKVConfig, rank: int, current_stream: Callable[[int], int]) -> None:
        nvtx.enable(config.observe.nvtx)
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
        self._num_blocks = 0
        self._groups: tuple[GroupFacts, ...] = ()
        self._replicas = 1
        self._pool: Any = None
        self._places: tuple[RankPlace, ...] = ()
        self._views_attached = False
        self._ops = RankOps(config, rank, self.counters)

    def make_mover(self) -> Any:
        """The mover of the device lanes; None takes the transfer engine's own. For subclasses that decorate it."""
        return None

    def take_pool(
        self,
        views: Sequence[Any],
        groups: Sequence[GroupFacts],
        owners: Sequence[OnDevice],
        num_blocks: int,
        replicas: int,
    ) -> None:
        """The engine's pool is known. Where a unit was made for another one, this rank serves that no more: it refuses
        every order, so that no block number of the one pool is ever taken for one of the other.

        Args:
            views: of each KV group, and `groups` what the unit is told of it.
            owners: the tensors that the views lie in; kept as long as anything may touch them.
            replicas: so many ranks in a row hold the same bytes; only those of the first of them are stored.
        """
        if self.unit != NO_UNIT:
            self._ops.close()
            self._ops.refusal = "the engine registered another KV pool"
            logger.error("rank %d cannot use the host pool: %s", self.rank, self._ops.refusal)
        self.pool_id = PoolId(random_id())
        self.views, self._groups = tuple(views), tuple(groups)
        self._owners, self._num_blocks, self._replicas = owners, num_blocks, replicas
        self._ops.stripe_bytes = tuple(view.stripe_bytes for view in views)
        self._ops.stores = self.rank % replicas == 0

    def facts(self) -> RankFacts | None:
        """What the scheduler needs to size the host pool; None before `take_pool`."""
        if not self.views:
            return None
        here = RankFacts.here(self.rank, self._num_blocks, *self._groups)
        return replace(here, replicas=self._replicas, pool_id=self.pool_id)

    def attach(
        self, unit: UnitId, pool: HostPool, places: tuple[RankPlace, ...], slabs: SlabMap | None = None
    ) -> None:
        """Starts the lanes between the engine's pool and the unit's host pool, and `slabs` if there are any.

        Args:
            places: where in a slot the blocks of each group lie.

        Raises:
            ContractError: this rank serves another unit, or this one already: its lanes have ops in flight.
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
        self._ops.engine, self._pool, self.device = engine, pool, engine.device
        self._places, self._views_attached = places, True
        self.slots = pool.slots

    def take_grant(self, grant: PoolGrant) -> None:
        """Maps the host pool of another process and attaches it, once. What goes wrong is kept as the refusal.

        A grant of another unit than the one that this rank serves changes nothing; nor does one for another pool.
        """
        if self.unit != NO_UNIT or grant.pools[self.rank : self.rank + 1] != (self.pool_id,):
            return
        self.unit = grant.unit
        try:
            self.attach(grant.unit, HostPool.attach(grant.descriptor), grant.places[self.rank], grant.slabs)
        except FlexKVError as error:
            # The engine can live without a cache; the scheduler's side is told and promises nothing.
            self._ops.refusal = f"{type(error).__name__}: {error}"
            logger.error("rank %d cannot use the host pool: %s", self.rank, self._ops.refusal)

    def release_pool(self, reason: str) -> None:
        """The engine is about to take its pool's memory away: ends every op, and detaches the views. Idempotent.

        Args:
            reason: of the ops that come before `restore_pool`; they end refused.

        Raises:
            ClosedError: a copy neither ended nor could be recalled: the memory must stay.
        """
        self._ops.release(reason)
        if self._views_attached and self._ops.engine is not None:
            for group in range(len(self.views)):
                self._ops.engine.detach_view(group)
            self._views_attached = False

    def restore_pool(self) -> None:
        """The pool's memory is back at the same addresses; what it held is gone. Idempotent."""
        if self._places and not self._views_attached and self._ops.engine is not None:
            attach_views(self._ops.engine, self.views, self._pool, self._places, self._owners)
            self._views_attached = True
        self._ops.released = ""

    @property
    def attached(self) -> bool:
        """Whether the host pool was attached here, ever."""
        return self._pool is not None

    @property
    def usable_slots(self) -> int:
        """Slots that are up here, and known to this rank's GPU where it has one."""
        pinned_first = self.device is not None
        return int(self._pool.pinned_slots if pinned_first else self._pool.ready_slots)

    def close(self) -> None:
        """Ends the lanes; waits for copies in flight up to `transfer.close_s`. Their results can still be taken."""
        self._ops.close()
