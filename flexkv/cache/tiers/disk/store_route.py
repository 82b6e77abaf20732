"""How engine blocks are stored straight to the unit's own disks, bypassing host memory (docs/gds.md).

Each rank writes its stripe of each page and reports the digests of the page's runs. Then the disk lane writes the
trailers (the seal), and the pages become visible. A page that is not sealed is never visible.

Contract with the tier: entries are pending (not visible yet) and pinned from the plan of the store to the end of the
seal, so that their slots are neither read nor rewritten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRY, OpRole, StorePlan
from flexkv.cache.ledger.ops import Op, RankOp, good_pages
from flexkv.cache.tiers.disk.pages import DiskPages
from flexkv.cache.tiers.routes import StoreOffer, StoreRoute
from flexkv.cache.tiers.tables import TierContext
from flexkv.transfer.graph import (
    NEVER,
    NO_BLOCKS,
    NO_PLACES,
    OpKind,
    OpResult,
    Priority,
    TransferGraph,
    TransferOp,
)

NO_POSITIONS: NDArray[np.intp] = np.empty(0, np.intp)


class GdsStores(StoreRoute):
    """Plans straight stores (GDS_WRITE ops) and then seals (DISK_SEAL ops), and records the results of all these ops.
    Blocks that are in host memory are not stored.

    A block that is being read from disk is not stored on disk again. But the read may fail, and the engine offers a
    block only once. So the block is stored in host memory. If the read finds the page on disk bad, the block is written
    to disk from host memory.

    Args:
        most_pages: maximum number of pages being stored or sealed at once.
    """

    def __init__(self, disk: DiskPages, context: TierContext, most_pages: int) -> None:
        self._disk = disk
        self._context = context
        self._most_pages = most_pages

    @property
    def pages(self) -> int:
        """Number of pages that are being stored or sealed."""
        ops, tier = self._context.tables.ops, self._context.tier
        return ops.pages(OpRole.STORE, tier) + ops.pages(OpRole.SEAL, tier)

    # --- stores ---

    def begin_store(self, offer: StoreOffer, room: int) -> StorePlan:
        new, being_read = self._unknown(offer)
        known = len(offer.keys) - len(new) - len(being_read)
        to_disk = self._begin_on_disk(offer, new, known, room)
        if not len(being_read):
            return to_disk
        return to_disk.joined(self._begin_in_host(offer, being_read, room - len(to_disk.stored)))

    def _begin_in_host(self, offer: StoreOffer, positions: NDArray[np.intp], room: int) -> StorePlan:
        index = self._context.tables.hub.index
        entries = index.find(offer.group, offer.keys)
        ready = entries[entries != NO_ENTRY]
        # Blocks of the offer must not be evicted to free slots for other blocks of the same offer.
        index.pin(ready)
        try:
            return self._context.tables.host_stores.begin_store(offer.part(positions), room)
        finally:
            index.unpin(ready)

    def _unknown(self, offer: StoreOffer) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Returns two arrays of positions of offered blocks. The blocks of the first array are neither in host memory
        nor on disk. Those of the second have to be stored in host memory because their page on disk is being read."""
        index, ops, group = self._context.tables.hub.index, self._context.tables.ops, offer.group
        in_host = index.find(group, offer.keys, ready_only=False)
        on_disk = self._disk.presence.find(group, offer.keys, ready_only=False)
        stored = in_host != NO_ENTRY
        reads = ops.entries_read(self._context.tier, group)
        if not len(reads) and not ops.any_of(OpRole.FETCH):
            return np.flatnonzero(~stored & (on_disk == NO_ENTRY)), NO_POSITIONS
        coming = stored.copy()
        coming[stored] = index.fillers(in_host[stored]) != 0
        read = np.isin(on_disk, reads)
        # Blocks whose engine block is the target of a load in flight are not stored. If the load fails, the engine
        # computes the block and offers it again.
        awaited = (coming | read) & np.isin(offer.blocks, ops.targets_of_loads(group))
        unknown = ~(stored & ~coming) & ~awaited
        return np.flatnonzero(unknown & (on_disk == NO_ENTRY)), np.flatnonzero(unknown & read)

    def _begin_on_disk(self, offer: StoreOffer, new: NDArray[np.intp], known: int, room: int) -> StorePlan:
        group, ops = offer.group, self._context.tables.ops
        room = max(0, min(room, self._most_pages - self.pages))
        valid = np.full(len(new), offer.tokens, np.int32)
        expiries = None if offer.expiry == NEVER else np.full(len(new), offer.expiry, np.uint64)
        found, entries, places, tags = self._disk.begin_write(
            group, np.ascontiguousarray(offer.keys[new]), valid, room, expiries
        )
        here = new[found]
        stored = here.astype(np.int32) if offer.chosen is None else offer.chosen[here]
        dropped = len(new) - len(stored)
        if not len(stored):
            return StorePlan(None, stored, known, dropped)
        plan = TransferOp(
            ops.next_id(),
            OpKind.GDS_WRITE,
            group,
            Priority.STORE,
            offer.blocks[here],
            NO_PLACES,
            places=places,
            tags=tags,
        )
        self._context.tables.enter_store(offer, self._context.tier, plan, entries, stored)
        return StorePlan(TransferGraph((plan,)), stored, known, dropped)

    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        self._disk.presence.remove(op.entries[pages])

    def end_store(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Plans the seal of the good pages, whose stripes all ranks have written, and removes all other pages."""
        self._disk.counts.failed_writes += int(np.count_nonzero(op.failed))
        # Pages that were removed meanwhile are not sealed, because they would not become visible.
        good = good & self._disk.in_flight(op.group, op.entries)
        if not op.digests:
            good = np.zeros_like(good)
        bad = op.entries[~good]
        if len(bad):
            self._disk.end_write(op.group, bad, np.zeros(len(bad), np.bool_))
        if good.any():
            self._seal(op, good)
        return good

    # --- seals ---

    def _seal(self, op: RankOp, good: NDArray[np.bool_]) -> None:
        # One row per page, with the digests of all ranks' runs side by side. A rank that shares another rank's stripe
        # has reported no digests.
        digests = np.concatenate([op.digests[rank] for rank in sorted(op.digests)], axis=1)[good]
        ops, tier = self._context.tables.ops, self._context.tier
        plan = TransferOp(
            ops.next_id(),
            OpKind.DISK_SEAL,
            op.group,
            Priority.STORE,
            NO_BLOCKS,
            NO_PLACES,
            places=op.plan.places[good],
            tags=op.plan.tags[good],
            digests=np.ascontiguousarray(digests),
        )
        ops.add(Op(plan=plan, role=OpRole.SEAL, tier=tier, entries=op.entries[good], epoch=op.epoch))
        self._context.tables.outbox.put(tier, plan)

    def follow_up_ended(self, op: Op, result: OpResult) -> None:
        """Implements `StoreRoute.follow_up_ended`. Also counts the pages."""
        good = good_pages(result, op.pages)
        written = int(np.count_nonzero(self._disk.end_write(op.group, op.entries, good)))
        counts = self._disk.counts
        counts.written += written
        counts.gds_written += written
        counts.failed_writes += int(np.count_nonzero(~good))
