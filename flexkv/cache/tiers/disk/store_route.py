"""Stores from engine blocks to the unit's own disks, with no page of host memory between (docs/gds.md).

Each rank writes its stripe and reports the digests of its runs; then the disk lane writes the trailers, and the pages
exist. Contract with the tier: from the plan to the end of the seal its entries are pending and leased, so that nobody
reads or rewrites their places; a page that is not sealed is never visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import OpRole, StorePlan
from flexkv.cache.checks import good_pages
from flexkv.cache.ids import NO_ENTRY
from flexkv.cache.ops import Op, RankOp
from flexkv.cache.routes import StoreOffer, StoreRoute
from flexkv.transfer.graph import (
    NO_BLOCKS,
    NO_PLACES,
    OpKind,
    OpResult,
    Priority,
    TransferGraph,
    TransferOp,
)

if TYPE_CHECKING:
    from flexkv.cache.tier import TierContext
    from flexkv.cache.tiers.disk.tier import DiskTier


class GdsStores(StoreRoute):
    """GDS_WRITE, then DISK_SEAL: plans both, and takes the ends of both. Blocks that host memory has are not stored.

    Args:
        most_pages: that are being stored or sealed at once.
    """

    def __init__(self, disk: DiskTier, context: TierContext, most_pages: int) -> None:
        self._disk = disk
        self._context = context
        self._most_pages = most_pages

    @property
    def pages(self) -> int:
        """Being stored or sealed."""
        ops, tier = self._context.ops, self._context.tier
        return ops.pages(OpRole.STORE, tier) + ops.pages(OpRole.SEAL, tier)

    # --- stores ---

    def begin(self, offer: StoreOffer, room: int, epoch: int) -> StorePlan:
        group, keys, tokens = offer.group, offer.keys, offer.tokens
        in_host = self._context.hub.index.find(group, keys, ready_only=False) != NO_ENTRY
        new = np.flatnonzero(~(self._disk.known(group, keys) | in_host))
        known = len(keys) - len(new)
        room = max(0, min(room, self._most_pages - self.pages))
        valid = np.full(len(new), tokens, np.int32)
        found, entries, places, tags = self._disk.begin_write(
            group, np.ascontiguousarray(keys[new]), valid, room
        )
        stored = new[found].astype(np.int32)
        dropped = len(new) - len(stored)
        if not len(stored):
            return StorePlan(None, stored, known, dropped)
        ops = self._context.ops
        plan = TransferOp(
            ops.next_id(),
            OpKind.GDS_WRITE,
            group,
            Priority.STORE,
            offer.blocks[stored],
            NO_PLACES,
            places=places,
            tags=tags,
        )
        offer.begun(ops, self._context.tier, plan, entries, stored, epoch)
        return StorePlan(TransferGraph((plan,)), stored, known, dropped)

    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        self._disk.presence.remove(op.entries[pages])

    def end(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The ranks have written their stripes: orders the seal of the good pages and gives up the others."""
        self._disk.counts.failed_writes += int(np.count_nonzero(op.failed))
        # What was forgotten meanwhile would never be visible.
        good = good & self._disk.under_way(op.group, op.entries)
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
        # One row a page, of all ranks' runs side by side; a rank whose stripe is another's has reported none.
        digests = np.concatenate([op.digests[rank] for rank in sorted(op.digests)], axis=1)[good]
        ops, tier = self._context.ops, self._context.tier
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
        self._context.outbox.put(tier, plan)

    def follow_up_ended(self, op: Op, result: OpResult) -> None:
        """What was sealed is on disk."""
        good = good_pages(result, op.pages)
        written = int(np.count_nonzero(self._disk.end_write(op.group, op.entries, good)))
        counts = self._disk.counts
        counts.written += written
        counts.gds_written += written
        counts.failed_writes += int(np.count_nonzero(~good))
