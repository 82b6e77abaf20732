"""Finds and leases the pages that a request can restore, first in host memory, then in the tiers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.c_ext import BoundaryLookup, Found, FoundLengths, GroupRule, TierLookup
from flexkv.cache.base import NO_ENTRIES, GroupSpec, TailCandidates, TierId, sharing
from flexkv.cache.ledger.leases import GroupLease, Lease
from flexkv.cache.moves.fetches import WantedPages
from flexkv.cache.moves.page_walk import PageRun, runs_of, split_runs
from flexkv.cache.promise.ask import Ask, Looked
from flexkv.cache.promise.pages_behind import PagesBehind
from flexkv.cache.promise.questions import Questions
from flexkv.cache.promise.tails import common_tail, lease_tail, tail_key_of
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys, Rule
from flexkv.observe import MissReason
from flexkv.transfer.graph import NO_PLACES

MAX_TOKENS = 2**62
"""A number of tokens that no request reaches."""


def tokens_in_host(specs: Sequence[GroupSpec]) -> int:
    """Returns the number of tokens of the longest hit whose pages fit in host memory together."""
    most = MAX_TOKENS
    owners = sharing(specs)
    for owner in set(owners):
        groups = [spec for spec, owns in zip(specs, owners, strict=True) if owns == owner]
        full = [spec.block_tokens for spec in groups if spec.rule is Rule.FULL]
        slots = specs[owner].slots - sum(pages_at_end(spec) for spec in groups)
        if full:
            most = min(most, int(slots / sum(1 / tokens for tokens in full)))
    return max(0, most)


def pages_at_end(spec: GroupSpec) -> int:
    """Returns the maximum number of pages of a group that a hit needs, however long it is; 0 for a FULL group, which
    has no maximum."""
    if spec.rule is Rule.CHUNK:
        return -(-spec.reach // spec.block_tokens)
    return 1 if spec.rule is Rule.STATE else spec.reach


class Lookup:
    """Looks requests up for `match` and `prefetch`.

    Args:
        alignment_tokens: the number of tokens of every hit is a multiple of this number.

    Attributes:
        same_blocks: whether all groups are FULL groups with blocks of one size, and a hit may end after each block.
        behind: numbers of the tiers behind host memory from which pages can be fetched.
    """

    def __init__(
        self, tables: CacheTables, pages_behind: PagesBehind, questions: Questions, alignment_tokens: int
    ) -> None:
        specs = tables.specs
        self.same_blocks = all(
            spec.rule is Rule.FULL and spec.block_tokens == alignment_tokens for spec in specs
        )
        self._one_group = self.same_blocks and len(specs) == 1
        self._block_tokens = specs[0].block_tokens
        self._alignment_tokens = alignment_tokens
        self._host_tokens = tokens_in_host(specs)
        self._tables = tables
        self._pages_behind = pages_behind
        self._questions = questions
        self._native = TierLookup([tier.presence for tier in tables.tiers], len(specs))
        rules = [GroupRule(spec.rule.value, spec.block_tokens, spec.reach) for spec in specs]
        self._boundaries = BoundaryLookup(self._native, rules, alignment_tokens)
        self.behind = [TierId(n) for n in range(1, len(tables.tiers)) if tables.tiers[n].source is not None]

    def asked_tokens(self, keys: Sequence[Keys], start_tokens: int) -> int:
        """Returns the number of tokens after the start for which every group has keys."""
        if self._one_group:
            asked = len(keys[0]) * self._block_tokens - start_tokens
            return asked if asked > 0 else 0
        end = MAX_TOKENS
        for of_group, spec in zip(keys, self._tables.specs, strict=True):
            end = min(end, len(of_group) * spec.block_tokens)
        return max(0, end - start_tokens)

    def may_end_at(self, ask: Ask, tokens: int) -> bool:
        """Whether a hit of `tokens` tokens from the request's start on is as long as the lookup's keys allow."""
        keys_end = ask.start_tokens + self.asked_tokens(ask.keys, ask.start_tokens)
        return tokens + self._alignment_tokens > keys_end

    def cut(self, keys: Sequence[Keys], tokens: int) -> list[Keys]:
        """Returns, per group, the keys of the whole blocks in the request's first `tokens` tokens."""
        return [k[: tokens // spec.block_tokens] for k, spec in zip(keys, self._tables.specs, strict=True)]

    def engine_keys(self, keys: Sequence[Keys], start_tokens: int) -> list[Keys]:
        """Returns, per group, the keys of the blocks before the start, which the engine has itself. Returns none for
        groups of windows, chunks and states, because the engine no longer uses all of their earlier pages.
        """
        had = self.cut(keys, start_tokens)
        return [
            k if spec.rule is Rule.FULL else k[:0] for k, spec in zip(had, self._tables.specs, strict=True)
        ]

    def look(self, ask: Ask) -> Looked:
        """Leases the longest hit in host memory after the start, and the longest tail after it. Begins to fetch the
        pages that follow, or extends the lease by them."""
        if not self.same_blocks:
            return self._look_for_boundary(ask)
        lease, rest = self._lease_prefix(ask)
        if not rest and ask.tail is None and not self._questions.any:
            return Looked(lease)
        asked = self._ask_for_blocks(ask, lease, rest)
        end = (lease.start_tokens + lease.tokens) // self._block_tokens
        start = lease.start_tokens // self._block_tokens
        if ask.tail is not None and ask.room_pages >= len(ask.keys) * (end - start + 1):
            lease_tail(self._tables.hub, lease, ask.tail, end)
        if rest:
            looked = self._pages_behind.take_rest(ask, lease, rest)
        elif ask.tail is not None and ask.tiers and not lease.cut:
            looked = self._fetch_tail(ask, ask.tail, lease, end)
        else:
            looked = Looked(lease)
        looked.fetches += asked
        return looked

    def prefetch(self, ask: Ask, most_pages: int) -> int:
        """Begins to fetch at most `most_pages` pages that follow the prefix in host memory. Promises nothing.

        Pages for which the first lookup would not wait are not fetched: those that the engine computes sooner, and
        those that would be loaded straight. Nothing is fetched unless `same_blocks`.

        Returns:
            Number of fetches and questions in flight for which the request waits, including those that other requests
            began.
        """
        if not ask.tiers or not self.same_blocks or most_pages < len(ask.keys):
            return 0
        lease, rest = self._lease_prefix(ask)
        first = (lease.start_tokens + lease.tokens) // self._block_tokens
        asked = self._ask_for_blocks(ask, lease, rest)
        if asked:
            self._tables.requests.begin_prefetch(ask.request_id, first)
        fetches = self._pages_behind.prefetch(ask, rest, first, most_pages) if rest else 0
        # The prefix is unpinned only after the fetches were planned, so that the pages to fetch do not evict it.
        for group in lease.groups:
            self._tables.hub.index.unpin(group.entries)
        return asked + fetches

    # --- whole prefixes ---

    def _lease_prefix(self, ask: Ask) -> tuple[Lease, list[list[PageRun]]]:
        """Leases the prefix in host memory, as far as it may be promised, and the pages in other tiers that follow the
        prefix. Returns the lease of the prefix, and the runs of the following pages, per group."""
        start, room_pages = ask.start_tokens // self._block_tokens, max(0, ask.room_pages)
        if not self._one_group:
            return self._lease_in_groups(ask, start)
        # The common case is one group: one call finds and pins its pages in host memory, and other tiers are searched
        # only for the blocks that follow.
        offered = ask.keys[0]
        whole = len(offered) <= start + room_pages
        if start or not whole:
            offered = offered[start : start + room_pages]
        entries, slots = self._tables.hub.index.match_and_pin(0, offered)
        ready = len(entries)
        lease = Lease(
            (GroupLease(entries, slots, start, ready),),
            self._tables.clock(),
            ask.start_tokens,
            ready * self._block_tokens,
        )
        if (ready == len(offered) and whole) or (ready < len(offered) and not ask.tiers):
            return lease, []
        found = self._find(ask, start + ready, room_pages - ready)
        lease.cut = found.cut
        return lease, [runs_of(found, 0)] if found.blocks else []

    def _lease_in_groups(self, ask: Ask, start: int) -> tuple[Lease, list[list[PageRun]]]:
        """Implements `_lease_prefix` for several groups."""
        found = self._find(ask, start, ask.room_pages)
        ready = found.ready_blocks
        parts = [split_runs(runs_of(found, group), ready) for group in range(len(ask.keys))]
        shares = tuple(GroupLease(share.entries, share.slots, start, ready) for share, _ in parts)
        tokens = ready * self._block_tokens
        lease = Lease(shares, self._tables.clock(), ask.start_tokens, tokens, cut=found.cut)
        return lease, [runs for _, runs in parts] if ready < found.blocks else []

    def _find(self, ask: Ask, start: int, room_pages: int) -> Found:
        """Finds the longest prefix from block `start` on in host memory and `ask.tiers`, and leases each page in its
        tier. The caller must end the leases."""
        found = self._native.look(
            ask.keys, start, room_pages, ask.tiers_mask, self._tables.now_s, bool(ask.tiers)
        )
        self._drop_expired(found, ask.keys)
        found.detach()
        return found

    def _drop_expired(self, found: Found | FoundLengths, keys: Sequence[Keys]) -> None:
        for number, group, _ in found.expired:
            # `present` examines all keys, so the tier removes all expired pages of the request.
            self._tables.tiers[number].present(group, keys[group])

    def lease_of_nothing(self, start_tokens: int) -> Lease:
        shares = [
            GroupLease(NO_ENTRIES, NO_PLACES, start_tokens // spec.block_tokens, 0)
            for spec in self._tables.specs
        ]
        return Lease(tuple(shares), self._tables.clock(), start_tokens)

    def _ask_for_blocks(self, ask: Ask, lease: Lease, rest: list[list[PageRun]]) -> int:
        """Asks tiers about the blocks after those that were found, and returns the number of answers to wait for."""
        if lease.cut or not self._questions.any:
            return 0
        end = (lease.start_tokens + lease.tokens) // self._block_tokens
        return self._questions.for_blocks(ask, end + (sum(map(len, rest[0])) if rest else 0))

    def _fetch_tail(
        self, ask: Ask, tail: Sequence[TailCandidates | None], lease: Lease, end_block: int
    ) -> Looked:
        """Begins to fetch the longest tail that tiers have, if it is longer than the leased tail. Otherwise sends
        questions about longer tails to the tiers of whose pages this unit has no index."""
        walk = self._pages_behind.walk
        found = common_tail(tail, end_block, lambda group, keys: walk.present(group, keys, ask.tiers))
        if found <= lease.tail_tokens:
            return Looked(lease, self._questions.for_tail(ask, tail, end_block))
        wanted = []
        for group, candidates in enumerate(tail):
            assert candidates is not None
            keys = tail_key_of(candidates, found)
            wanted.append(WantedPages(group, keys, walk.locate(group, keys, ask.tiers)))
        return self._pages_behind.fetch_together(ask, lease, wanted, found - lease.tail_tokens, in_line=False)

    # --- groups that need different pages ---

    def _look_for_boundary(self, ask: Ask) -> Looked:
        fitting = self._fitting(ask)
        looked, end = self._look_up_to_boundary(fitting)
        if fitting is not ask and self.may_end_at(fitting, end):
            looked.left_out = MissReason.NO_ROOM
        return looked

    def _fitting(self, ask: Ask) -> Ask:
        """Limits a lookup to hits whose pages fit in host memory together. If groups need different pages, a hit is
        useful only if all its pages are there, so pages of a longer hit would be fetched in vain."""
        if self.asked_tokens(ask.keys, ask.start_tokens) <= self._host_tokens:
            return ask
        return ask._replace(keys=self.cut(ask.keys, ask.start_tokens + self._host_tokens))

    def _look_up_to_boundary(self, ask: Ask) -> tuple[Looked, int]:
        """Implements `look` for groups that need different pages. Also returns where the longest hit in all tiers ends,
        in tokens from the request's start on."""
        found = self._find_boundary(ask)
        end = found.lengths[0] if found.lengths else ask.start_tokens
        asked_end = ask.start_tokens + self.asked_tokens(ask.keys, ask.start_tokens)
        asked = self._questions.for_boundary(ask, asked_end, found)
        if found.ready or not found.lengths:
            return Looked(self._lease_found(found), asked), end
        # Missing pages of this hit are fetched. Meanwhile the longest hit that is completely in host memory is
        # promised.
        wanted = self._wanted(found, ask.keys)
        lease = self._lease_found(self._find_boundary(ask._replace(tiers=())))
        lease.shared_tokens = found.shared_tokens
        missing_tokens = end - ask.start_tokens - lease.tokens
        looked = self._pages_behind.fetch_together(ask, lease, wanted, missing_tokens)
        looked.fetches += asked
        return looked, end

    def _find_boundary(self, ask: Ask) -> FoundLengths:
        """Finds the longest hit that all groups can restore, and leases its pages. The caller must end the leases."""
        found = self._boundaries.look(
            ask.keys,
            ask.start_tokens,
            max(0, ask.room_pages),
            ask.tiers_mask,
            self._tables.now_s,
            bool(ask.tiers),
        )
        self._drop_expired(found, ask.keys)
        found.detach()
        return found

    def _lease_found(self, found: FoundLengths) -> Lease:
        """Returns the lease of a hit whose pages are all in host memory."""
        shares = []
        for group, spec in enumerate(self._tables.specs):
            entries = found.entries(group)
            first = found.start_tokens // spec.block_tokens + found.first_page(group)
            shares.append(GroupLease(entries, found.slots(group), first, len(entries)))
        tokens = found.lengths[0] - found.start_tokens if found.lengths else 0
        return Lease(
            tuple(shares),
            self._tables.clock(),
            found.start_tokens,
            tokens,
            cut=found.cut,
            shared_tokens=found.shared_tokens,
        )

    def _wanted(self, found: FoundLengths, keys: Sequence[Keys]) -> list[WantedPages]:
        """Returns the pages that the hit needs, for each group that needs any."""
        wanted = []
        for group, spec in enumerate(self._tables.specs):
            first = found.start_tokens // spec.block_tokens + found.first_page(group)
            end = found.lengths[0] // spec.block_tokens
            if first < end:
                wanted.append(WantedPages(group, keys[group][first:end], runs_of(found, group)))
        return wanted
