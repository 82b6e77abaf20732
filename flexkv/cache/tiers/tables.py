"""The tables of one manager, which its tiers share and the packages `moves` and `promise` plan from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import HUB, EntryIds, GroupSpec, OpRole, TierId
from flexkv.cache.ledger.access_order import AccessOrders
from flexkv.cache.ledger.cost import CostModel
from flexkv.cache.ledger.hub import Hub
from flexkv.cache.ledger.ops import OpTable, RankOp
from flexkv.cache.ledger.outbox import Outbox
from flexkv.cache.ledger.page_times import Expiries, earlier
from flexkv.cache.ledger.reactions import Reactions
from flexkv.cache.ledger.requests import RequestLedger
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.cache.tiers.contract import Tier
from flexkv.cache.tiers.routes import LoadRoute, StoreOffer, StoreRoute
from flexkv.facts.keys import Keys
from flexkv.observe import unix_now_s
from flexkv.transfer.graph import NEVER, TransferOp


@dataclass(slots=True, kw_only=True)
class CacheTables:
    """Where the pages of one manager are, which ops are in flight, and which requests have leases or wait.

    Attributes:
        specs: the unit's KV groups.
        hub: the pages in host memory.
        tiers: tiers by number; complete once the manager has made them all.
        clock: seconds, never running backwards.
        unix_s: wall clock for times to live.
        counts: running totals.
        epoch: how often `CacheManager.reset` was called.
    """

    specs: tuple[GroupSpec, ...]
    hub: Hub
    ops: OpTable
    requests: RequestLedger
    access_orders: AccessOrders
    clock: Callable[[], float]
    unix_s: Callable[[], float]
    counts: ManagerStats
    reactions: Reactions
    tiers: list[Tier] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)
    cost: CostModel = field(default_factory=CostModel)
    epoch: int = 0

    @property
    def now_s(self) -> int:
        """Whole Unix seconds."""
        return max(0, int(self.unix_s()))

    def loads_of(self, tier: TierId) -> LoadRoute:
        """The route from a tier to engine blocks. Precondition: the tier has one."""
        route = self.tiers[tier].loads
        assert route is not None
        return route

    def stores_of(self, tier: TierId) -> StoreRoute:
        """The route from engine blocks to a tier. Precondition: the tier has one."""
        route = self.tiers[tier].stores
        assert route is not None
        return route

    def expiries_of(self, group: int, keys: Keys, expiry: int) -> Expiries | int | None:
        """When these pages, which a store brings to host memory, expire there; None if none of them does.

        Args:
            expiry: when the request that stores them wants them to expire. A page that another tier has expires when
                that tier's page does, if that is earlier: the request may have loaded the page from there.
        """
        expiries: Expiries | int | None = None if expiry == NEVER else expiry
        for tier in self.tiers[1:]:
            if tier.source is not None and (there := tier.source.expiries_there(group, keys)) is not None:
                expiries = earlier(there, NEVER if expiries is None else expiries)
        return expiries

    def enter_store(
        self,
        offer: StoreOffer,
        tier: TierId,
        plan: TransferOp,
        entries: EntryIds,
        positions: NDArray[np.integer],
    ) -> None:
        """Records as in flight the op that stores the pages at `positions` of the whole offer, and adds the request's
        loads in flight to the op. If the op ends before these loads it is not published, because its pages may have
        been computed from their targets.
        """
        loads = self.ops.of_request(offer.request_id, OpRole.LOAD)
        self.ops.add(
            RankOp(
                plan=plan,
                tier=tier,
                request_id=offer.request_id,
                role=OpRole.STORE,
                entries=entries,
                first_block=offer.first_block,
                positions=positions,
                epoch=self.epoch,
                waits_for=tuple(op.op_id for op in loads),
            )
        )

    @property
    def host_stores(self) -> StoreRoute:
        """The route from engine blocks to host memory."""
        return self.stores_of(HUB)


def new_tables(
    groups: Sequence[GroupSpec],
    policy: str,
    clock: Callable[[], float] = time.monotonic,
    unix_s: Callable[[], float] = unix_now_s,
) -> CacheTables:
    """The tables of a manager that has no tier yet.

    Args:
        policy: eviction policy of host memory.
    """
    counts, reactions = ManagerStats(), Reactions()
    return CacheTables(
        specs=tuple(groups),
        hub=Hub(groups, policy, counts, reactions),
        ops=OpTable(clock),
        requests=RequestLedger(),
        access_orders=AccessOrders(len(groups)),
        clock=clock,
        unix_s=unix_s,
        counts=counts,
        reactions=reactions,
    )


@dataclass(frozen=True, slots=True)
class TierContext:
    """The manager's tables, shared with each of its tiers.

    Attributes:
        tier: number of the tier that is being made.
        policy: eviction policy.
        tables: the manager's tables. Until all tiers are made, `tables.tiers` has only the tiers before this one.
    """

    tier: TierId
    policy: str
    tables: CacheTables


TierFactory = Callable[[TierContext], Tier]
"""Makes a tier for a manager."""
