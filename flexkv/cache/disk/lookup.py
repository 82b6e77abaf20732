"""What a lookup would have of the disks: how far they reach, what of it is worth bringing up, and what is promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupPolicy, GroupSpec, Keys, TailCandidates
from flexkv.cache.disk.base import DiskLimits, WantedBlocks
from flexkv.cache.disk.gds_loads import GdsLoads
from flexkv.cache.disk.rates import DiskRates
from flexkv.cache.disk.reads import DiskReads
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.host_tier import HostTier
from flexkv.cache.leases import NO_ENTRY, DiskLease, EntryIds
from flexkv.cache.restore import first_needed, longest_restorable
from flexkv.transfer.graph import OpId, ReadIds


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lookup would have brought up.

    Attributes:
        parts: at most one a group.
        tokens: that the engine need not compute with all of them.
        whole_blocks: the parts are the same blocks of every group, and any prefix of them is worth having.
    """

    parts: list[WantedBlocks]
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
        on_disk: per group, what may be promised and is loaded from where it lies; leased.
    """

    reads: int = 0
    coming: Coming | None = None
    on_disk: Sequence[DiskLease] | None = None


NOTHING_FOUND = Looked()


@dataclass(frozen=True, slots=True)
class LeftToEngine:
    """A choice to compute, for the operator: `pages` take `read_s` to bring up, and `compute_s` to compute."""

    pages: int
    read_s: float
    compute_s: float


class DiskLookup:
    """Looks on disk for what host memory lacks of a request: plans reads that it waits for, or leases what is promised.

    Args:
        indexes: of the unit's own disks, then of its siblings'.
        gds_loads: None where none go that way.
        clock: seconds, never running backwards; the waits of requests are measured with it.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        host: HostTier,
        indexes: Sequence[StoredIndex],
        limits: DiskLimits,
        rates: DiskRates,
        reads: DiskReads,
        gds_loads: GdsLoads | None,
        clock: Callable[[], float],
    ) -> None:
        self._specs = specs
        self._all_prefix = all(spec.policy is GroupPolicy.PREFIX for spec in specs)
        self._host = host
        self._indexes = indexes
        self._own = indexes[0]
        self._counts = indexes[0].counts
        self._limits = limits
        self._rates = rates
        self._reads = reads
        self._gds_loads = gds_loads
        self._clock = clock
        self.last_left: LeftToEngine | None = None
        """The last choice to leave pages on disk and compute them."""

    def look(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_block: int,
        blocks: int,
        tail: Sequence[TailCandidates | None] | None,
        tail_tokens: int,
        room_pages: int,
        where_it_lies: bool = True,
    ) -> Looked:
        """Brings up what would make a match of `blocks` blocks after `start_block`, and `tail_tokens`, longer.

        With `DiskLimits.stream` whole blocks may be promised at once (`Looked.coming`, to be pinned before anything
        else is asked); with `DiskLimits.gds_loads` they may be promised where they lie. For all else the request waits.

        Args:
            room_pages: more than so many pages cannot be promised to the request, so more is not read.
            where_it_lies: pages may be promised where they lie, if `DiskLimits.gds_loads` says so too.
        """
        wait = self._reads.waits.get(request_id)
        if wait is not None and wait.given_up:
            return NOTHING_FOUND
        now_s = self._clock()
        if wait is not None and now_s - wait.since_s > self._limits.wait_s:
            self._reads.give_up(request_id)
            return NOTHING_FOUND
        wanted = self._wanted(keys, start_block, blocks, room_pages)
        if not wanted.parts and tail is not None:
            wanted = self._wanted_tail(tail, start_block + blocks, tail_tokens)
        whole = not tail_tokens
        looked = None
        if whole and where_it_lies:
            looked = self._look_where_it_lies(request_id, wanted, now_s)
        if looked is not None:
            return looked
        worth = self._worth(wanted, now_s)
        streamed = self._limits.stream and worth.whole_blocks and whole
        ops: set[OpId] = set()
        for part in worth.parts:
            ops |= self._reads.bring_up(part, streamed and self._limits.stream_layers)
        if streamed:
            coming = self._coming(worth)
            if coming.blocks:
                return Looked(coming=coming)
        if ops:
            self._reads.wait(request_id, ops, now_s)
        if worth is not wanted:
            self._reads.leave_rest(request_id, now_s)
        return Looked(len(ops))

    # --- what is promised ---

    def _look_where_it_lies(self, request_id: str, wanted: Wanted, now_s: float) -> Looked | None:
        """What is loaded from where it lies, or left to the engine, which computes it sooner; None to bring it up."""
        loads = self._gds_loads
        if loads is None or not wanted.whole_blocks:
            return None
        pages = sum(map(len, wanted.parts))
        if not loads.wants(pages, self._reads.ops.pages, now_s):
            return None
        leases = loads.lease(wanted.parts)
        if leases is None:
            return None
        if not self._limits.compute_if_faster or self._rates.gds_is_worth(
            pages, wanted.tokens, loads.pages, now_s
        ):
            return Looked(on_disk=leases)
        for lease in leases:
            loads.let_go(lease)
        self._leave(pages, self._rates.gds_s(pages, loads.pages), wanted.tokens)
        self._reads.leave_rest(request_id, now_s)
        return NOTHING_FOUND

    def _coming(self, wanted: Wanted) -> Coming:
        """The leading blocks of `wanted` that are in host memory or on their way up."""
        entries, reads = [], []
        for part in wanted.parts:
            found = self._host.index.find(part.group, part.keys, ready_only=False)
            found = found[: _leading(found != NO_ENTRY)]
            filling = self._reads.filling(part.group, self._host.index.slots_of(found))
            # A block that a store is filling is nobody's to promise: what it holds may never be published.
            reach = _leading(self._host.index.ready(found).view(np.bool_) | (filling != 0))
            entries.append(found[:reach])
            reads.append(filling[:reach])
        blocks = min(map(len, entries))
        return Coming([e[:blocks] for e in entries], [r[:blocks] for r in reads])

    def _worth(self, wanted: Wanted, now_s: float) -> Wanted:
        """The part of `wanted` that is brought up sooner than computed: all of it, as long as nothing is known."""
        rates, queued = self._rates, self._reads.ops.pages
        if not wanted.parts or not self._limits.compute_if_faster or not rates.believed(now_s):
            return wanted
        pages = sum(map(len, wanted.parts))
        if rates.all_worth(pages, wanted.tokens, queued):
            return wanted
        # Some may be in host memory or on their way already: then only the rest has to be read.
        found = [self._host.index.find(part.group, part.keys, ready_only=False) for part in wanted.parts]
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
        self._leave(left_pages, rates.read_s(left_pages, queued) + rates.load_s(left_pages), left_tokens)
        if not kept:
            return NOTHING
        return Wanted([part.at(slice(kept)) for part in wanted.parts], int(tokens[kept - 1]), True)

    def _leave(self, pages: int, read_s: float, tokens: int) -> None:
        """The engine computes the `tokens` of `pages` rather than have them in `read_s` seconds."""
        self._counts.left += 1
        self._counts.left_pages += pages
        self.last_left = LeftToEngine(pages, read_s, self._rates.compute_s(tokens))

    # --- what is there ---

    def _wanted(self, keys: Sequence[Keys], start: int, blocks: int, room_pages: int) -> Wanted:
        """The longest restorable prefix, as far as the match lacks it."""
        end = start + blocks
        if self._all_prefix:
            most = start + max(0, room_pages) // len(self._specs)
            parts = []
            for group, group_keys in enumerate(keys):
                parts.append(self._there(group, group_keys[end:most]))
                most = end + len(parts[-1])
                if most <= end:
                    return NOTHING
            reach = most - end
            return Wanted(
                [part.at(slice(reach)) for part in parts], reach * self._specs[0].block_tokens, True
            )
        present = [self._present(group, group_keys[start:]) for group, group_keys in enumerate(keys)]
        longest = longest_restorable(self._specs, present, room_pages)
        if longest <= blocks:
            return NOTHING
        firsts = (first_needed(spec, longest) for spec in self._specs)
        parts = [
            WantedBlocks(group, keys[group][start + first : start + longest])
            for group, first in enumerate(firsts)
            if first < longest
        ]
        return Wanted(parts, (longest - blocks) * self._specs[0].block_tokens)

    def _there(self, group: int, keys: Keys) -> WantedBlocks:
        """The leading blocks that are on disk or in host memory."""
        entries = self._own.leading(group, keys)
        reach = len(entries)
        while reach < len(keys):
            more = len(self._host.index.match_prefix(group, keys[reach:]))
            more += self._on_disk(group, keys[reach + more :])
            if not more:
                break
            reach += more
        return WantedBlocks(group, keys[:reach], entries if reach == len(entries) else None)

    def _on_disk(self, group: int, keys: Keys) -> int:
        """How many leading keys are on the unit's own disks or in a sibling's folder."""
        reach = idle = 0
        for index in cycle(self._indexes):
            more = len(index.leading(group, keys[reach:]))
            reach += more
            # Where one index ends another may go on; done when none of them does.
            idle = 1 if more else idle + 1
            if reach == len(keys) or idle == len(self._indexes):
                break
        return reach

    def _present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        present: NDArray[np.bool_] = self._host.index.find(group, keys) != NO_ENTRY
        for index in self._indexes:
            present = present | index.present(group, keys)
        return present

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
            WantedBlocks(group, candidates.keys[lengths[group][longest] :][:1])
            for group, candidates in enumerate(tail)
            if candidates is not None
        ]
        return Wanted(parts, longest - tail_tokens)


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
