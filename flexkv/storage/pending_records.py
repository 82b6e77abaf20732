"""Keeps the records of published and evicted pages while one disk's journal is full."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.storage.journal import Evict, Journal, Publish
from flexkv.storage.slot_rows import ROW, Rows
from flexkv.storage.striping import Slots


class PendingRecords:
    """Passes records to a journal. Keeps the records that the journal rejects until the journal has space. Per slot of
    the disk, at most one record of a published page and one of an evicted page are kept, which bounds the size.

    Allocates its arrays when the journal first rejects a record, so that a journal that keeps up costs no memory.

    Args:
        slots: number of slots of each slab on this disk.

    Attributes:
        pages: number of published pages whose record is pending.
        evictions: number of evicted pages whose record is pending. Until these records are flushed, the index on disk
            lists pages that are gone.
    """

    def __init__(self, journal: Journal, slots: Sequence[int]) -> None:
        self._journal = journal
        self._slots = list(slots)
        self._rows: dict[int, Rows] = {}
        self._held: dict[int, NDArray[np.uint64]] = {}
        """Maps a slab's number to an array with one generation per slot: that of the published page whose record is
        pending, or 0. These numbers have arrays of their own, because a flush scans all of them.
        """
        self._evicted: dict[int, NDArray[np.uint64]] = {}
        """Maps a slab's number to an array with one generation per slot: that of the evicted page whose record is
        pending, or 0.
        """
        self.pages = 0
        self.evictions = 0

    def publish(self, record: Publish) -> bool:
        """Passes a record of published pages to the journal. Returns whether the journal accepted it. A rejected record
        stays pending, unless the journal has failed.
        """
        self.settle(record.slab, record.slots)
        if self._journal.put(record):
            return True
        if not self._journal.failure:
            self._add(record)
        return False

    def evict(self, record: Evict) -> None:
        """Passes a record of evicted pages to the journal, now or when the journal has space."""
        entered = ~self.settle(record.slab, record.slots, record.generations)
        if self._journal.put(record) or self._journal.failure:
            return
        evicted = self._evicted.get(record.slab)
        if evicted is None:
            evicted = self._evicted[record.slab] = np.zeros(self._slots[record.slab], np.uint64)
        # A published page whose record was still pending is not in the index, so its eviction needs no record. The
        # record of an older eviction from its slot stays pending.
        slots = record.slots[entered]
        self.evictions += int(np.count_nonzero(evicted[slots] == 0))
        evicted[slots] = record.generations[entered]

    def settle(
        self, slab: int, slots: Slots, generations: NDArray[np.uint64] | None = None
    ) -> NDArray[np.bool_]:
        """Drops the pending records of pages published in these slots. If `generations` is given, drops only records of
        these generations. Returns for which slots a record was dropped, bool [slots].
        """
        if slab not in self._held:
            return np.zeros(len(slots), np.bool_)
        held = self._held[slab]
        pending = held[slots] != 0
        if generations is not None:
            pending &= held[slots] == generations
        held[slots[pending]] = 0
        self.pages -= int(np.count_nonzero(pending))
        return np.asarray(pending)

    def flush(self) -> None:
        """Passes as many pending records to the journal as it accepts. Records of evicted pages go first, because a
        page published in the same slot is newer.
        """
        room = self._journal.room if self.pages or self.evictions else 0
        for eviction in self._take_evictions(room):
            room -= eviction.rows
            self.evict(eviction)
        for record in self._take(room):
            if not self._journal.put(record):
                self._add(record)

    def clear(self) -> None:
        """Drops all pending records. Call it after a reset, which drops every page on the disk."""
        self._rows.clear()
        self._held.clear()
        self._evicted.clear()
        self.pages = 0
        self.evictions = 0

    @property
    def waits(self) -> bool:
        """Whether a record is pending and the journal can still accept it later."""
        return (self.pages > 0 or self.evictions > 0) and not self._journal.ended

    def _add(self, record: Publish) -> None:
        rows = self._rows.get(record.slab)
        if rows is None:
            rows = self._rows[record.slab] = np.zeros(self._slots[record.slab], ROW)
            self._held[record.slab] = np.zeros(self._slots[record.slab], np.uint64)
        self._held[record.slab][record.slots] = record.generations
        rows["key"][record.slots] = record.keys
        rows["expiry"][record.slots] = record.expiries
        rows["tokens"][record.slots] = record.tokens
        rows["group"][record.slots] = record.group
        self.pages += record.rows

    def _take_evictions(self, most: int) -> Iterator[Evict]:
        """Removes and returns pending records of evicted pages, at most `most` rows in all."""
        for slab, evicted in self._evicted.items():
            slots = np.flatnonzero(evicted)[: max(0, most)]
            if not len(slots):
                continue
            most -= len(slots)
            generations = evicted[slots]
            evicted[slots] = 0
            self.evictions -= len(slots)
            yield Evict(slab, slots, generations)

    def _take(self, most: int) -> Iterator[Publish]:
        """Removes and returns pending records of published pages, at most `most` rows in all."""
        for slab, held in self._held.items():
            slots = np.flatnonzero(held)[: max(0, most)]
            if not len(slots):
                continue
            most -= len(slots)
            taken, generations = self._rows[slab][slots], held[slots]
            held[slots] = 0
            self.pages -= len(slots)
            for group in np.unique(taken["group"]).tolist():
                of = np.flatnonzero(taken["group"] == group)
                yield Publish(
                    slab,
                    group,
                    slots[of],
                    np.ascontiguousarray(taken["key"][of]),
                    generations[of],
                    taken["expiry"][of],
                    taken["tokens"][of].astype(np.int32),
                    time.monotonic(),
                )
