"""The disk tier behind a manager's host tier: brings up what a lookup finds there, and writes what is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupPolicy, GroupSpec, Keys, TailCandidates
from flexkv.cache.disk_base import DiskCounts, DiskLimits, Straight
from flexkv.cache.disk_index import NO_ENTRY, DiskIndex
from flexkv.cache.disk_ops import HostSide
from flexkv.cache.disk_rates import DiskRates
from flexkv.cache.disk_reads import DiskReads
from flexkv.cache.disk_writes import DiskWrites
from flexkv.cache.leases import NO_ENTRIES, EntryIds
from flexkv.cache.restore import first_needed, longest_restorable
from flexkv.cache.straight_loads import StraightLoads, StraightPages
from flexkv.cache.straight_stores import StraightStores
from flexkv.transfer.graph import OpId, OpResult, OpStatus, ReadIds, TransferGraph


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lookup would have brought up.

    Attributes:
        parts: per group, the keys of its blocks, each in host memory or on disk.
        tokens: that the engine need not compute with all of them.
        whole_blocks: the parts are the same blocks of every group, and any prefix of them is worth having.
    """

    parts: list[tuple[int, Keys]]
    tokens: int
    whole_blocks: bool = False


NOTHING = Wanted([], 0)


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks that follow a match and may be promised though some are on their way up.

    Attributes:
        entries: per group, those of the host index, as many in each: ready, or pending and pinned by their read.
        reads: per group, of each block the read that brings it, or 0 for one that is there.
    """

    entries: list[EntryIds]
    reads: list[ReadIds]

    @property
    def blocks(self) -> int:
        return len(self.entries[0])


@dataclass(frozen=True, slots=True)
class Looked:
    """What a lookup found on disk.

    Attributes:
        reads: reads that the request now waits for.
        coming: what may be promised at once; None for nothing.
        straight: per group, what may be promised and is loaded straight from disk; leased.
    """

    reads: int = 0
    coming: Coming | None = None
    straight: Sequence[StraightPages] | None = None


NOTHING_FOUND = Looked()


@dataclass(frozen=True, slots=True)
class LeftToEngine:
    """A choice to compute, for the operator: `pages` take `read_s` to bring up, and `compute_s` to compute."""

    pages: int
    read_s: float
    compute_s: float


class DiskFlow:
    """One unit's traffic between host memory and disk. Driven by its manager; never blocks but in `reset`.

    Args:
        clock: seconds, never running backwards; the waits of requests are measured with it.
        siblings: pages of other units' folders; None where there are none.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        host: HostSide,
        disk: DiskIndex,
        limits: DiskLimits,
        clock: Callable[[], float],
        siblings: DiskIndex | None = None,
    ) -> None:
        limits.check()
        self._specs = tuple(specs)
        self._all_prefix = all(spec.policy is GroupPolicy.PREFIX for spec in specs)
        self._host = host
        self._limits = limits
        self._clock = clock
        self._orders: list[TransferGraph] = []
        self.index = disk
        self.siblings = siblings
        self.rates = DiskRates()
        self.last_left: LeftToEngine | None = None
        """The last choice to leave pages on disk and compute them."""
        self.reads = DiskReads(host, disk, limits, self._orders, self.rates, clock, siblings)
        self.writes = DiskWrites(host, disk, limits, self._orders)
        self.straight: StraightLoads | None = None
        """Loads without a page of host memory; None where there are none."""
        if limits.straight is not Straight.NEVER:
            self.straight = StraightLoads(disk, limits.straight, self.rates, clock)
        self.straight_stores: StraightStores | None = None
        """Stores without a page of host memory; None where stores go there."""
        if limits.straight_stores:
            self.straight_stores = StraightStores(disk, host.planner, self._orders, limits.write_pages)
        self.down = ""
        """Why the disks cannot be used any more; empty while they can."""

    @property
    def counts(self) -> DiskCounts:
        return self.index.counts

    @property
    def moving(self) -> bool:
        """Whether a read or write is in flight."""
        seals = 0 if self.straight_stores is None else len(self.straight_stores)
        return bool(len(self.reads.ops) or len(self.writes.ops) or seals)

    @property
    def busy(self) -> bool:
        """Whether something is in flight, or waits to be written and can be."""
        return self.moving or bool(self._orders or self.reads.sibling_orders) or self._may_write()

    def _may_write(self) -> bool:
        return not self.down and self.writes.waiting_pages > 0

    def take_orders(self) -> list[TransferGraph]:
        """The graphs planned since the last call, to be submitted in this order."""
        orders = self._orders[:]
        self._orders.clear()
        return orders

    def take_sibling_orders(self) -> list[TransferGraph]:
        """The same for reads of siblings' pages."""
        orders = self.reads.sibling_orders[:]
        self.reads.sibling_orders.clear()
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
    ) -> Looked:
        """Brings up what would make a match of `blocks` blocks after `start_block`, and `tail_tokens`, longer.

        With `DiskLimits.stream` whole blocks may be promised at once (`Looked.coming`, to be pinned before anything
        else is asked); for all else the request waits.

        Args:
            room_pages: more than so many pages cannot be promised to the request, so more is not read.
        """
        wait = self.reads.waits.get(request_id)
        if self.down or (wait is not None and wait.given_up):
            return NOTHING_FOUND
        now_s = self._clock()
        if wait is not None and now_s - wait.since_s > self._limits.wait_s:
            self.reads.give_up(request_id)
            return NOTHING_FOUND
        wanted = self._wanted(keys, start_block, blocks, room_pages)
        if not wanted.parts and tail is not None:
            wanted = self._wanted_tail(tail, start_block + blocks, tail_tokens)
        if self.straight is not None and wanted.whole_blocks and not tail_tokens:
            pages = sum(len(part) for _, part in wanted.parts)
            if self.straight.wants(pages, self.reads.ops.pages, now_s):
                straight = self.straight.lease(wanted.parts)
                if straight is not None:
                    return self._straight(request_id, wanted, straight, now_s)
        worth = self._worth(wanted, now_s)
        streamed = self._limits.stream and worth.whole_blocks and not tail_tokens
        ops: set[OpId] = set()
        for group, group_keys in worth.parts:
            ops |= self.reads.bring_up(group, group_keys, streamed and self._limits.stream_layers)
        if streamed:
            coming = self._coming(worth)
            if coming.blocks:
                return Looked(coming=coming)
        if ops:
            self.reads.wait(request_id, ops, now_s)
        if worth is not wanted:
            self.reads.leave_rest(request_id, now_s)
        return Looked(len(ops))

    def _straight(
        self, request_id: str, wanted: Wanted, straight: Sequence[StraightPages], now_s: float
    ) -> Looked:
        """What was leased, unless the engine computes it sooner."""
        assert self.straight is not None
        pages, loading = sum(map(len, straight)), self.straight.pages
        if not self._limits.compute_if_faster or self.rates.straight_is_worth(
            pages, wanted.tokens, loading, now_s
        ):
            return Looked(straight=straight)
        for leased in straight:
            self.straight.release(leased)
        self.counts.left += 1
        self.counts.left_pages += pages
        self.last_left = LeftToEngine(
            pages, self.rates.straight_s(pages, loading), self.rates.compute_s(wanted.tokens)
        )
        self.reads.leave_rest(request_id, now_s)
        return NOTHING_FOUND

    def _coming(self, wanted: Wanted) -> Coming:
        """The leading blocks of `wanted` that are in host memory or on their way up."""
        entries, reads = [], []
        for group, keys in wanted.parts:
            found = self._host.index.find(group, keys, ready_only=False)
            found = found[: _leading(found != NO_ENTRY)]
            filling = self.reads.filling(group, self._host.index.slots_of(found))
            # A block that a store is filling is nobody's to promise: what it holds may never be published.
            reach = _leading(self._host.index.ready(found).view(np.bool_) | (filling != 0))
            entries.append(found[:reach])
            reads.append(filling[:reach])
        blocks = min(map(len, entries))
        return Coming([e[:blocks] for e in entries], [r[:blocks] for r in reads])

    def _worth(self, wanted: Wanted, now_s: float) -> Wanted:
        """The part of `wanted` that is brought up sooner than computed: all of it, as long as nothing is known."""
        rates, queued = self.rates, self.reads.ops.pages
        if not wanted.parts or not self._limits.compute_if_faster or not rates.believed(now_s):
            return wanted
        pages = sum(len(keys) for _, keys in wanted.parts)
        if rates.all_worth(pages, wanted.tokens, queued):
            return wanted
        # Some may be in host memory or on their way already: then only the rest has to be read.
        found = [self._host.index.find(group, keys, ready_only=False) for group, keys in wanted.parts]
        ready = [self._host.index.ready(entries).view(np.bool_) for entries in found]
        if wanted.whole_blocks:
            missing = np.cumsum(sum((entries == NO_ENTRY).astype(np.int64) for entries in found))
            waiting = np.logical_or.accumulate(~np.logical_and.reduce(ready))
            tokens = self._specs[0].block_tokens * np.arange(1, len(missing) + 1)
        else:
            missing = np.array([sum(int(np.count_nonzero(entries == NO_ENTRY)) for entries in found)])
            waiting = np.array([not all(flags.all() for flags in ready)])
            tokens = np.array([wanted.tokens])
        kept = rates.worth(missing, waiting, tokens, queued)
        if kept == len(missing):
            return wanted
        left_pages = int(missing[-1] - (missing[kept - 1] if kept else 0))
        left_tokens = int(tokens[-1] - (tokens[kept - 1] if kept else 0))
        self.counts.left += 1
        self.counts.left_pages += left_pages
        self.last_left = LeftToEngine(
            left_pages,
            rates.read_s(left_pages, queued) + rates.load_s(left_pages),
            rates.compute_s(left_tokens),
        )
        if not kept:
            return NOTHING
        return Wanted([(group, keys[:kept]) for group, keys in wanted.parts], int(tokens[kept - 1]), True)

    def waits(self, request_id: str) -> bool:
        """Whether the request waits for a read and has not done so for too long. O(1)."""
        wait = self.reads.waits.get(request_id)
        return wait is not None and bool(wait.ops) and self._clock() - wait.since_s <= self._limits.wait_s

    def _wanted(self, keys: Sequence[Keys], start: int, blocks: int, room_pages: int) -> Wanted:
        """The longest restorable prefix, as far as the match lacks it."""
        end = start + blocks
        if self._all_prefix:
            most = start + max(0, room_pages) // len(self._specs)
            reach = most
            for group, group_keys in enumerate(keys):
                reach = end + self._reach(group, group_keys[end:reach])
                if reach <= end:
                    return NOTHING
            parts = [(group, group_keys[end:reach]) for group, group_keys in enumerate(keys)]
            return Wanted(parts, (reach - end) * self._specs[0].block_tokens, True)
        present = [self._present(group, group_keys[start:]) for group, group_keys in enumerate(keys)]
        longest = longest_restorable(self._specs, present, room_pages)
        if longest <= blocks:
            return NOTHING
        firsts = (first_needed(spec, longest) for spec in self._specs)
        parts = [
            (group, keys[group][start + first : start + longest])
            for group, first in enumerate(firsts)
            if first < longest
        ]
        return Wanted(parts, (longest - blocks) * self._specs[0].block_tokens)

    def _reach(self, group: int, keys: Keys) -> int:
        """How many leading keys are on disk or in host memory; the first is not in host memory."""
        reach = 0
        while reach < len(keys):
            on_disk = self._on_disk(group, keys[reach:])
            reach += on_disk
            in_host = len(self._host.index.match_prefix(group, keys[reach:])) if on_disk else 0
            reach += in_host
            if not in_host:
                break
        return reach

    def _on_disk(self, group: int, keys: Keys) -> int:
        """How many leading keys are on the unit's own disks or in a sibling's folder."""
        reach = self.index.reach(group, keys)
        if self.siblings is None:
            return reach
        while reach < len(keys):
            more = self.siblings.reach(group, keys[reach:])
            more += self.index.reach(group, keys[reach + more :])
            if not more:
                break
            reach += more
        return reach

    def _present(self, group: int, keys: Keys) -> np.ndarray:
        present = np.asarray(
            (self._host.index.find(group, keys) != NO_ENTRY) | self.index.present(group, keys)
        )
        return present if self.siblings is None else present | self.siblings.present(group, keys)

    def _wanted_tail(self, tail: Sequence[TailCandidates | None], end_block: int, tail_tokens: int) -> Wanted:
        """The longest partial tail, if it is longer than `tail_tokens`."""
        lengths: list[dict[int, int]] = []
        for group, candidates in enumerate(tail):
            if not self._all_prefix or candidates is None or candidates.base_block != end_block:
                return NOTHING
            there = np.flatnonzero(self._present(group, candidates.keys))
            lengths.append({int(candidates.tokens[i]): int(i) for i in there})
        longest = max(set.intersection(*(set(known) for known in lengths)), default=0)
        if longest <= tail_tokens:
            return NOTHING
        parts = [
            (group, candidates.keys[lengths[group][longest] :][:1])
            for group, candidates in enumerate(tail)
            if candidates is not None
        ]
        return Wanted(parts, longest - tail_tokens)

    # --- what happens in host memory ---

    def stored(self, group: int, keys: Keys) -> None:
        """These pages became visible in host memory by a store."""
        if not self.down:
            self.writes.offer(group, keys)

    def left(self, group: int, keys: Keys) -> None:
        """These pages left host memory to make room."""
        known = self.index.known(group, keys)
        if self.siblings is not None:
            known |= self.siblings.known(group, keys)
        self.counts.lost += int(np.count_nonzero(~known))

    def forget(self, group: int, keys: Keys) -> int:
        """These pages hold something else than they should; returns how many were on disk."""
        forgotten = self.index.forget(group, keys)
        if self.siblings is not None:
            forgotten += self.siblings.forget(group, keys)
        return forgotten

    # --- ends ---

    def pump(self) -> None:
        """Plans the writes that may be planned now."""
        if not self.down:
            self.writes.pump(len(self._specs), idle=not len(self.reads.ops))

    def offer_all(self) -> None:
        """What is in host memory and not on disk is to be written: the process is about to end."""
        if not self.down:
            self.writes.offer_all(len(self._specs))

    def complete(self, result: OpResult) -> None:
        """Takes the terminal result of a read or write.

        Raises:
            KeyError: no such op is in flight.
        """
        if result.status is OpStatus.LANE_DOWN:
            self.go_down(result.reason or "the disk lane is down")
        if self.straight_stores is not None and result.op_id in self.straight_stores:
            self.straight_stores.complete(result)
        else:
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
        if self.siblings is not None:
            self.siblings.reset()

    # --- integrity ---

    def pinned_in_host(self) -> list[EntryIds]:
        """What ops and waiting requests pin in the host index."""
        held = [entries for wait in self.reads.waits.values() for _, entries in wait.held]
        return [*held, *(op.host for op in self.reads.ops), *(op.host for op in self.writes.ops)]

    def check_integrity(self, straight: Sequence[EntryIds] = ()) -> None:
        """
        Args:
            straight: entries of the unit's own disks that promises and loads lease, each once.

        Raises:
            ContractError: an invariant of the disk index is broken.
        """
        for index in (self.index, self.siblings):
            if index is not None:
                pinned = [
                    op.disk for ops in (self.reads.ops, self.writes.ops) for op in ops if op.source is index
                ]
                if index is self.index:
                    seals = self.straight_stores
                    pinned += [*straight, *(seals.pinned() if seals is not None else ())]
                index.entries.check_integrity(np.concatenate(pinned) if pinned else NO_ENTRIES)


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
