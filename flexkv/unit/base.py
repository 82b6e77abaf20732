"""The contract of an ownership unit: what an adapter has of the cache from its engine's start to its end.

An adapter always has a unit. Until its ranks are known, and after an error that the engine can live with, it is a
`NullUnit`, which has nothing cached and stores nothing; `build_unit` makes the one that works.

| state | `match` | stores | ops under way | `poll` | `reset` |
|---|---|---|---|---|---|
| `AWAITING_RANKS` | miss | none | none | idle | noted: `was_reset` |
| `USABLE` | yes | yes | yes | yes | yes |
| `DISABLED` | miss | none | end; what was published still goes to other tiers | yes | yes |
| `CLOSED` | miss | none | end | idle | yes |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from flexkv.cache.base import CacheManager
from flexkv.observe import Counters
from flexkv.unit.ranks import NO_UNIT, PoolGrant, UnitId


class UnitState(Enum):
    """What a unit does now."""

    AWAITING_RANKS = "awaiting ranks"
    """Not every rank has said what its pool is, or what they said cannot be served."""
    USABLE = "usable"
    DISABLED = "disabled"
    """A rank cannot use the pool: what is under way ends, and nothing is promised or stored."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CacheRole:
    """What one engine is configured to do with the cache.

    Attributes:
        loads: answer lookups.
        stores: store blocks.
        recomputes: the engine computes what a load did not bring.
        fails_requests: the engine ends a request whose load fails or is late; not one that recomputes.
        shared: workers live in processes of their own and map the host pool.
        compute_if_faster: the engine's steps are measured, so that a tier may be left to it where it computes sooner.
        asks_again: the engine asks again with its next step for a request that has to wait.
    """

    loads: bool = True
    stores: bool = True
    recomputes: bool = False
    fails_requests: bool = True
    shared: bool = False
    compute_if_faster: bool = True
    asks_again: bool = False


class EngineUnit(ABC):
    """One unit. Driven by the engine's scheduler thread; only `reset` and `close` may wait.

    Attributes:
        unit_id: see `UnitId`; `NO_UNIT` of a unit without ranks.
        state: see `UnitState`.
        usable: whether anything is promised or stored: it is so in the state of that name.
        reason: why it is not usable; empty while it is.
        manager: the control plane.
        slots: of the host pool, once all of it is up.
        growing: some of the pool's memory is yet to be mapped, or to be used: `grow` takes it.
        has_tiers: there is a tier behind host memory, which is to be polled; only fetching from one competes with
            computing.
        grant: what workers in other processes need to map the pool; None once all have it, and where none needs it.
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
        """As in metrics, by the tiers' numbers."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a tier has something to do, which `poll` gives it."""

    @abstractmethod
    def poll(self) -> bool:
        """Takes results of the tiers and gives them what there is to do; whether there is news for `count`."""

    @abstractmethod
    def rank_ready(self, ready: Mapping[int, int]) -> None:
        """Ranks report how many slots they can use."""

    @abstractmethod
    def grow(self) -> None:
        """Lets the manager use the memory that is there since."""

    @abstractmethod
    def disable(self, rank: int, error: str) -> None:
        """A rank cannot use the pool: the engine goes on without a cache."""

    @abstractmethod
    def stop_straight_loads(self, rank: int, reason: str) -> None:
        """A rank cannot load from a tier without a page of host memory: pages go through host memory, for good."""

    @abstractmethod
    def expire_if_due(self, counters: Counters) -> None:
        """Ends leases of lookups that were never followed up, if it is time to look."""

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds what was counted since the last call, and sets the gauges."""

    @abstractmethod
    def close(self) -> bool:
        """Ends the tiers, and gives the memory back once the last worker has unmapped it. Idempotent.

        False: not all that was to be written was, or is durable.
        """
