"""Finds and leases what a request can restore, over all KV groups, and checks what it then asks to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_BLOCK, GroupMatch, GroupPolicy, GroupSpec, Keys, MatchResult, TailCandidates
from flexkv.cache.checks import as_block_ids
from flexkv.cache.disk.lookup import Coming
from flexkv.cache.leases import NO_ENTRY, DiskLease, EntryIds, GroupLease, Lease
from flexkv.cache.restore import first_needed, longest_restorable
from flexkv.errors import BlockRangeError, ContractError
from flexkv.transfer.graph import BlockIds, SlotIds


@dataclass(slots=True)
class Found:
    """What a request can restore.

    Attributes:
        entries: per group, the entries to load: whole blocks, then the tail if there is one.
        cut: it would be more, had the load queue more places.
        slots: of the entries where they are leased already; else None.
    """

    start_block: int
    blocks: int
    tail_tokens: int
    entries: tuple[EntryIds, ...]
    cut: bool
    slots: tuple[SlotIds, ...] | None = None


class Lookup:
    """The pure part of `match` and `begin_load`: reads the index, changes nothing but its leases."""

    def __init__(self, specs: tuple[GroupSpec, ...], index: BlockIndex) -> None:
        self._specs = specs
        self._index = index
        self._all_prefix = all(spec.policy is GroupPolicy.PREFIX for spec in specs)

    def check(
        self, keys: Sequence[Keys], start_block: int, tail: Sequence[TailCandidates | None] | None
    ) -> None:
        """
        Raises:
            ContractError: not one element a group.
            BlockRangeError: a negative start block.
        """
        if len(keys) != len(self._specs) or (tail is not None and len(tail) != len(self._specs)):
            raise ContractError(
                f"match: {len(keys)} key arrays and {'no' if tail is None else len(tail)} tails for "
                f"{len(self._specs)} groups"
            )
        if start_block < 0:
            raise BlockRangeError(f"match: start block {start_block}; allowed are 0 and more")

    def find(
        self,
        keys: Sequence[Keys],
        start_block: int,
        tail: Sequence[TailCandidates | None] | None,
        room_pages: int,
    ) -> Found:
        """The longest prefix that all groups restore with at most `room_pages` pages, and the longest tail after it.

        To be followed by `lease`.
        """
        offered = [k[start_block:] for k in keys] if start_block else keys
        if len(offered) == 1 and self._all_prefix and (tail is None or tail[0] is None):
            return self._find_and_pin(offered[0], start_block, max(0, room_pages))
        if self._all_prefix:
            present = [self._index.match_prefix(g, k) for g, k in enumerate(offered)]
            uncut = min(map(len, present))
            blocks = min(uncut, max(0, room_pages) // len(self._specs))
        else:
            present = [self._index.find(g, k) for g, k in enumerate(offered)]
            hits = [entries != NO_ENTRY for entries in present]
            uncut = longest_restorable(self._specs, hits, 2**62)
            blocks = longest_restorable(self._specs, hits, room_pages)
        entries = [
            found[first_needed(spec, blocks) : blocks]
            for spec, found in zip(self._specs, present, strict=True)
        ]
        tail_tokens = 0
        if tail is not None and room_pages >= sum(map(len, entries)) + len(self._specs):
            tail_tokens, tail_entries = self._find_tail(tail, start_block + blocks)
            if tail_tokens:
                entries = [np.append(e, t) for e, t in zip(entries, tail_entries, strict=True)]
        return Found(start_block, blocks, tail_tokens, tuple(entries), blocks < uncut)

    def _find_and_pin(self, keys: Keys, start_block: int, room_pages: int) -> Found:
        """`find` for the usual case, in which the prefix is the promise: one pass finds and leases it."""
        index = self._index
        entries, slots = index.match_and_pin(0, keys if len(keys) <= room_pages else keys[:room_pages])
        blocks = len(entries)
        cut = room_pages <= blocks < len(keys) and len(index.match_prefix(0, keys[blocks : blocks + 1])) > 0
        return Found(start_block, blocks, 0, (entries,), cut, (slots,))

    def _find_tail(self, tail: Sequence[TailCandidates | None], end_block: int) -> tuple[int, list[EntryIds]]:
        """The longest tail at `end_block` that every group has. Groups that need more than a prefix have none."""
        stored: list[dict[int, int]] = []
        for group, candidates in enumerate(tail):
            if not self._all_prefix or candidates is None or candidates.base_block != end_block:
                return 0, []
            entries = self._index.find(group, candidates.keys)
            hits = np.flatnonzero(entries != NO_ENTRY)
            if not len(hits):
                return 0, []
            stored.append({int(candidates.tokens[i]): int(entries[i]) for i in hits})
        common = set.intersection(*(set(counts) for counts in stored))
        if not common:
            return 0, []
        longest = max(common)
        return longest, [np.array([counts[longest]], np.uint32) for counts in stored]

    def lease(self, found: Found, now_s: float) -> Lease:
        """Leases what was found."""
        if found.slots is not None:
            lease = GroupLease(found.entries[0], found.slots[0], found.start_block, found.blocks)
            return Lease((lease,), now_s)
        groups = []
        for spec, entries in zip(self._specs, found.entries, strict=True):
            first = found.start_block + first_needed(spec, found.blocks)
            groups.append(
                GroupLease(entries, self._index.pin(entries), first, len(entries) - (found.tail_tokens > 0))
            )
        return Lease(tuple(groups), now_s)

    def extend(self, found: Found, lease: Lease, coming: Coming) -> tuple[Found, Lease]:
        """A lease of whole blocks alone, with the blocks that follow and are on their way up."""
        groups = []
        for group, entries, reads in zip(lease.groups, coming.entries, coming.reads, strict=True):
            there = np.zeros(group.blocks, np.int64)
            groups.append(
                GroupLease(
                    np.concatenate((group.entries, entries)),
                    np.concatenate((group.slots, self._index.pin_coming(entries))),
                    group.first_block,
                    group.blocks + coming.blocks,
                    np.concatenate((there, reads)),
                )
            )
        blocks = found.blocks + coming.blocks
        longer = Found(found.start_block, blocks, 0, tuple(group.entries for group in groups), found.cut)
        return longer, Lease(tuple(groups), lease.since_s)

    def extend_on_disk(self, found: Found, lease: Lease, leases: Sequence[DiskLease]) -> tuple[Found, Lease]:
        """A lease of whole blocks alone, with the blocks that follow and are loaded from where they lie."""
        more = len(leases[0])
        groups = tuple(
            replace(group, blocks=group.blocks + more, on_disk=pages)
            for group, pages in zip(lease.groups, leases, strict=True)
        )
        return replace(found, blocks=found.blocks + more), Lease(groups, lease.since_s)

    def result(self, request_id: str, found: Found, lease: Lease, reads: int = 0) -> MatchResult:
        matches = tuple(
            GroupMatch(
                blocks=found.blocks,
                slots=group.slots[: group.blocks],
                tail_tokens=found.tail_tokens,
                tail_slot=int(group.slots[-1]) if found.tail_tokens else -1,
                first_block=group.first_block,
            )
            for group in lease.groups
        )
        return MatchResult(request_id, found.start_block, matches, found.blocks, found.tail_tokens, reads)

    def load_targets(
        self, request_id: str, lease: Lease, blocks: Sequence[BlockIds], tail: bool
    ) -> list[BlockIds]:
        """Per group, the engine blocks that take its leased pages, checked against the promise.

        Raises:
            ContractError: asks for more than was promised, or for a part that its policy cannot restore.
            BlockRangeError: an engine block below NO_BLOCK.
        """
        if len(blocks) != len(self._specs):
            raise ContractError(f"begin_load: {len(blocks)} block lists for {len(self._specs)} groups")
        targets = []
        for number, (spec, group) in enumerate(zip(self._specs, lease.groups, strict=True)):
            place = f"begin_load of request {request_id!r}, group {number}"
            target = as_block_ids(blocks[number], place, least=NO_BLOCK)
            whole = len(target) - tail
            partial_ok = spec.policy is GroupPolicy.PREFIX and not tail
            allowed = (
                range(group.blocks + 1) if partial_ok else (group.blocks,) if tail else (0, group.blocks)
            )
            if whole not in allowed or (tail and not group.has_tail):
                raise ContractError(
                    f"begin_load: request {request_id!r} asks for {whole} blocks{' and a tail' if tail else ''} of "
                    f"group {number}; promised were {group.blocks}{' and a tail' if group.has_tail else ''}"
                )
            targets.append(target)
        return targets
