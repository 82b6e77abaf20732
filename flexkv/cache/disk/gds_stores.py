"""Stores from engine blocks to the unit's own disks, with no page of host memory between (docs/gds.md).

Each rank writes its stripe and says the digests of its runs; then the manager's disk lane writes the trailers, and the
pages exist. Contract with the disk index: from the plan to the end of the seal its entries are pending and leased, so
that nobody reads or rewrites their places; a page that is not sealed is never visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import StorePlan
from flexkv.cache.checks import good_pages
from flexkv.cache.disk.index import DiskIndex
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import NO_ENTRY, EntryIds
from flexkv.cache.planner import Planner
from flexkv.cache.routes import StoreOffer, StoreRoute
from flexkv.transfer.graph import OpId, OpResult, TransferGraph


@dataclass(frozen=True, slots=True)
class Seal:
    """Pages whose trailers are being written; `entries` are of the disk index."""

    group: int
    entries: EntryIds


class GdsStores(StoreRoute):
    """GDS_WRITE, then DISK_SEAL: plans both, and takes the ends of both.

    Args:
        host: blocks that it has are not stored.
        orders: takes the seals, which the manager's disk lane runs.
        most_pages: that are being stored or sealed at once.

    Attributes:
        pages: being stored or sealed.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskIndex,
        planner: Planner,
        inflight: InflightTable,
        orders: list[TransferGraph],
        most_pages: int,
    ) -> None:
        self._host = host
        self._disk = disk
        self._planner = planner
        self._inflight = inflight
        self._orders = orders
        self._most_pages = most_pages
        self._seals: dict[OpId, Seal] = {}
        self.pages = 0

    def __len__(self) -> int:
        """Seals in flight."""
        return len(self._seals)

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._seals

    def sealed_pages(self, op_id: OpId) -> int:
        """Pages of a seal in flight."""
        return len(self._seals[op_id].entries)

    # --- stores ---

    def begin(self, offer: StoreOffer, room: int, epoch: int) -> StorePlan:
        group, keys, tokens = offer.group, offer.keys, offer.tokens
        in_host = self._host.index.find(group, keys, ready_only=False) != NO_ENTRY
        new = np.flatnonzero(~(self._disk.known(group, keys) | in_host))
        known = len(keys) - len(new)
        self._disk.any_partial |= tokens != self._disk.block_tokens
        room = max(0, min(room, self._most_pages - self.pages))
        valid = np.full(len(new), tokens, np.int32)
        found, entries, places, tags = self._disk.begin_write(
            group, np.ascontiguousarray(keys[new]), valid, room
        )
        stored = new[found].astype(np.int32)
        dropped = len(new) - len(stored)
        if not len(stored):
            return StorePlan(None, stored, known, dropped)
        self.pages += len(stored)
        plan = self._planner.gds_store(group, offer.blocks[stored], places, tags)
        offer.begun(self._inflight, plan, entries, stored, epoch)
        return StorePlan(TransferGraph((plan,)), stored, known, dropped)

    def bar(self, op: InflightOp, pages: NDArray[np.bool_]) -> None:
        self._disk.entries.remove(op.entries[pages])

    def end(self, op: InflightOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The ranks have written their stripes: orders the seal of the good pages and gives up the others."""
        self._disk.counts.failed_writes += int(np.count_nonzero(op.failed))
        # What was forgotten meanwhile would never be visible.
        good = good & self._disk.under_way(op.group, op.entries)
        if not op.digests:
            good = np.zeros_like(good)
        bad = op.entries[~good]
        if len(bad):
            self._disk.end_write(op.group, bad, np.zeros(len(bad), np.bool_))
            self.pages -= len(bad)
        if good.any():
            # One row a page, of all ranks' runs side by side; a rank whose stripe is another's has reported none.
            digests = np.concatenate([op.digests[rank] for rank in sorted(op.digests)], axis=1)[good]
            seal = self._planner.seal(
                op.group, op.plan.places[good], op.plan.tags[good], np.ascontiguousarray(digests)
            )
            self._seals[seal.op_id] = Seal(op.group, op.entries[good])
            self._orders.append(TransferGraph((seal,)))
        return good

    # --- seals ---

    def complete(self, result: OpResult) -> None:
        """Takes the end of a seal: what was sealed is on disk."""
        seal = self._seals.pop(result.op_id)
        self.pages -= len(seal.entries)
        good = good_pages(result, len(seal.entries))
        written = int(np.count_nonzero(self._disk.end_write(seal.group, seal.entries, good)))
        counts = self._disk.counts
        counts.written += written
        counts.gds_written += written
        counts.failed_writes += int(np.count_nonzero(~good))

    def pinned(self) -> list[EntryIds]:
        """What seals lease in the disk index."""
        return [seal.entries for seal in self._seals.values()]
