"""Pages on their way from host memory to disk."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import Keys
from flexkv.cache.disk.base import DiskLimits, DiskMode
from flexkv.cache.disk.index import DiskIndex
from flexkv.cache.disk.ops import DiskOp, DiskOps
from flexkv.cache.host_tier import HostTier
from flexkv.cache.leases import NO_ENTRY, EntryIds
from flexkv.cache.planner import Planner
from flexkv.transfer.graph import OpResult, TransferGraph

LEAVE_PAGES = 256
"""Pages that are made to leave host memory at once, at most; bounds the time a step spends on it to tens of us."""

LEAVE_SHARE = 16
"""One host slot in so many is kept free where pages are written only as they leave, so that a store finds slots
without throwing away what is not on disk yet."""


class DiskWrites:
    """Plans writes and takes their ends.

    Contract with both indexes: while a write is in flight its host entries are pinned, so that the slots it reads
    keep their bytes, and its disk entries are pending and pinned, so that nobody reads or rewrites their places.
    """

    def __init__(
        self,
        host: HostTier,
        planner: Planner,
        disk: DiskIndex,
        limits: DiskLimits,
        orders: list[TransferGraph],
    ) -> None:
        self._host = host
        self._planner = planner
        self._disk = disk
        self._limits = limits
        self._orders = orders
        self._waiting: deque[tuple[int, Keys]] = deque()
        self._waiting_pages = 0
        self._leaving_pages: dict[int, int] = {}
        self.ops = DiskOps()

    @property
    def waiting_pages(self) -> int:
        """Pages that wait for their write to be planned."""
        return self._waiting_pages

    def offer(self, group: int, keys: Keys) -> None:
        """These pages became visible in host memory."""
        if self._limits.mode is DiskMode.EVICT:
            return
        if self._waiting_pages + len(keys) > self._limits.waiting_pages:
            self._disk.counts.dropped_writes += len(keys)
            return
        self._waiting.append((group, keys))
        self._waiting_pages += len(keys)

    def pump(self, groups: int, idle: bool) -> None:
        """Plans what may be written now. `idle`: the disk has no read to do. O(pages planned)."""
        if self._limits.mode is DiskMode.BACK:
            # More than half full, it no longer waits for a quiet moment.
            idle = (idle and not len(self.ops)) or 2 * self._waiting_pages > self._limits.waiting_pages
            self._drain(LEAVE_PAGES if idle else 0)
        else:
            self._drain(self._limits.write_pages)
        if self._limits.mode is not DiskMode.THROUGH:
            for group in range(groups):
                self._make_room(group)

    def offer_all(self, groups: int) -> None:
        """Offers what is in host memory, not leased and not on disk, in whatever mode.

        What was used last goes first, each chain from its start, and no more than the disks hold; the rest counts as
        dropped. Those of them that wait already are not entered twice, so that the queue is bounded however often this
        is called.
        """
        self._keep_leased_waiting()
        for group in range(groups):
            keys = self._unleased(group)
            places = self._disk.entries.up_slots(group)
            self._disk.counts.dropped_writes += int(np.count_nonzero(~self._disk.known(group, keys[places:])))
            keys = keys[:places]
            known = self._disk.known(group, keys)
            # So that what is written now displaces others and not these.
            self._disk.used(group, keys[known])
            keys = keys[~known]
            if len(keys):
                self._waiting.append((group, keys))
                self._waiting_pages += len(keys)

    def unwritten(self, groups: int) -> int:
        """Pages in host memory that are not on disk; those that somebody leases, or that are on their way, count."""
        on_disk = 0
        for group in range(groups):
            on_disk += int(np.count_nonzero(self._disk.present(group, self._unleased(group))))
        return len(self._host.index) - on_disk

    def give_up_waiting(self) -> int:
        """Forgets what waits; returns how many pages that are."""
        pages = self._waiting_pages
        self.reset()
        self._disk.counts.lost += pages
        return pages

    def flush(self) -> None:
        """Plans what waits, whatever the mode, as far as the bounds allow."""
        self._drain(self._limits.write_pages)

    def complete(self, result: OpResult) -> None:
        op = self.ops.pop(result.op_id)
        good = op.good(result)
        written = self._disk.end_write(op.group, op.disk, good)
        self._disk.counts.written += int(np.count_nonzero(written))
        self._disk.counts.failed_writes += int(np.count_nonzero(~good))
        if op.leaving:
            self._leaving_pages[op.group] -= len(op.host)
            self._leave(op.group, op.host)
        else:
            self._host.index.unpin(op.host)

    def reset(self) -> None:
        """Forgets what waits; writes in flight end by themselves."""
        self._waiting.clear()
        self._waiting_pages = 0

    # --- internals ---

    def _unleased(self, group: int) -> Keys:
        """The visible pages in host memory that nobody leases, used last first."""
        index = self._host.index
        entries = index.take_coldest(group, index.up_slots(group))
        keys = np.ascontiguousarray(index.keys_of(entries)[::-1])
        index.unpin(entries)
        return keys

    def _keep_leased_waiting(self) -> None:
        """What nobody leases, or has left host memory, does not wait any more."""
        index = self._host.index
        waiting, self._waiting, self._waiting_pages = self._waiting, deque(), 0
        for group, keys in waiting:
            entries = index.find(group, keys)
            there = entries != NO_ENTRY
            leased = keys[there][index.pins_of(entries[there]) > 0]
            if len(leased):
                self._waiting.append((group, leased))
                self._waiting_pages += len(leased)

    def _room(self) -> int:
        if len(self.ops) >= self._limits.ops:
            return 0
        return self._limits.write_pages - self.ops.pages

    def _drain(self, most: int) -> None:
        while self._waiting and (room := min(self._room(), most)) > 0:
            group, keys = self._waiting.popleft()
            if len(keys) > room:
                self._waiting.appendleft((group, keys[room:]))
                keys = keys[:room]
            self._waiting_pages -= len(keys)
            most -= len(keys)
            self._write_known(group, keys)

    def _write_known(self, group: int, keys: Keys) -> None:
        """Writes those of `keys` that are in host memory and not on disk."""
        keys = keys[~self._disk.known(group, keys)]
        entries = self._host.index.find(group, keys)
        there = entries != NO_ENTRY
        if there.any():
            slots = self._host.index.pin(entries[there])
            left = self._write(group, keys[there], entries[there], slots, leaving=False)
            self._host.index.unpin(left)

    def _write(
        self, group: int, keys: Keys, entries: EntryIds, slots: NDArray[np.int32], leaving: bool
    ) -> EntryIds:
        """Plans a write of pinned pages; returns the entries that found no place, still pinned."""
        tokens = self._host.tokens[group][slots]
        positions, disk, places, tags = self._disk.begin_write(group, keys, tokens, len(keys))
        without = np.ones(len(keys), np.bool_)
        without[positions] = False
        if len(positions):
            graph = self._planner.write(group, slots[positions], places, tags)
            op = graph.ops[0]
            self.ops.add(
                DiskOp(
                    op.op_id,
                    group,
                    entries[positions],
                    disk,
                    op.slots,
                    places,
                    self._disk.epoch,
                    self._disk,
                    leaving=leaving,
                )
            )
            self._orders.append(graph)
        self._disk.counts.dropped_writes += int(np.count_nonzero(without))
        return entries[without]

    def _make_room(self, group: int) -> None:
        """Writes what is to leave host memory next and is not on disk, and lets go of what is."""
        index = self._host.index
        leaving = self._leaving_pages.get(group, 0)
        missing = -(-index.up_slots(group) // LEAVE_SHARE) - index.free_slots(group) - leaving
        count = min(missing, self._room(), LEAVE_PAGES)
        if count <= 0:
            return
        entries = index.take_coldest(group, count)
        known = self._disk.known(group, index.keys_of(entries))
        self._leave(group, entries[known])
        entries = entries[~known]
        if len(entries):
            left = self._write(group, index.keys_of(entries), entries, index.slots_of(entries), leaving=True)
            self._leaving_pages[group] = leaving + len(entries) - len(left)
            self._leave(group, left)

    def _leave(self, group: int, entries: EntryIds) -> None:
        """Unpins pages and evicts those that nobody else leases."""
        index = self._host.index
        alone = entries[index.pins_of(entries) == 1]
        keys = index.keys_of(alone)
        removed = index.remove(alone).view(np.bool_)
        index.unpin(entries)
        if removed.any():
            self._host.evicted(group, keys[removed])
