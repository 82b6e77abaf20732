"""The contract of an ownership unit. An adapter uses the cache through its unit, from the engine's start to its end.

An adapter always has a unit. Until its ranks are known, and after an error that the engine can tolerate, the unit is a
`NullUnit`, which caches and stores nothing. `build_unit` makes a working unit.

| state | `match` | stores | ops in flight | `poll` | `reset` |
|---|---|---|---|---|---|
| `AWAITING_RANKS` | miss | none | none | does nothing | only sets `was_reset` |
| `USABLE` | answers | planned | run | works | works |
| `DISABLED` | miss | none | finish; published pages still go to other tiers | works | works |
| `CLOSED` | miss | none | finish | does nothing | works |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from flexkv.cache.base import CacheManager
from flexkv.facts.ranks import NO_UNIT, PoolGrant, UnitId
from flexkv.observe import Counters


class UnitState(Enum):
    """The state of a unit."""

    AWAITING_RANKS = "awaiting ranks"
    """A rank has not described its pool yet, or the ranks' pools cannot be served."""
    USABLE = "usable"
    DISABLED = "disabled"
    """A rank cannot use the host pool. Ops in flight finish, but the unit promises and stores nothing new."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CacheRole:
    """How one engine is configured to use the cache.

    Attributes:
        loads: whether the engine looks up and loads blocks.
        stores: whether the engine stores blocks.
        recomputes: whether the engine computes pages that a load did not bring.
        fails_requests: whether the engine ends a request whose load fails or is late. Ignored if `recomputes` is set.
        shared: whether the workers are separate processes, which map the host pool.
        compute_if_faster: whether the adapter measures how fast the engine computes. A lookup may then promise fewer
            pages than a tier has, if the engine computes the rest sooner than the tier delivers them.
        asks_again: whether the engine repeats a lookup in its next step if the lookup's answer is that the request must
            wait.
    """

    loads: bool = True
    stores: bool = True
    recomputes: bool = False
    fails_requests: bool = True
    shared: bool = False
    compute_if_faster: bool = True
    asks_again: bool = False


class EngineUnit(ABC):
    """One ownership unit. Only the engine's scheduler thread calls it. `close` and the manager's `reset` may wait.

    Attributes:
        unit_id: 16 random bytes, drawn when the unit is made; `NO_UNIT` for a unit without ranks.
        state: the unit's current state.
        usable: whether the unit promises and stores pages; true only in `UnitState.USABLE`.
        reason: why the unit is not usable; empty while it is usable or awaits ranks.
        manager: the unit's control plane, which answers lookups and plans loads and stores.
        slots: number of slots that the host pool has when all of its memory is mapped.
        growing: whether some slots of the host pool are not in use yet; the caller then calls `grow` from time to time.
        has_tiers: whether the unit has tiers behind host memory, such as disks. Only pages of these tiers are fetched,
            and fetching may take longer than computing.
        grant: the record with which workers in other processes map the pool. None after all workers have mapped the
            pool, or if no worker needs to map it.
    """

    unit_id: UnitId = NO_UNIT
    state: UnitState
    usable: bool = False
    reason: str = ""
    manager: CacheManager
    slots: int = 0
    growing: bool = False
    has_tiers: bool = False
    grant: PoolGrant | None = None

    @property
    @abstractmethod
    def tier_names(self) -> tuple[str, ...]:
        """Each tier's label in metrics, in the order of the tiers' numbers."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is work for `poll`: a tier has work, or a plugin's call waits."""

    @abstractmethod
    def poll(self) -> bool:
        """Collects the tiers' results and submits their planned work. Returns whether counts may have changed, so that
        the caller should call `count`.
        """

    @abstractmethod
    def rank_ready(self, ready: Mapping[int, int]) -> None:
        """Records the number of slots of the host pool that each rank can use. `ready` maps a rank to that number."""

    @abstractmethod
    def grow(self) -> None:
        """Lets the manager use host slots whose memory became ready since the last call."""

    @abstractmethod
    def disable(self, rank: int, error: str) -> None:
        """Stops caching, because `rank` cannot use the pool; the engine continues without a cache."""

    @abstractmethod
    def stop_straight_loads(self, rank: int, reason: str) -> None:
        """Permanently sends all loads through host memory, because `rank` cannot load directly from a tier."""

    @abstractmethod
    def expire_if_due(self, counters: Counters) -> None:
        """Ends expired leases, at most once per second. A lease expires if no load follows its lookup."""

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds to `counters` what was counted since the last call, and sets the gauges in it."""

    @abstractmethod
    def close(self) -> bool:
        """Closes the tiers and the host pool, whose memory is freed after the last worker has unmapped it. Idempotent.

        Returns False if a page that should have been written was not written, or is not durable.
        """
