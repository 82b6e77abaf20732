"""The records of one manager, which its tiers and the packages `moves` and `promise` share."""

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
    """The records of one manager: the tiers and their pages, the ops in flight, and the leases and waits of requests.

    Attributes:
        specs: the unit's KV groups.
        hub: the pages in host memory.
        ops: the ops in flight.
        requests: the leases, waits and misses of requests.
        access_orders: the blocks that each request has used.
        clock: returns seconds and never runs backwards.
        unix_s: returns the wall-clock time in Unix seconds, for times to live.
        counts: running totals of the manager.
        reactions: callbacks by which records and tiers report events.
        tiers: the tiers by number; incomplete while the manager makes them.
        outbox: tiers' own ops that were planned and not submitted yet.
        cost: measured times of fetching, loading and computing.
        epoch: number of resets so far.
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
        """The wall-clock time in whole Unix seconds."""
        return max(0, int(self.unix_s()))

    def loads_of(self, tier: TierId) -> LoadRoute:
        """Returns the route from a tier to engine blocks. Precondition: the tier has one."""
        route = self.tiers[tier].loads
        assert route is not None
        return route

    def stores_of(self, tier: TierId) -> StoreRoute:
        """Returns the route from engine blocks to a tier. Precondition: the tier has one."""
        route = self.tiers[tier].stores
        assert route is not None
        return route

    def expiries_of(self, group: int, keys: Keys, expiry: int) -> Expiries | int | None:
        """Returns when the pages that a store brings to host memory expire; None if none of them does.

        If another tier has a page that expires earlier than `expiry`, the stored page expires at that time too: the
        request may have loaded it from that tier.

        Args:
            expiry: Unix time in seconds at which the storing request's pages expire; NEVER if they do not expire.
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
        """Records a planned store as in flight, together with the request's loads in flight. If the store ends before
        these loads, its pages are not published, because they may have been computed from blocks that a load failed to
        fill.

        Args:
            tier: the tier to which the pages are stored.
            plan: the op of the store.
            entries: entries of the stored pages in that tier.
            positions: positions of the stored pages in the whole offer.
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
    """Makes the tables of a manager, without tiers.

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
    """The arguments with which a manager makes a tier.

    Attributes:
        tier: number of the tier.
        policy: eviction policy of the tier.
        tables: the manager's tables. While the tier is being made, `tables.tiers` has only the tiers before it.
    """

    tier: TierId
    policy: str
    tables: CacheTables


TierFactory = Callable[[TierContext], Tier]
