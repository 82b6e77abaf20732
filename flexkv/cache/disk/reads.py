"""Pages on their way from disk to host memory, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexkv.cache.base import Keys
from flexkv.cache.disk.base import DiskLimits, WantedBlocks
from flexkv.cache.disk.ops import DiskOp, DiskOps
from flexkv.cache.disk.rates import DiskRates
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.host_tier import HostTier
from flexkv.cache.leases import NO_ENTRY, EntryIds
from flexkv.cache.planner import Planner
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import Blame, OpId, OpResult, OpStatus, ReadIds, SlotIds, TransferGraph


@dataclass(slots=True)
class Wait:
    """A request whose lookup found more on disk than in host memory.

    Attributes:
        since_s: the clock when it began to wait.
        ops: reads that have not ended.
        held: group and host entries that were read for it, pinned once each, until its next lookup has leased them.
        given_up: it goes on without the rest of what is on disk: that took too long, or is computed sooner.
    """

    since_s: float
    ops: set[OpId] = field(default_factory=set)
    held: list[tuple[int, EntryIds]] = field(default_factory=list)
    given_up: bool = False


class DiskReads:
    """Plans reads and takes their ends.

    Contract with both indexes: while a read is in flight its host entries are pending and pinned, so that nobody is
    promised or given their slots, and its disk entries are pinned, so that their places are not rewritten. What was
    verified is published in host memory; what was not is forgotten on disk.

    Args:
        indexes: of the unit's own disks, then of its siblings'.
        orders: takes the reads of the unit's own disks.
        forgotten: is told of blocks that were forgotten on disk, because their place did not hold them.
    """

    def __init__(
        self,
        host: HostTier,
        planner: Planner,
        indexes: Sequence[StoredIndex],
        limits: DiskLimits,
        orders: list[TransferGraph],
        rates: DiskRates,
        clock: Callable[[], float],
        forgotten: Callable[[int, Keys], object],
    ) -> None:
        self._forgotten = forgotten
        self._host = host
        self._planner = planner
        self._indexes = indexes
        self._disk = indexes[0]
        self._limits = limits
        self._orders = orders
        self._rates = rates
        self._clock = clock
        self._reader = [np.zeros(len(tokens), np.int64) for tokens in host.tokens]
        """Of each host slot, the read that was given it last, or 0. It may have ended."""
        self._unmarked: list[DiskOp] = []
        """Reads that `_reader` does not know yet: marking costs a lookup, and only another one meanwhile needs it."""
        self.sibling_orders: list[TransferGraph] = []
        """Reads of siblings' pages that were planned and not handed out."""
        self.ops = DiskOps()
        self.waits: dict[str, Wait] = {}

    # --- requests ---

    def bring_up(self, wanted: WantedBlocks, layerwise: bool = False) -> set[OpId]:
        """Reads those of the blocks that are not in host memory and not on their way.

        Args:
            layerwise: by ranges of layers, as far as the pages lie on the unit's own disks.

        Returns:
            The reads to wait for; none when there is no room.
        """
        index, group, keys = self._host.index, wanted.group, wanted.keys
        room = 0
        if len(self.ops) < self._limits.ops:
            room = self._limits.read_pages - self.ops.pages
        if not len(self.ops):
            self._unmarked.clear()
        waited = self._under_way(group, keys) if len(self.ops) else set()
        positions, entries, slots, evicted, _, dropped = index.insert(group, keys, room)
        if dropped and room > 0 and not len(positions):
            # What host memory has of the rest keeps the slots that the next blocks need: let it go.
            wanted = wanted.at(index.find(group, keys, ready_only=False) == NO_ENTRY)
            positions, entries, slots, evicted, _, _ = index.insert(group, wanted.keys, room)
        if len(evicted):
            self._host.evicted(group, evicted)
        if len(positions):
            missing = wanted if len(positions) == len(wanted) else wanted.at(positions)
            waited |= self._plan_all(missing, entries, slots, layerwise)
        return waited

    def _plan_all(
        self, wanted: WantedBlocks, entries: EntryIds, slots: SlotIds, layerwise: bool
    ) -> set[OpId]:
        """A read from each source that has some of the blocks; all are on disk."""
        if wanted.entries is not None:
            return {self._plan(self._disk, wanted, wanted.entries, entries, slots, layerwise)}
        ops = set()
        left = np.ones(len(wanted), np.bool_)
        for source in self._indexes:
            found = source.entries.find(wanted.group, wanted.keys)
            mine = left
            if source is not self._indexes[-1]:
                mine = left & (found != NO_ENTRY)
                left = left & ~mine
            if mine.any():
                part = wanted.at(mine)
                ops.add(self._plan(source, part, found[mine], entries[mine], slots[mine], layerwise))
        return ops

    def _plan(
        self,
        source: StoredIndex,
        wanted: WantedBlocks,
        disk: EntryIds,
        entries: EntryIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> OpId:
        """A read of pages that are all in `source`, as its entries `disk`."""
        own, group = source is self._disk, wanted.group
        places, tags = source.begin_read(group, wanted.keys, disk)
        graph = self._planner.read(group, slots, places, tags, layerwise and own)
        op_id = graph.ops[0].op_id
        ahead = self.ops.pages
        op = DiskOp(
            op_id,
            group,
            entries,
            disk,
            slots,
            places,
            source.epoch,
            source,
            self._clock(),
            ahead,
            tokens=tag_fields(tags)["tokens"],
        )
        self.ops.add(op)
        self._unmarked.append(op)
        (self._orders if own else self.sibling_orders).append(graph)
        return op_id

    def _under_way(self, group: int, keys: Keys) -> set[OpId]:
        """The reads that bring up any of `keys`."""
        entries = self._host.index.find(group, keys, ready_only=False)
        self._mark()
        readers = self._reader[group][self._host.index.slots_of(entries[entries != NO_ENTRY])]
        return {OpId(op_id) for op_id in np.unique(readers).tolist() if op_id in self.ops}

    def _mark(self) -> None:
        for op in self._unmarked:
            if op.op_id in self.ops:
                self._reader[op.group][op.slots] = op.op_id
        self._unmarked.clear()

    def filling(self, group: int, slots: SlotIds) -> ReadIds:
        """Of each host slot the read that fills it and has not ended, or 0."""
        self._mark()
        reads: ReadIds = self._reader[group][slots]
        for read in np.unique(reads).tolist():
            if read not in self.ops:
                reads[reads == read] = 0
        return reads

    def wait(self, request_id: str, ops: set[OpId], now_s: float) -> None:
        """The request waits for these reads."""
        wait = self.waits.get(request_id)
        if wait is None:
            wait = self.waits[request_id] = Wait(now_s)
            self._disk.counts.waits += 1
        wait.ops |= ops
        for op_id in ops:
            self.ops.get(op_id).waiters.add(request_id)

    def holds_up(self, request_id: str) -> bool:
        """Whether the request waits for a read and has not done so for too long. O(1)."""
        wait = self.waits.get(request_id)
        return wait is not None and bool(wait.ops) and self._clock() - wait.since_s <= self._limits.wait_s

    def leave_rest(self, request_id: str, now_s: float) -> None:
        """The request waits for what it waits for, and for no more."""
        self.waits.setdefault(request_id, Wait(now_s)).given_up = True

    def let_go(self, request_id: str) -> None:
        """Unpins what was read for the request: its lookup has leased it, or nobody wants it any more."""
        wait = self.waits.get(request_id)
        if wait is not None:
            for _, entries in wait.held:
                self._host.index.unpin(entries)
            wait.held.clear()

    def drop(self, request_id: str) -> None:
        """The request waits no more. The reads go on: what they bring is worth having."""
        self.let_go(request_id)
        wait = self.waits.pop(request_id, None)
        for op_id in wait.ops if wait is not None else ():
            self.ops.get(op_id).waiters.discard(request_id)

    def give_up(self, request_id: str) -> None:
        """The request has waited too long; until it is dropped it does not wait again."""
        wait = self.waits[request_id]
        self.let_go(request_id)
        for op_id in wait.ops:
            self.ops.get(op_id).waiters.discard(request_id)
        wait.ops.clear()
        wait.given_up = True
        self._disk.counts.late += 1

    def expire(self, now_s: float) -> None:
        """Drops the waits of requests that were never heard of again after they had waited long enough."""
        before_s = now_s - 2 * self._limits.wait_s
        for request_id in [r for r, wait in self.waits.items() if wait.since_s < before_s]:
            self.drop(request_id)

    def reset(self) -> None:
        """No request waits any more; the reads end by themselves."""
        for request_id in list(self.waits):
            self.drop(request_id)

    def pinned_in_host(self) -> list[EntryIds]:
        """What reads and waiting requests pin in the host index."""
        held = [entries for wait in self.waits.values() for _, entries in wait.held]
        return [*held, *(op.host for op in self.ops)]

    # --- ends ---

    def _any_partial(self) -> bool:
        return any(index.any_partial for index in self._indexes)

    def complete(self, result: OpResult) -> None:
        op = self.ops.pop(result.op_id)
        if result.status is OpStatus.OK and op.source is self._disk:
            now_s = self._clock()
            self._rates.read.see(op.ahead + len(op.host), now_s - op.begun_s, now_s)
        good = op.good(result)
        counts, index = self._disk.counts, self._host.index
        if op.tokens is not None and self._any_partial():
            self._host.tokens[op.group][op.slots] = op.tokens
        current = op.epoch == op.source.epoch
        # A read that was never issued says nothing about what is on disk, nor does a page of it that was not.
        suspect = np.zeros_like(good)
        if result.status is OpStatus.FAILED and current:
            suspect = ~good & (result.blamed(len(good)) <= Blame.DISK)
        counts.failed_reads += int(np.count_nonzero(suspect))
        counts.unread += int(np.count_nonzero(~good & ~suspect)) if current else len(good)
        if not current:
            good[:] = False
        # Leased for those that wait in the same pass: by themselves they would first be made evictable.
        published = index.finish(op.host, good.view(np.uint8), len(op.waiters)).view(np.bool_)
        there = op.host if published.all() else op.host[published]
        counts.read += len(there)
        for request_id in op.waiters:
            wait = self.waits[request_id]
            wait.ops.discard(op.op_id)
            if len(there):
                wait.held.append((op.group, there))
        lost = op.source.entries.keys_of(op.disk[suspect])
        op.source.end_read(op.group, op.disk, op.places, suspect)
        if len(there):
            self._host.published(op.group, there)
        if len(lost):
            self._forgotten(op.group, lost)
