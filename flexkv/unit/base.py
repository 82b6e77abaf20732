"""The contract of an ownership unit: an adapter's view of the cache from its engine's start to its end.

An adapter always has a unit. Until its ranks are known, and after an error that the engine can tolerate, that is a
`NullUnit`, which caches and stores nothing; `build_unit` makes a working unit.

| state | `match` | stores | ops under way | `poll` | `reset` |
|---|---|---|---|---|---|
| `AWAITING_RANKS` | miss | none | none | idle | noted: `was_reset` |
| `USABLE` | yes | yes | yes | yes | yes |
| `DISABLED` | miss | none | end; published pages still go to other tiers | yes | yes |
| `CLOSED` | miss | none | end | idle | yes |
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
    """A rank cannot use the host pool: ops under way end, and nothing new is promised or stored."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CacheRole:
    """How one engine is configured to use the cache.

    Attributes:
        loads: the engine looks up and loads blocks.
        stores: the engine stores blocks.
        recomputes: the engine computes pages that a load did not bring.
        fails_requests: the engine ends a request whose load fails or is late; has no effect with `recomputes`.
        shared: workers live in their own processes and map the host pool.
        compute_if_faster: the adapter measures the engine's steps, so a lookup may leave a tier's pages to the engine
            if it computes them sooner.
        asks_again: for a request that has to wait, the engine looks up again with its next step.
    """

    loads: bool = True
    stores: bool = True
    recomputes: bool = False
    fails_requests: bool = True
    shared: bool = False
    compute_if_faster: bool = True
    asks_again: bool = False


class EngineUnit(ABC):
    """One unit. The engine's scheduler thread drives it; only the manager's `reset` and `close` may wait.

    Attributes:
        unit_id: see `UnitId`; `NO_UNIT` for a unit without ranks.
        state: see `UnitState`.
        usable: whether the unit promises and stores pages, which it does in `UnitState.USABLE` only.
        reason: why it is not usable; empty while it is.
        manager: the control plane.
        slots: slots of the host pool once all of its memory is mapped.
        growing: whether some of the pool's memory is not mapped or not in use yet; `grow` puts it to use.
        has_tiers: whether there are tiers behind host memory, which need `poll`; only a fetch from one competes with
            computing.
        grant: what workers in other processes need to map the pool; None once all have mapped it, or if no worker needs
            it.
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
        """Labels of the tiers in metrics, in the order of the tiers' numbers."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether some tier has work that further calls of `poll` would advance."""

    @abstractmethod
    def poll(self) -> bool:
        """Takes the tiers' results and submits their planned work; returns whether `count` may have news."""

    @abstractmethod
    def rank_ready(self, ready: Mapping[int, int]) -> None:
        """Records how many slots each rank in `ready` can use."""

    @abstractmethod
    def grow(self) -> None:
        """Lets the manager use memory that became ready since the last call."""

    @abstractmethod
    def disable(self, rank: int, error: str) -> None:
        """Stops caching, because `rank` cannot use the pool; the engine continues without a cache."""

    @abstractmethod
    def stop_straight_loads(self, rank: int, reason: str) -> None:
        """Permanently sends all loads through host memory, because `rank` cannot load directly from a tier."""

    @abstractmethod
    def expire_if_due(self, counters: Counters) -> None:
        """Ends expired leases of lookups that were never used, if it is time to check for them."""

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds the counts since the last call, and sets the gauges."""

    @abstractmethod
    def close(self) -> bool:
        """Closes the tiers, and frees host memory once the last worker has unmapped it. Idempotent.

        Returns False if a page that had to be written was not written or is not durable.
        """
