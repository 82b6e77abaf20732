"""Pages that go from engine blocks to the unit's own disks with no page of host memory between (docs/gds.md).

Each rank writes its stripe and says the digests of its runs; then the manager's disk lane writes the trailers, and the
pages exist. Contract with the disk index: from the plan to the end of the seal its entries are pending and leased, so
that nobody reads or rewrites their places; a page that is not sealed is never visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import Keys
from flexkv.cache.disk_index import DiskIndex
from flexkv.cache.disk_ops import good_pages
from flexkv.cache.leases import EntryIds
from flexkv.cache.planner import Planner
from flexkv.transfer.graph import BlockIds, OpId, OpResult, RunDigests, TransferGraph, TransferOp


@dataclass(frozen=True, slots=True)
class Seal:
    """Pages whose trailers are being written; `entries` are of the disk index."""

    group: int
    entries: EntryIds


class StraightStores:
    """Plans stores and seals, and takes the ends of both.

    Args:
        orders: takes the seals, which the manager's disk lane runs.
        most_pages: that are being stored or sealed at once.

    Attributes:
        pages: being stored or sealed.
    """

    def __init__(
        self, disk: DiskIndex, planner: Planner, orders: list[TransferGraph], most_pages: int
    ) -> None:
        self._disk = disk
        self._planner = planner
        self._orders = orders
        self._most_pages = most_pages
        self._seals: dict[OpId, Seal] = {}
        self.pages = 0

    def __len__(self) -> int:
        """Seals in flight."""
        return len(self._seals)

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._seals

    def begin(
        self, group: int, keys: Keys, blocks: BlockIds, tokens: int, room: int
    ) -> tuple[NDArray[np.int32], EntryIds, TransferOp | None]:
        """Plans the store of `keys[i]`, none of them on disk, from engine block `blocks[i]`.

        Returns:
            Positions of those that found a place and room, their entries in the disk index, and the op.
        """
        room = max(0, min(room, self._most_pages - self.pages))
        valid = np.full(len(keys), tokens, np.int32)
        positions, entries, places, tags = self._disk.begin_write(group, keys, valid, room)
        stored = positions.view(np.int32)
        if not len(stored):
            return stored, entries, None
        self.pages += len(stored)
        return stored, entries, self._planner.straight_store(group, blocks[stored], places, tags)

    def stripes_ended(
        self, op: TransferOp, entries: EntryIds, good: NDArray[np.bool_], digests: RunDigests
    ) -> None:
        """Every rank has ended its part of a store: orders the seal of the good pages and gives up the others.

        Args:
            digests: of all ranks' runs, of the good pages.
        """
        bad = entries[~good]
        if len(bad):
            self._disk.end_write(op.group, bad, np.zeros(len(bad), np.bool_))
            self.pages -= len(bad)
        if good.any():
            seal = self._planner.seal(op.group, op.places[good], op.tags[good], digests)
            self._seals[seal.op_id] = Seal(op.group, entries[good])
            self._orders.append(TransferGraph((seal,)))

    def complete(self, result: OpResult) -> None:
        """Takes the end of a seal: what was sealed is on disk."""
        seal = self._seals.pop(result.op_id)
        self.pages -= len(seal.entries)
        good = good_pages(result, len(seal.entries))
        written = int(np.count_nonzero(self._disk.end_write(seal.group, seal.entries, good)))
        counts = self._disk.counts
        counts.written += written
        counts.straight_written += written
        counts.failed_writes += int(np.count_nonzero(~good))

    def pinned(self) -> list[EntryIds]:
        """What seals lease in the disk index."""
        return [seal.entries for seal in self._seals.values()]
