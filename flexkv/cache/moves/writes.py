"""How pages are written from host memory to one tier: queues them, plans the writes and records their results."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRY, EntryIds, OpRole, TierId
from flexkv.cache.ledger.ops import WriteOp, good_pages
from flexkv.cache.tiers.contract import Sink, WriteMode
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import NEVER, OpResult, SlotIds

LEAVE_PAGES = 256
"""If one call plans writes because the tier is idle or because pages are to be evicted, these writes have at most this
many pages. Planning these writes then takes at most tens of microseconds of a step."""

LEAVE_SHARE = 16
"""In the write modes BACK and EVICT, one host slot in this many is kept free, so that a store finds free slots without
evicting pages that are not written yet."""


class WriteQueue:
    """The queue of pages to write to one tier: plans their writes and records the results.

    While a write is in flight, its entries in the index of host memory are pinned, so that the slots keep their bytes.
    Its entries in the tier's index are pending (not visible yet) and pinned, so that the tier's slots are not read or
    given to other pages.

    Args:
        tier_id: number of the tier, which has a sink.
    """

    def __init__(self, tier_id: TierId, tables: CacheTables) -> None:
        tier = tables.tiers[tier_id]
        assert tier.sink is not None
        self._tier_id = tier_id
        self._tier = tier
        self._sink: Sink = tier.sink
        self._tables = tables
        self._waiting: deque[tuple[int, Keys]] = deque()
        self._waiting_pages = 0
        self._left_out = 0
        """Number of pages for which the queue had no space while the tier could not be used yet (`Tier.held`)."""

    @property
    def waiting_pages(self) -> int:
        """Number of pages in the queue."""
        return self._waiting_pages

    @property
    def busy(self) -> bool:
        """Whether the queue has pages and the tier is in use."""
        return self._tier.in_use and self._waiting_pages > 0

    @property
    def held_pages(self) -> int:
        """Number of pages that wait until the tier may be used (`Tier.held`), including those for which the queue had
        no space; 0 if the tier may be used or is down."""
        return self._waiting_pages + self._left_out if self._tier.held else 0

    def offer(self, group: int, keys: Keys) -> None:
        """Queues pages that became visible in host memory, if the tier's write mode is THROUGH or BACK."""
        if self._tier.facts.write not in (WriteMode.EVICT, WriteMode.REUSE, WriteMode.OFF):
            self._enter(group, keys)

    def opened(self) -> None:
        """Called when the tier may be used after it was held (`Tier.held`). If the queue had no space for some pages
        until now, queues all pages in host memory that the tier lacks, which is O(pages in host memory). Pages that are
        no longer in host memory count as dropped.
        """
        left_out, self._left_out = self._left_out, 0
        if not left_out or not self._tier.in_use:
            self._tier.counts.dropped_writes += left_out
            return
        waiting = self._waiting_pages
        self._offer_host()
        self._tier.counts.dropped_writes += max(0, left_out - max(0, self._waiting_pages - waiting))

    def offer_reused(self, group: int, keys: Keys) -> None:
        """Queues pages that were used again from host memory, if the tier's write mode is REUSE."""
        if self._tier.facts.write is WriteMode.REUSE:
            self._enter(group, keys)

    def _enter(self, group: int, keys: Keys) -> None:
        if self._tier.down or self._waiting_pages + len(keys) > self._tier.facts.waiting_pages:
            if self._tier.down:
                self._tier.counts.down_writes += len(keys)
            elif self._tier.held:
                self._left_out += len(keys)
            else:
                self._tier.counts.dropped_writes += len(keys)
            return
        self._waiting.append((group, keys))
        self._waiting_pages += len(keys)

    def poll(self) -> None:
        """Plans the writes that may be planned now. O(pages planned)."""
        if self._tier.down:
            self.drop_waiting()
            return
        if self._tier.held:
            return
        if self._tier.facts.write is WriteMode.BACK:
            idle = not self._in_flight(OpRole.FETCH) and not self._in_flight(OpRole.WRITE)
            # If the queue is more than half full, it does not wait until the tier is idle.
            idle |= 2 * self._waiting_pages > self._tier.facts.waiting_pages
            self._drain(LEAVE_PAGES if idle else 0)
        else:
            self._drain(self._tier.facts.write_pages)
        if self._tier.facts.write in (WriteMode.BACK, WriteMode.EVICT):
            for group in self._tables.hub.owners:
                self._make_room(group)

    def _in_flight(self, role: OpRole) -> int:
        return self._tables.ops.count(role, self._tier_id)

    def offer_all(self) -> None:
        """Queues, whatever the write mode, the pages in host memory that are not pinned and that the tier lacks. Does
        nothing if the tier is not in use or does not have `TierFacts.write_at_close`.

        The most recently used pages come first (a prompt's first page before its later pages), and only as many as the
        tier can hold. The other pages count as dropped. Pages in the queue are not queued twice, so that the queue
        stays bounded however often this is called.
        """
        if self._tier.in_use and self._tier.facts.write_at_close:
            self._offer_host()

    def _offer_host(self) -> None:
        self._keep_pinned_waiting()
        for owner in self._tables.hub.owners:
            entries, room = self._unpinned(owner), self._sink.room(owner)
            for group, keys in self._keys_by_group(owner, entries[room:]):
                self._tier.counts.dropped_writes += int(np.count_nonzero(~self._sink.known(group, keys)))
            for group, keys in self._keys_by_group(owner, entries[:room]):
                self._offer_unpinned(group, keys)

    def _offer_unpinned(self, group: int, keys: Keys) -> None:
        known = self._sink.known(group, keys)
        # Pages that the tier already has count as used, so that the pages written now do not evict them.
        self._sink.used(group, keys[known])
        keys = keys[~known]
        if len(keys):
            self._waiting.append((group, keys))
            self._waiting_pages += len(keys)

    def unwritten(self) -> int:
        """Returns the number of pages in host memory that the tier lacks. Pages that are pinned or being written count
        as lacking.
        """
        written = 0
        for owner in self._tables.hub.owners:
            for group, keys in self._keys_by_group(owner, self._unpinned(owner)):
                written += int(np.count_nonzero(self._tier.present(group, keys)))
        return len(self._tables.hub.index) - written

    def give_up_waiting(self) -> int:
        """Empties the queue, counts its pages as lost, and returns their number."""
        pages = self._waiting_pages + self._left_out
        self.reset()
        self._tier.counts.lost += pages
        return pages

    def drop_waiting(self) -> None:
        """Empties the queue, and counts its pages as not written because the tier is down."""
        self._tier.counts.down_writes += self._waiting_pages + self._left_out
        self.reset()

    def flush(self) -> None:
        """Plans the writes of queued pages, whatever the write mode, up to the limits of writes in flight."""
        if self._tier.held:
            return
        self._drain(self._tier.facts.write_pages)

    def end_write(self, op: WriteOp, result: OpResult) -> None:
        good = good_pages(result, op.pages)
        written = self._sink.end_write(op.group, op.entries, good)
        self._tier.counts.written += int(np.count_nonzero(written))
        self._tier.counts.failed_writes += int(np.count_nonzero(~good))
        if op.leaving:
            self._tables.hub.unpin_and_evict(op.group, op.host)
        else:
            self._tables.hub.index.unpin(op.host)

    def recount(self) -> None:
        """Recounts the queued pages. Called after a call that planned writes was interrupted. Pages that the call had
        removed from the queue are not written.
        """
        self._waiting_pages = sum(len(keys) for _, keys in self._waiting)

    def reset(self) -> None:
        """Empties the queue. Writes in flight continue."""
        self._waiting.clear()
        self._waiting_pages = self._left_out = 0

    # --- internals ---

    def _unpinned(self, owner: int) -> EntryIds:
        """Returns the entries of the visible, unpinned pages in the group's host slots, most recently used first. These
        may be pages of groups that share the slots. Valid until an entry is inserted or removed.
        """
        index = self._tables.hub.index
        entries = index.take_coldest(owner, index.up_slots(owner))
        index.unpin(entries)
        return entries[::-1]

    def _keys_by_group(self, owner: int, entries: EntryIds) -> list[tuple[int, Keys]]:
        """Returns the keys of entries, split by group. The entries belong to `owner` and the groups that share its
        slots. Keeps the order."""
        parts = self._tables.hub.by_group(owner, np.ascontiguousarray(entries))
        return [(group, self._tables.hub.index.keys_of(part)) for group, part in parts]

    def _keep_pinned_waiting(self) -> None:
        """Removes from the queue the pages that are not pinned or are no longer in host memory."""
        index = self._tables.hub.index
        waiting, self._waiting, self._waiting_pages = self._waiting, deque(), 0
        for group, keys in waiting:
            entries = index.find(group, keys)
            there = entries != NO_ENTRY
            pinned = keys[there][index.pins_of(entries[there]) > 0]
            if len(pinned):
                self._waiting.append((group, pinned))
                self._waiting_pages += len(pinned)

    def _room(self) -> int:
        if self._in_flight(OpRole.WRITE) >= self._tier.facts.fetch_ops:
            return 0
        return self._tier.facts.write_pages - self._tables.ops.pages(OpRole.WRITE, self._tier_id)

    def _drain(self, most: int) -> None:
        while self._waiting and (room := min(self._room(), most)) > 0:
            group, keys = self._waiting.popleft()
            if len(keys) > room:
                self._waiting.appendleft((group, keys[room:]))
                keys = keys[:room]
            self._waiting_pages -= len(keys)
            most -= len(keys)
            self._write_unknown(group, keys)

    def _write_unknown(self, group: int, keys: Keys) -> None:
        """Plans a write of the pages among `keys` that are in host memory and that the tier lacks."""
        keys = keys[~self._sink.known(group, keys)]
        entries = self._tables.hub.index.find(group, keys)
        there = entries != NO_ENTRY
        there[there] &= self._may_take(group, entries[there])
        if there.any():
            slots = self._tables.hub.index.pin(entries[there])
            left = self._write(group, keys[there], entries[there], slots, leaving=False)
            self._tables.hub.index.unpin(left)

    def _write(self, group: int, keys: Keys, entries: EntryIds, slots: SlotIds, leaving: bool) -> EntryIds:
        """Plans a write of pinned pages. Returns the entries for which the tier had no slot, still pinned."""
        tokens: NDArray[np.int32] = self._tables.hub.tokens[group][slots]
        op_id = self._tables.ops.next_id()
        positions, stored, plan = self._sink.plan_write(op_id, group, keys, slots, tokens)
        without = np.ones(len(keys), np.bool_)
        without[positions] = False
        if plan is not None:
            self._tables.ops.add(
                WriteOp(
                    plan=plan,
                    role=OpRole.WRITE,
                    tier=self._tier_id,
                    entries=stored,
                    host=entries[positions],
                    epoch=self._tables.epoch,
                    leaving=leaving,
                )
            )
            self._tables.outbox.put(self._tier_id, plan)
        self._tier.counts.dropped_writes += int(np.count_nonzero(without))
        return entries[without]

    def _make_room(self, owner: int) -> None:
        """Frees host slots of the group, if fewer are free than LEAVE_SHARE demands. Chooses the pages that would be
        evicted next. Pages that the tier below already has, or must not get, are evicted at once. The others are first
        written to that tier, then evicted.
        """
        index = self._tables.hub.index
        missing = -(-index.up_slots(owner) // LEAVE_SHARE) - index.free_slots(owner)
        if missing <= 0:
            return
        count = min(missing - self._leaving_pages(owner), self._room(), LEAVE_PAGES)
        if count <= 0:
            return
        for group, entries in self._tables.hub.by_group(owner, index.take_coldest(owner, count)):
            self._write_leaving(group, entries)

    def _may_take(self, group: int, entries: EntryIds) -> NDArray[np.bool_]:
        """Returns which of these pages may be written to the tier, bool [entries]. A page that expires may be written
        only if the tier keeps expiry times.
        """
        times = self._tables.hub.times
        if not times.any or self._sink.keeps_times:
            return np.ones(len(entries), np.bool_)
        lasting: NDArray[np.bool_] = times.of(group, self._tables.hub.index.slots_of(entries)) == NEVER
        return lasting

    def _write_leaving(self, group: int, entries: EntryIds) -> None:
        index = self._tables.hub.index
        known = self._sink.known(group, index.keys_of(entries)) | ~self._may_take(group, entries)
        self._tables.hub.unpin_and_evict(group, entries[known])
        entries = entries[~known]
        if len(entries):
            keys, slots = index.keys_of(entries), index.slots_of(entries)
            left = self._write(group, keys, entries, slots, leaving=True)
            self._tables.hub.unpin_and_evict(group, left)

    def _leaving_pages(self, owner: int) -> int:
        """Number of pages that will be evicted from host memory when their write in flight has ended. O(ops in
        flight)."""
        return sum(
            op.pages
            for op in self._tables.ops
            if isinstance(op, WriteOp)
            and op.leaving
            and (op.tier, self._tables.hub.owner(op.group)) == (self._tier_id, owner)
        )
