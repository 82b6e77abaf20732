"""The disk tier behind a manager's host tier: brings up what a lookup finds there, and writes what is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexkv.cache.base import GroupPolicy, GroupSpec, Keys, TailCandidates
from flexkv.cache.disk_base import DiskCounts, DiskLimits
from flexkv.cache.disk_index import NO_ENTRY, DiskIndex
from flexkv.cache.disk_ops import HostSide
from flexkv.cache.disk_reads import DiskReads
from flexkv.cache.disk_writes import DiskWrites
from flexkv.cache.leases import NO_ENTRIES, EntryIds
from flexkv.cache.restore import first_needed, longest_restorable
from flexkv.transfer.graph import OpId, OpResult, OpStatus, TransferGraph


class DiskFlow:
    """One unit's traffic between host memory and disk. Driven by its manager; never blocks but in `reset`.

    Args:
        clock: seconds, never running backwards; the waits of requests are measured with it.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        host: HostSide,
        disk: DiskIndex,
        limits: DiskLimits,
        clock: Callable[[], float],
    ) -> None:
        limits.check()
        self._specs = tuple(specs)
        self._all_prefix = all(spec.policy is GroupPolicy.PREFIX for spec in specs)
        self._host = host
        self._limits = limits
        self._clock = clock
        self._orders: list[TransferGraph] = []
        self.index = disk
        self.reads = DiskReads(host, disk, limits, self._orders)
        self.writes = DiskWrites(host, disk, limits, self._orders)
        self.down = ""
        """Why the disks cannot be used any more; empty while they can."""

    @property
    def counts(self) -> DiskCounts:
        return self.index.counts

    @property
    def moving(self) -> bool:
        """Whether a read or write is in flight."""
        return bool(len(self.reads.ops) or len(self.writes.ops))

    @property
    def busy(self) -> bool:
        """Whether something is in flight, or waits to be written and can be."""
        return self.moving or bool(self._orders) or self._may_write()

    def _may_write(self) -> bool:
        return not self.down and self.writes.waiting_pages > 0

    def take_orders(self) -> list[TransferGraph]:
        """The graphs planned since the last call, to be submitted in this order."""
        orders = self._orders[:]
        self._orders.clear()
        return orders

    # --- lookups ---

    def look(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_block: int,
        blocks: int,
        tail: Sequence[TailCandidates | None] | None,
        tail_tokens: int,
        room_pages: int,
    ) -> int:
        """Brings up what would make a match of `blocks` blocks after `start_block`, and `tail_tokens`, longer.

        Args:
            room_pages: more than so many pages cannot be promised to the request, so more is not read.

        Returns:
            Reads that the request now waits for; 0: the match is all there is to have.
        """
        wait = self.reads.waits.get(request_id)
        if self.down or (wait is not None and wait.given_up):
            return 0
        now_s = self._clock()
        if wait is not None and now_s - wait.since_s > self._limits.wait_s:
            self.reads.give_up(request_id)
            return 0
        wanted = self._wanted(keys, start_block, blocks, room_pages)
        if not wanted and tail is not None:
            wanted = self._wanted_tail(tail, start_block + blocks, tail_tokens)
        ops: set[OpId] = set()
        for group, group_keys in wanted:
            ops |= self.reads.bring_up(group, group_keys)
        if ops:
            self.reads.wait(request_id, ops, now_s)
        return len(ops)

    def waits(self, request_id: str) -> bool:
        """Whether the request waits for a read and has not done so for too long. O(1)."""
        wait = self.reads.waits.get(request_id)
        return wait is not None and bool(wait.ops) and self._clock() - wait.since_s <= self._limits.wait_s

    def _wanted(
        self, keys: Sequence[Keys], start: int, blocks: int, room_pages: int
    ) -> list[tuple[int, Keys]]:
        """Per group, the keys of the longest restorable prefix that the match lacks; each in host memory or on disk."""
        end = start + blocks
        if self._all_prefix:
            most = start + max(0, room_pages) // len(self._specs)
            reach = most
            for group, group_keys in enumerate(keys):
                reach = end + self._reach(group, group_keys[end:reach])
                if reach <= end:
                    return []
            return [(group, group_keys[end:reach]) for group, group_keys in enumerate(keys)]
        present = [self._present(group, group_keys[start:]) for group, group_keys in enumerate(keys)]
        longest = longest_restorable(self._specs, present, room_pages)
        if longest <= blocks:
            return []
        firsts = (first_needed(spec, longest) for spec in self._specs)
        return [
            (group, keys[group][start + first : start + longest])
            for group, first in enumerate(firsts)
            if first < longest
        ]

    def _reach(self, group: int, keys: Keys) -> int:
        """How many leading keys are on disk or in host memory; the first is not in host memory."""
        reach = 0
        while reach < len(keys):
            on_disk = self.index.reach(group, keys[reach:])
            reach += on_disk
            in_host = len(self._host.index.match_prefix(group, keys[reach:])) if on_disk else 0
            reach += in_host
            if not in_host:
                break
        return reach

    def _present(self, group: int, keys: Keys) -> np.ndarray:
        return np.asarray((self._host.index.find(group, keys) != NO_ENTRY) | self.index.present(group, keys))

    def _wanted_tail(
        self, tail: Sequence[TailCandidates | None], end_block: int, tail_tokens: int
    ) -> list[tuple[int, Keys]]:
        """The keys of the longest partial tail, if it is longer than `tail_tokens`."""
        lengths: list[dict[int, int]] = []
        for group, candidates in enumerate(tail):
            if not self._all_prefix or candidates is None or candidates.base_block != end_block:
                return []
            there = np.flatnonzero(self._present(group, candidates.keys))
            lengths.append({int(candidates.tokens[i]): int(i) for i in there})
        longest = max(set.intersection(*(set(known) for known in lengths)), default=0)
        if longest <= tail_tokens:
            return []
        return [
            (group, candidates.keys[lengths[group][longest] :][:1])
            for group, candidates in enumerate(tail)
            if candidates is not None
        ]

    # --- what happens in host memory ---

    def stored(self, group: int, keys: Keys) -> None:
        """These pages became visible in host memory by a store."""
        if not self.down:
            self.writes.offer(group, keys)

    def left(self, group: int, keys: Keys) -> None:
        """These pages left host memory to make room."""
        self.counts.lost += int(np.count_nonzero(~self.index.known(group, keys)))

    # --- ends ---

    def pump(self) -> None:
        """Plans the writes that may be planned now."""
        if not self.down:
            self.writes.pump(len(self._specs), idle=not len(self.reads.ops))

    def complete(self, result: OpResult) -> None:
        """Takes the terminal result of a read or write.

        Raises:
            KeyError: no such op is in flight.
        """
        if result.status is OpStatus.LANE_DOWN:
            self.go_down(result.reason or "the disk lane is down")
        (self.reads if result.op_id in self.reads.ops else self.writes).complete(result)

    def go_down(self, reason: str) -> None:
        """The disks cannot be used any more: what they hold is a miss, and nothing is written."""
        self.down = self.down or reason
        self.writes.reset()

    def expire(self, now_s: float) -> None:
        """Drops the waits of requests that were never heard of again after they had waited long enough."""
        before_s = now_s - 2 * self._limits.wait_s
        for request_id in [r for r, wait in self.reads.waits.items() if wait.since_s < before_s]:
            self.reads.drop(request_id)

    def reset(self) -> None:
        """Everything on disk becomes a miss, durably; what is in flight ends without becoming visible."""
        for request_id in list(self.reads.waits):
            self.reads.drop(request_id)
        self.writes.reset()
        self.index.reset()

    # --- integrity ---

    def pinned_in_host(self) -> list[EntryIds]:
        """What ops and waiting requests pin in the host index."""
        held = [entries for wait in self.reads.waits.values() for _, entries in wait.held]
        return [*held, *(op.host for op in self.reads.ops), *(op.host for op in self.writes.ops)]

    def check_integrity(self) -> None:
        """
        Raises:
            ContractError: an invariant of the disk index is broken.
        """
        pinned = [*(op.disk for op in self.reads.ops), *(op.disk for op in self.writes.ops)]
        self.index.entries.check_integrity(np.concatenate(pinned) if pinned else NO_ENTRIES)
