"""Finds and leases what a request can restore: what may be promised now, what it waits for, what is left to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import Found, TierLookup
from flexkv.cache.base import GroupPolicy, GroupSpec, Keys, OpRole, TailCandidates
from flexkv.cache.fetch_choice import FetchChoice
from flexkv.cache.hub import Hub
from flexkv.cache.ids import HUB, NO_ENTRY, TierId
from flexkv.cache.leases import GroupLease, Lease
from flexkv.cache.ops import OpTable
from flexkv.cache.page_walk import NO_PAGES, PageRun, PageWalk
from flexkv.cache.promotions import FetchedPages, Promotions, WantedPages
from flexkv.cache.requests import RequestTable
from flexkv.cache.restore import first_needed, longest_restorable
from flexkv.cache.tier import Tier
from flexkv.transfer.graph import OpId

COMING = 1
"""State of a run of `Found` whose pages an op is filling."""


@dataclass(slots=True)
class Looked:
    """The answer to a lookup.

    Attributes:
        lease: what is promised.
        fetches: that the request now waits for.
    """

    lease: Lease
    fetches: int = 0


class Lookup:
    """The core of `match`.

    Args:
        tiers: of the manager, by number.
        clock: seconds, never running backwards; the waits of requests are measured with it.
        unix_s: wall clock for times to live.
        epoch: the manager's.
    """

    def __init__(
        self,
        specs: tuple[GroupSpec, ...],
        tiers: Sequence[Tier],
        hub: Hub,
        ops: OpTable,
        requests: RequestTable,
        walk: PageWalk,
        promotions: Promotions,
        choice: FetchChoice,
        clock: Callable[[], float],
        unix_s: Callable[[], float],
        epoch: Callable[[], int],
    ) -> None:
        self._specs = specs
        self._all_prefix = all(spec.policy is GroupPolicy.PREFIX for spec in specs)
        self._tiers = tiers
        self._hub = hub
        self._ops = ops
        self._requests = requests
        self._walk = walk
        self._promotions = promotions
        self._choice = choice
        self._clock = clock
        self._epoch = epoch
        self._unix_s = unix_s
        self._native = TierLookup([tier.presence for tier in tiers], len(specs))
        self._behind = [TierId(n) for n in range(1, len(tiers)) if tiers[n].source is not None]

    def look(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_block: int,
        tail: Sequence[TailCandidates | None] | None,
        room_pages: int,
        straight: bool,
    ) -> Looked:
        """The longest prefix after `start_block` of at most `room_pages` pages, and the longest tail after it.

        Args:
            straight: pages may be promised where they lie.
        """
        now_s = self._clock()
        usable = self._usable(request_id, now_s) if self._behind else []
        if self._all_prefix:
            return self._look_for_prefix(request_id, keys, start_block, tail, room_pages, usable, straight)
        return self._look_for_boundary(request_id, keys, start_block, room_pages, usable)

    def _usable(self, request_id: str, now_s: float) -> list[TierId]:
        """The tiers that the request may be served from besides the hub."""
        wait = self._requests.waits.get(request_id)
        if wait is not None and wait.ops and now_s > wait.ends_s:
            late = set(wait.ops.values())
            for tier in late:
                self._tiers[tier].counts.late += 1
            for op_id in wait.ops:
                if (op := self._ops.fetch(op_id)) is not None:
                    op.waiters.discard(request_id)
            wait.ops.clear()
            wait.skipped.update(late)
        skipped = set() if wait is None else wait.skipped
        return [tier for tier in self._behind if tier not in skipped and not self._tiers[tier].down]

    # --- whole prefixes ---

    def _look_for_prefix(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start: int,
        tail: Sequence[TailCandidates | None] | None,
        room_pages: int,
        usable: Sequence[TierId],
        straight: bool,
    ) -> Looked:
        if len(self._specs) == 1:
            lease, rest = self._find_in_one_group(keys, start, max(0, room_pages), usable)
        else:
            lease, rest = self._find_in_all_groups(keys, start, room_pages, usable)
        end = start + lease.blocks
        if tail is not None and room_pages >= len(self._specs) * (lease.blocks + 1):
            self._add_tail(lease, tail, end)
        if rest:
            return self._take_rest(request_id, lease, rest, keys, usable, not lease.tail_tokens, straight)
        if tail is None or lease.cut or not usable:
            return Looked(lease)
        return Looked(lease, self._fetch_tail(request_id, tail, end, lease.tail_tokens, usable))

    def _find_in_one_group(
        self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]
    ) -> tuple[Lease, list[list[PageRun]]]:
        """Leases the prefix of the usual request: one pass over what host memory has of it, and a lookup over all tiers
        for what follows, if there is any. Returns what may be promised, and the rest."""
        offered = keys[0]
        whole = len(offered) <= start + room_pages
        if start or not whole:
            offered = offered[start : start + room_pages]
        entries, slots = self._hub.index.match_and_pin(0, offered)
        ready = len(entries)
        lease = Lease((GroupLease(entries, slots, start, ready),), self._clock(), start, ready)
        if (ready == len(offered) and whole) or (ready < len(offered) and not usable):
            return lease, []
        found = self._find(keys, start + ready, room_pages - ready, usable)
        lease.cut = found.cut
        return lease, [_runs_of(found, 0)] if found.blocks else []

    def _find_in_all_groups(
        self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]
    ) -> tuple[Lease, list[list[PageRun]]]:
        """The same over several groups, which restore the same blocks together."""
        found = self._find(keys, start, room_pages, usable)
        ready = found.ready_blocks
        split = [_split(_runs_of(found, group), ready) for group in range(len(self._specs))]
        shares = tuple(GroupLease(share.entries, share.slots, start, ready) for share, _ in split)
        lease = Lease(shares, self._clock(), start, ready, cut=found.cut)
        return lease, [runs for _, runs in split] if ready < found.blocks else []

    def _find(self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]) -> Found:
        """The prefix after `start`; each page is leased in its tier, and the lease the caller's."""
        mask = 1 << HUB
        for tier in usable:
            mask |= 1 << tier
        now_s = max(0, int(self._unix_s()))
        found = self._native.look(keys, start, room_pages, mask, now_s, bool(usable))
        for number, group, _ in found.expired:
            # Asked key by key, the tier drops all of the request's pages whose time is over.
            self._tiers[number].present(group, keys[group])
        found.detach()
        return found

    def _take_rest(
        self,
        request_id: str,
        lease: Lease,
        rest: list[list[PageRun]],
        keys: Sequence[Keys],
        usable: Sequence[TierId],
        promise: bool,
        straight: bool,
    ) -> Looked:
        """What follows the promise and is not in host memory: promised where it lies, fetched, or left to the engine.

        Args:
            promise: more may be promised at once.
            straight: also where it lies.
        """
        first = lease.start_block + lease.blocks
        for tier in usable if promise and straight else ():
            if self._takes_straight(tier, rest, keys, first):
                return self._promise_straight(request_id, lease, rest, tier)
        rest, left = self._choice.leading_worth(rest, keys, first)
        if left:
            self._requests.skip(request_id, self._behind)
        if not any(rest):
            return Looked(lease)
        wanted = [
            WantedPages(group, keys[group][first : first + sum(map(len, runs))], runs)
            for group, runs in enumerate(rest)
        ]
        streamed = promise and all(self._tiers[tier].facts.streams for tier in self._choice.tiers_of(rest))
        layerwise = streamed and all(
            self._tiers[tier].facts.stream_layers for tier in self._choice.tiers_of(rest)
        )
        fetched = self._promotions.fetch(wanted, layerwise, self._epoch())
        if streamed:
            _extend(lease, fetched.pages)
            return Looked(lease)
        return Looked(lease, self._wait(request_id, wanted, fetched.pages, fetched.ops))

    def _takes_straight(
        self, tier: TierId, rest: list[list[PageRun]], keys: Sequence[Keys], first: int
    ) -> bool:
        """Whether all of the rest is to be loaded from a tier without a page of host memory; `rest` are its pages
        then."""
        route = self._tiers[tier].straight
        pages = [sum(map(len, runs)) for runs in rest]
        if route is None or not route.wants(sum(pages), self._ops.pages(OpRole.FETCH, tier)):
            return False
        whole = []
        for group, count in enumerate(pages):
            # Also what host memory has of it: a promise changes from host memory to a tier once at most.
            entries = self._tiers[tier].leading(group, keys[group][first : first + count])
            if len(entries) < count:
                return False
            whole.append(entries)
        for runs, entries in zip(rest, whole, strict=True):
            slots = self._tiers[tier].presence.pin(entries)
            self._walk.release(runs)
            runs[:] = [PageRun(tier, entries, slots)]
        return True

    def _promise_straight(
        self, request_id: str, lease: Lease, rest: Sequence[Sequence[PageRun]], tier: TierId
    ) -> Looked:
        route = self._tiers[tier].straight
        assert route is not None
        blocks = len(rest[0][0])
        pages, tokens = blocks * len(rest), blocks * self._specs[0].block_tokens
        if not self._choice.straight_worth(tier, route, pages, tokens):
            for runs in rest:
                self._walk.release(runs)
            self._requests.skip(request_id, self._behind)
            return Looked(lease)
        for group, runs in enumerate(rest):
            lease.groups[group].straight = route.lease(group, runs[0].entries, runs[0].slots)
            lease.groups[group].blocks += blocks
        lease.blocks += blocks
        return Looked(lease)

    # --- the last block, if it is not whole ---

    def _add_tail(self, lease: Lease, tail: Sequence[TailCandidates | None], end_block: int) -> None:
        """Leases the longest tail at `end_block` that every group has in host memory."""
        found = self._common_tail(tail, end_block, self._hub.there)
        if not found:
            return
        for group, candidates in enumerate(tail):
            assert candidates is not None
            at = np.flatnonzero(candidates.tokens == found)[:1]
            entries = self._hub.index.find(group, candidates.keys[at])
            own = lease.groups[group]
            own.entries = np.concatenate((own.entries, entries))
            own.slots = np.concatenate((own.slots, self._hub.index.pin(entries)))
        lease.tail_tokens = found

    def _fetch_tail(
        self,
        request_id: str,
        tail: Sequence[TailCandidates | None],
        end_block: int,
        tail_tokens: int,
        usable: Sequence[TierId],
    ) -> int:
        """Fetches the longest tail, if it is longer than `tail_tokens`; the fetches to wait for."""
        found = self._common_tail(
            tail, end_block, lambda group, keys: self._walk.present(group, keys, usable)
        )
        if found <= tail_tokens:
            return 0
        wanted = []
        for group, candidates in enumerate(tail):
            assert candidates is not None
            at = np.flatnonzero(candidates.tokens == found)[:1]
            keys = np.ascontiguousarray(candidates.keys[at])
            wanted.append(WantedPages(group, keys, self._walk.locate(group, keys, usable)))
        return self._fetch_all(request_id, wanted, found - tail_tokens)

    def _common_tail(
        self,
        tail: Sequence[TailCandidates | None],
        end_block: int,
        present: Callable[[int, Keys], NDArray[np.bool_]],
    ) -> int:
        """Tokens of the longest tail at `end_block` that every group has; 0 for none."""
        lengths: list[set[int]] = []
        for group, candidates in enumerate(tail):
            if candidates is None or candidates.base_block != end_block:
                return 0
            lengths.append(set(candidates.tokens[present(group, candidates.keys)].tolist()))
        return max(set.intersection(*lengths), default=0)

    # --- groups of which a prefix needs other pages ---

    def _look_for_boundary(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start: int,
        room_pages: int,
        usable: Sequence[TierId],
    ) -> Looked:
        offered = [group_keys[start:] for group_keys in keys]
        index = self._hub.index
        found = [index.find(group, group_keys) for group, group_keys in enumerate(offered)]
        hits = [entries != NO_ENTRY for entries in found]
        uncut = longest_restorable(self._specs, hits, 2**62)
        blocks = longest_restorable(self._specs, hits, room_pages)
        groups = []
        for spec, entries in zip(self._specs, found, strict=True):
            first = first_needed(spec, blocks)
            mine = entries[first:blocks]
            groups.append(GroupLease(mine, index.pin(mine), start + first, len(mine)))
        lease = Lease(tuple(groups), self._clock(), start, blocks, cut=blocks < uncut)
        if lease.cut or not usable:
            return Looked(lease)
        present = [self._walk.present(group, k, usable) for group, k in enumerate(offered)]
        longest = longest_restorable(self._specs, present, room_pages)
        if longest <= blocks:
            return Looked(lease)
        wanted = []
        for group, spec in enumerate(self._specs):
            part = np.ascontiguousarray(offered[group][first_needed(spec, longest) : longest])
            if len(part):
                wanted.append(WantedPages(group, part, self._walk.locate(group, part, usable)))
        tokens = (longest - blocks) * self._specs[0].block_tokens
        return Looked(lease, self._fetch_all(request_id, wanted, tokens))

    # --- what is fetched, and what is not ---

    def _fetch_all(self, request_id: str, wanted: list[WantedPages], tokens: int) -> int:
        """Fetches pages that are of use together or not at all; the fetches to wait for."""
        runs = [part.runs for part in wanted]
        if not self._choice.all_worth(runs, tokens):
            for part in wanted:
                self._walk.release(part.runs)
            self._requests.skip(request_id, self._behind)
            return 0
        fetched = self._promotions.fetch(wanted, layerwise=False, epoch=self._epoch(), aligned=False)
        return self._wait(request_id, wanted, fetched.pages, fetched.ops)

    def _wait(
        self,
        request_id: str,
        wanted: Sequence[WantedPages],
        pages: Sequence[FetchedPages],
        ops: dict[OpId, TierId],
    ) -> int:
        """The request waits for these fetches, and what they bring is kept for it. Returns how many."""
        for part, fetched in zip(wanted, pages, strict=True):
            if ops:
                self._requests.hold(request_id, part.group, fetched.entries)
            else:
                self._hub.index.unpin(fetched.entries)
        if not ops:
            return 0
        waits = []
        for op_id, tier in ops.items():
            op = self._ops.fetch(op_id)
            assert op is not None
            op.waiters.add(request_id)
            waits.append((op_id, tier, self._tiers[tier].facts.wait_s))
        for tier in self._requests.wait(request_id, waits, self._clock()):
            self._tiers[tier].counts.waits += 1
        return len(ops)


def _runs_of(found: Found, group: int) -> list[PageRun]:
    """The pages of a group, run by run."""
    entries, slots = found.entries(group), found.slots(group)
    return [
        PageRun(TierId(tier), entries[first : first + count], slots[first : first + count], state == COMING)
        for tier, state, first, count in found.runs(group).tolist()
    ]


def _split(runs: list[PageRun], pages: int) -> tuple[PageRun, list[PageRun]]:
    """The first `pages` of runs, which all lie in the first run, and the rest."""
    if not runs:
        return NO_PAGES, []
    first = runs[0]
    if pages == len(first):
        return first, runs[1:]
    return first.part(0, pages), [first.part(pages, len(first)), *runs[1:]] if pages else runs


def _extend(lease: Lease, pages: Sequence[FetchedPages]) -> None:
    """A lease of whole blocks alone, with the blocks that follow and are on their way to host memory."""
    more = len(pages[0].entries)
    if not more:
        return
    for group, fetched in zip(lease.groups, pages, strict=True):
        there = np.zeros(len(group.entries), np.int64)
        group.entries = np.concatenate((group.entries, fetched.entries))
        group.slots = np.concatenate((group.slots, fetched.slots))
        group.fetches = np.concatenate((there, fetched.fetches))
        group.blocks += more
    lease.blocks += more
