"""How engine blocks are stored to host slots: plans the store ops and ends them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import HUB, NO_ENTRY, EntryIds, OpRole, StorePlan
from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.tiers.routes import StoreOffer, StoreRoute
from flexkv.cache.tiers.tables import CacheTables
from flexkv.transfer.graph import OpKind, Priority, TransferGraph, TransferOp


class HostStores(StoreRoute):
    """Plans stores to host slots (D2H ops), and records their results. A page becomes visible when every rank has
    copied its stripe."""

    def __init__(self, tables: CacheTables) -> None:
        self._tables = tables

    def begin_store(self, offer: StoreOffer, room: int) -> StorePlan:
        tables, group, blocks = self._tables, offer.group, offer.blocks
        without_slot = self._take_over(offer, room) if tables.ops.any_of(OpRole.FETCH) else 0
        positions, entries, slots, known, dropped = tables.hub.insert_for_store(
            group, offer.keys, room, offer.spare
        )
        stored = offer.positions(positions)
        known, dropped = known - without_slot, dropped + without_slot
        # The index gives slots in order and stops at the first block that gets none. So all blocks up to the last
        # stored one are accepted. But blocks that `_take_over` left to their fetch may be anywhere in the offer.
        accepted = int(stored[-1]) + 1 if len(stored) and not without_slot else 0
        if not len(stored):
            return StorePlan(None, stored, known, dropped, accepted)
        new = offer.keys if len(positions) == len(blocks) else offer.keys[positions]
        tables.hub.filled_by_store(
            group, slots, new, offer.tokens, tables.expiries_of(group, new, offer.expiry)
        )
        all_new = len(positions) == len(blocks)
        sources = blocks if all_new else blocks[positions]
        plan = TransferOp(tables.ops.next_id(), OpKind.D2H, group, Priority.STORE, sources, slots)
        tables.enter_store(offer, HUB, plan, entries, stored)
        tables.access_orders.orders_of(offer.request_id)[group].put_at(offer.first_block, stored, entries)
        return StorePlan(TransferGraph((plan,)), stored, known, dropped, accepted)

    def _take_over(self, offer: StoreOffer, room: int) -> int:
        """Removes from the index the offered blocks that are being fetched, so that the store gives them new slots.

        A fetch may fail until its page is verified, and the engine offers a block only once. So the key is given to the
        store's slot. The fetch continues in its own slot for the loads that wait for it, but the page in that slot does
        not become visible. If the store fails, the page is still in its tier, unless the fetch has failed too.

        Returns:
            The number of blocks that are left to their fetch, because there is no slot for the store.
        """
        index, group = self._tables.hub.index, offer.group
        entries = index.find(group, offer.keys, ready_only=False)
        unverified = self._unverified(offer, entries)
        if not len(unverified):
            return 0
        unknown = int(np.count_nonzero(entries == NO_ENTRY))
        missing = min(room, unknown + len(unverified)) - index.free_slots(group)
        if missing > 0:
            there = entries[entries != NO_ENTRY]
            ready = there[index.ready(there).view(np.bool_)]
            # Blocks of the offer must not be evicted to free slots for other blocks of the same offer.
            index.pin(ready)
            self._tables.hub.evict(group, missing)
            index.unpin(ready)
        taken = max(0, min(room, index.free_slots(group)) - unknown)
        self._tables.hub.remove(group, entries[unverified[:taken]])
        return max(0, len(unverified) - taken)

    def _unverified(self, offer: StoreOffer, entries: EntryIds) -> NDArray[np.intp]:
        """Returns the positions of offered blocks that are being fetched, except those that a load in flight is writing
        to the offered engine blocks."""
        group = offer.group
        there = np.flatnonzero(entries != NO_ENTRY)
        coming: NDArray[np.intp] = there[self._tables.hub.index.fillers(entries[there]) != 0]
        if len(coming):
            # If an offered engine block is the target of a load in flight, the block's KV comes from the fetch itself.
            # If the load fails, the engine computes the block and offers it again.
            coming = coming[~np.isin(offer.blocks[coming], self._tables.ops.targets_of_loads(group))]
        return coming

    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        self._tables.hub.remove(op.group, op.entries[pages])

    def end_store(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return self._tables.hub.finish(op.group, op.entries, good)
