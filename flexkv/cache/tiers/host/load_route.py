"""How pages are loaded from host slots to engine blocks: plans the load ops and ends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_BLOCK, OpRole
from flexkv.cache.ledger.leases import GroupLease, Lease
from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.tiers.routes import LoadRoute
from flexkv.cache.tiers.tables import CacheTables
from flexkv.transfer.graph import NO_READS, BlockIds, OpKind, Priority, ReadIds, TransferOp


class HostLoads(LoadRoute):
    """Plans loads (H2D ops) of pages that are in host memory or being fetched to it, and records their results."""

    def __init__(self, tables: CacheTables) -> None:
        self._tables = tables

    def begin_load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> list[TransferOp]:
        ops = self._tables.ops
        plans = []
        for number, (group, target) in enumerate(zip(lease.groups, targets, strict=True)):
            target = target[: len(group.entries)]
            kept = np.flatnonzero(target != NO_BLOCK)
            if len(kept) < len(group.entries):
                self._tables.hub.index.unpin(np.delete(group.entries, kept))
            if not len(kept):
                continue
            plan = TransferOp(
                ops.next_id(),
                OpKind.H2D,
                number,
                Priority.LOAD,
                target[kept],
                group.slots[kept],
                reads=NO_READS if group.fetches is None else _fetches_of(group.fetches, kept),
            )
            ops.add(
                RankOp(
                    plan=plan,
                    request_id=request_id,
                    role=OpRole.LOAD,
                    entries=group.entries[kept],
                    first_block=group.first_block,
                    positions=kept,
                    epoch=self._tables.epoch,
                    ahead=ops.pages(OpRole.LOAD),
                )
            )
            if len(plan.reads):
                self._tables.counts.streamed_pages += int(np.count_nonzero(plan.reads))
            plans.append(plan)
        return plans

    def release_share(self, group: GroupLease) -> None:
        self._tables.hub.index.unpin(group.entries)

    def source_failed(self, reason: str) -> None:
        """Does nothing, because loads from host memory have no other route."""

    def end_load(self, op: RankOp, current: bool) -> None:
        index = self._tables.hub.index
        if not current:
            # The reset removed these pages, and their keys may belong to new pages by now.
            index.unpin(op.entries)
            return
        coming = op.coming
        if coming is not None:
            # If a page has not been fetched, the end of its fetch decides whether the page is forgotten. The fetch may
            # still be in flight.
            op.suspect &= ~coming | index.ready(op.entries).view(np.bool_)
        if others := self._tables.tiers[1:]:
            keys = index.keys_of(op.entries)
            damaged, good = keys[op.suspect & op.damaged], keys[~op.suspect]
            for tier in others:
                if len(damaged) and tier.facts.copies_unchecked:
                    # The tier may have a copy of the damaged bytes.
                    tier.forget(op.group, damaged)
                if tier.sink is not None:
                    tier.sink.used(op.group, good)
            if not op.failed.any() and coming is None:
                now_s = self._tables.clock()
                self._tables.cost.load.see(op.ahead + op.pages, now_s - op.begun_s, now_s)
        if op.suspect.any():
            removed = self._tables.hub.remove(op.group, op.entries[op.suspect])
            self._tables.counts.forgotten_blocks += removed
        index.unpin(op.entries)


def _fetches_of(fetches: ReadIds, kept: NDArray[np.intp]) -> ReadIds:
    """Returns the op number of the fetch that brings each page of a load, 0 for a page in host memory. Returns an empty
    array if all pages of the load are in host memory."""
    fetches = fetches[kept]
    return fetches if fetches.any() else NO_READS
