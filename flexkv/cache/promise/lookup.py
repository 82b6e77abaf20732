"""Finds and leases what a request can restore: what may be promised now, what it waits for, what is left to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.c_ext import BoundaryLookup, Found, FoundLengths, GroupRule, TierLookup
from flexkv.cache.base import HUB, NO_ENTRIES, GroupSpec, OpRole, TailCandidates, TierId
from flexkv.cache.ledger.leases import GroupLease, Lease
from flexkv.cache.moves.fetches import Fetched, Promotions, WantedPages, extend_lease, wanted_pages
from flexkv.cache.moves.page_walk import PageRun, PageWalk, runs_of, split_runs
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.questions import Questions
from flexkv.cache.promise.room_line import Need, RoomLine, Turn
from flexkv.cache.promise.tails import common_tail, lease_tail, tail_key_of
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import NO_PLACES, OpId

MAX_TOKENS = 2**62
"""More than any request has."""


@dataclass(slots=True)
class Looked:
    """The answer to a lookup.

    Attributes:
        lease: what is promised.
        fetches: that the request now waits for.
        awaited: the pages for which it has to wait for room, in line, and without the lease.
    """

    lease: Lease
    fetches: int = 0
    awaited: Sequence[WantedPages] = ()


class Lookup:
    """The core of `match`.

    Args:
        tables: of the manager; ages of leases are measured with their clock.
        unix_s: wall clock for times to live.
        alignment_tokens: every hit is a multiple of it.
        epoch: the manager's.

    Attributes:
        specs: of the manager's groups.
        same_blocks: every group restores whole prefixes, of blocks of one size, and each block may end a hit.
        behind: the tiers that pages are fetched from.
    """

    def __init__(
        self,
        specs: tuple[GroupSpec, ...],
        tables: CacheTables,
        waits: FetchWaits,
        walk: PageWalk,
        promotions: Promotions,
        line: RoomLine,
        choice: FetchChoice,
        alignment_tokens: int,
        unix_s: Callable[[], float],
        epoch: Callable[[], int],
    ) -> None:
        self.specs = specs
        self.same_blocks = all(
            spec.rule is Rule.FULL and spec.block_tokens == alignment_tokens for spec in specs
        )
        self._block_tokens = specs[0].block_tokens
        self._tiers = tables.tiers
        self._hub = tables.hub
        self._ops = tables.ops
        self._requests = tables.requests
        self._waits = waits
        self._walk = walk
        self._promotions = promotions
        self._line = line
        self._choice = choice
        self._clock = tables.clock
        self._epoch = epoch
        self._unix_s = unix_s
        self._native = TierLookup([tier.presence for tier in tables.tiers], len(specs))
        rules = [GroupRule(spec.rule.value, spec.block_tokens, spec.reach) for spec in specs]
        self._boundaries = BoundaryLookup(self._native, rules, alignment_tokens)
        self._questions = Questions(specs, tables, waits, choice, alignment_tokens, epoch)
        self.behind = [TierId(n) for n in range(1, len(tables.tiers)) if tables.tiers[n].source is not None]

    def asked_tokens(self, keys: Sequence[Keys], start_tokens: int) -> int:
        """How many tokens after the start every group has keys of."""
        end = MAX_TOKENS
        for of_group, spec in zip(keys, self.specs, strict=True):
            end = min(end, len(of_group) * spec.block_tokens)
        return max(0, end - start_tokens)

    def cut(self, keys: Sequence[Keys], tokens: int) -> list[Keys]:
        """Of each group, the keys of the first `tokens`."""
        return [k[: tokens // spec.block_tokens] for k, spec in zip(keys, self.specs, strict=True)]

    def had(self, keys: Sequence[Keys], lease: Lease) -> list[Keys]:
        """Of each group, the keys of what the engine has itself and goes on to use; windows and states of the start
        are of no use once it is behind."""
        had = self.cut(keys, lease.start_tokens)
        return [k if spec.rule is Rule.FULL else k[:0] for k, spec in zip(had, self.specs, strict=True)]

    def look(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None,
        room_pages: int,
        straight: bool,
    ) -> Looked:
        """The longest hit after `start_tokens` of at most `room_pages` pages, and the longest tail after it.

        Args:
            straight: pages may be promised where they lie.
        """
        usable = self._usable(request_id) if self.behind else []
        if self.same_blocks:
            start_block = start_tokens // self._block_tokens
            return self._look_for_prefix(request_id, keys, start_block, tail, room_pages, usable, straight)
        return self._look_for_boundary(request_id, keys, start_tokens, room_pages, usable)

    def prefetch(
        self, request_id: str, keys: Sequence[Keys], start_tokens: int, room_pages: int, most_pages: int
    ) -> int:
        """Begins to fetch what follows the prefix in host memory, `most_pages` at most; nothing is promised.

        What the first lookup would not wait for is not fetched: pages that are computed sooner, or promised where they
        lie. Nor are pages of groups that do not restore whole prefixes.

        Returns:
            The fetches under way, also those that others have begun.
        """
        usable = [tier for tier in self.behind if self._tiers[tier].in_use]
        if not usable or not self.same_blocks or most_pages < len(self.specs):
            return 0
        lease, rest = self._find_prefix(keys, start_tokens // self._block_tokens, room_pages, usable)
        first = self._end_of(lease)
        asked = self._ask_for_blocks(request_id, keys, start_tokens, lease, rest, usable)
        if asked:
            self._requests.begin_prefetch(request_id, first)
        fetches = self._prefetch_rest(request_id, rest, keys, first, usable, most_pages) if rest else 0
        fetches += asked
        # Leased until now, so that what is fetched does not displace what it follows.
        for group in lease.groups:
            self._hub.index.unpin(group.entries)
        return fetches

    def _prefetch_rest(
        self,
        request_id: str,
        rest: list[list[PageRun]],
        keys: Sequence[Keys],
        first: int,
        usable: Sequence[TierId],
        most_pages: int,
    ) -> int:
        if any(self._takes_straight(tier, rest, keys, first) for tier in usable):
            for runs in rest:
                self._walk.release(runs)
            return 0
        rest = [self._walk.cut(runs, most_pages // len(self.specs)) for runs in rest]
        rest, _ = self._choice.leading_worth(rest, keys, first, counted=False)
        if not any(rest):
            return 0
        wanted, last = wanted_pages(rest, keys, first), self._ops.last_id
        # By layers where a lookup would: it then promises what has not come yet.
        _, layerwise = self._streams(rest)
        fetched = self._promotions.fetch(wanted, layerwise, self._epoch())
        fetches = self._waits.join(request_id, wanted, fetched.pages, fetched.ops, counted=False)
        if fetches:
            self._requests.begin_prefetch(request_id, first)
        for op_id, tier in fetched.ops.items():
            if op_id > last:
                op = self._ops.fetch(op_id)
                assert op is not None
                op.prefetched = True
                self._tiers[tier].counts.prefetched += op.pages
        return fetches

    def _usable(self, request_id: str) -> list[TierId]:
        """The tiers that the request may be served from besides the hub."""
        skipped = self._waits.skipped(request_id)
        return [tier for tier in self.behind if tier not in skipped and self._tiers[tier].in_use]

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
        lease, rest = self._find_prefix(keys, start, room_pages, usable)
        asked = self._ask_for_blocks(request_id, keys, start * self._block_tokens, lease, rest, usable)
        looked = self._promise_prefix(
            request_id, keys, start, lease, rest, tail, room_pages, usable, straight
        )
        looked.fetches += asked
        return looked

    def _promise_prefix(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start: int,
        lease: Lease,
        rest: list[list[PageRun]],
        tail: Sequence[TailCandidates | None] | None,
        room_pages: int,
        usable: Sequence[TierId],
        straight: bool,
    ) -> Looked:
        """What of a prefix that was found may be promised, and what of it is fetched."""
        end = self._end_of(lease)
        if tail is not None and room_pages >= len(self.specs) * (end - start + 1):
            lease_tail(self._hub, lease, tail, end)
        if rest:
            return self._take_rest(request_id, lease, rest, keys, usable, not lease.tail_tokens, straight)
        if tail is None or lease.cut or not usable:
            return Looked(lease)
        return Looked(lease, self._fetch_tail(request_id, lease, tail, usable))

    def _find_prefix(
        self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]
    ) -> tuple[Lease, list[list[PageRun]]]:
        """Leases the prefix in host memory that may be promised, and per group the runs that follow it."""
        if len(self.specs) == 1:
            return self._find_in_one_group(keys, start, max(0, room_pages), usable)
        return self._find_in_all_groups(keys, start, room_pages, usable)

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
        lease = self._lease((GroupLease(entries, slots, start, ready),), start, ready)
        if (ready == len(offered) and whole) or (ready < len(offered) and not usable):
            return lease, []
        found = self._find(keys, start + ready, room_pages - ready, usable)
        lease.cut = found.cut
        return lease, [runs_of(found, 0)] if found.blocks else []

    def _find_in_all_groups(
        self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]
    ) -> tuple[Lease, list[list[PageRun]]]:
        """The same over several groups, which restore the same blocks together."""
        found = self._find(keys, start, room_pages, usable)
        ready = found.ready_blocks
        parts = [split_runs(runs_of(found, group), ready) for group in range(len(self.specs))]
        shares = tuple(GroupLease(share.entries, share.slots, start, ready) for share, _ in parts)
        lease = self._lease(shares, start, ready, found.cut)
        return lease, [runs for _, runs in parts] if ready < found.blocks else []

    def _find(self, keys: Sequence[Keys], start: int, room_pages: int, usable: Sequence[TierId]) -> Found:
        """The prefix after `start`; each page is leased in its tier, and the lease the caller's."""
        mask, now_s = _mask(usable), max(0, int(self._unix_s()))
        found = self._native.look(keys, start, room_pages, mask, now_s, bool(usable))
        self._drop_expired(found, keys)
        found.detach()
        return found

    def _drop_expired(self, found: Found | FoundLengths, keys: Sequence[Keys]) -> None:
        for number, group, _ in found.expired:
            # Asked key by key, the tier drops all of the request's pages whose time is over.
            self._tiers[number].present(group, keys[group])

    def _lease(self, shares: tuple[GroupLease, ...], start: int, blocks: int, cut: bool = False) -> Lease:
        size = self._block_tokens
        return Lease(shares, self._clock(), start * size, blocks * size, cut=cut)

    def lease_of_nothing(self, start_tokens: int) -> Lease:
        shares = [
            GroupLease(NO_ENTRIES, NO_PLACES, start_tokens // spec.block_tokens, 0) for spec in self.specs
        ]
        return Lease(tuple(shares), self._clock(), start_tokens)

    def _end_of(self, lease: Lease) -> int:
        """Number of the block behind a lease."""
        return (lease.start_tokens + lease.tokens) // self._block_tokens

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
        first = self._end_of(lease)
        for tier in usable if promise and straight else ():
            if self._takes_straight(tier, rest, keys, first):
                return self._promise_straight(request_id, lease, rest, tier)
        rest, left = self._choice.leading_worth(rest, keys, first)
        if left:
            self._requests.skip(request_id, self.behind)
        if not any(rest):
            return Looked(lease)
        wanted = wanted_pages(rest, keys, first)
        need, turn = self._take_turn(request_id, lease, wanted, len(wanted[0].keys) * self._block_tokens)
        if turn is Turn.WAIT or turn is Turn.GO_ON:
            return self._leave_there(request_id, lease, wanted, need, turn)
        streamed, layerwise = self._streams(rest)
        streamed, layerwise = promise and streamed, promise and layerwise
        last = self._ops.last_id
        fetched = self._promotions.fetch(wanted, layerwise, self._epoch())
        if turn is Turn.FETCH_SOME and (streamed or not fetched.ops):
            self._note_without(request_id, need, fetched, last)
        if streamed:
            extend_lease(lease, fetched.pages, self._block_tokens)
            return Looked(lease)
        return Looked(lease, self._waits.join(request_id, wanted, fetched.pages, fetched.ops))

    def _take_turn(
        self, request_id: str, lease: Lease, wanted: Sequence[WantedPages], tokens: int
    ) -> tuple[Need, Turn]:
        """What a fetch of the wanted pages, which hold `tokens`, would take, and whether it may begin."""
        if self._line.fits_at_once(wanted):
            return Need(), Turn.FETCH
        need = self._line.need_of(wanted, lease.groups)
        wait_s = max((self._choice.room_wait_s(tier, tokens) for tier in need.fetches), default=0.0)
        return need, self._line.take_turn(request_id, need, wait_s)

    def _leave_there(
        self, request_id: str, lease: Lease, wanted: Sequence[WantedPages], need: Need, turn: Turn
    ) -> Looked:
        """Fetches nothing: the request waits for room, or goes on without."""
        for part in wanted:
            self._walk.release(part.runs)
        if turn is Turn.WAIT:
            return Looked(lease, awaited=wanted)
        self._line.note_without(request_id, need.pages)
        self._requests.skip(request_id, self.behind)
        return Looked(lease)

    def _note_without(self, request_id: str, need: Need, fetched: Fetched, last: OpId) -> None:
        """Counts what found no room in the fetches after op `last`."""
        pages = dict(need.pages)
        for op_id, tier in fetched.ops.items():
            op = self._ops.fetch(op_id)
            if op_id > last and op is not None:
                pages[tier] -= op.pages
        self._line.note_without(request_id, {tier: max(0, count) for tier, count in pages.items()})

    def _streams(self, rest: Sequence[Sequence[PageRun]]) -> tuple[bool, bool]:
        """Whether all tiers that the pages come from stream them, and by layers."""
        facts = [self._tiers[tier].facts for tier in self._choice.tiers_of(rest)]
        streams = all(fact.streams for fact in facts)
        return streams, streams and all(fact.stream_layers for fact in facts)

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
        pages, tokens = blocks * len(rest), blocks * self.specs[0].block_tokens
        if not self._choice.straight_worth(tier, route, pages, tokens):
            for runs in rest:
                self._walk.release(runs)
            self._requests.skip(request_id, self.behind)
            return Looked(lease)
        for group, runs in enumerate(rest):
            lease.groups[group].straight = route.lease(group, runs[0].entries, runs[0].slots)
            lease.groups[group].blocks += blocks
        lease.tokens += blocks * self._block_tokens
        return Looked(lease)

    def _fetch_tail(
        self,
        request_id: str,
        lease: Lease,
        tail: Sequence[TailCandidates | None],
        usable: Sequence[TierId],
    ) -> int:
        """Fetches the longest tail, if it is longer than the leased one; the fetches to wait for."""
        end_block, tail_tokens = self._end_of(lease), lease.tail_tokens
        found = common_tail(tail, end_block, lambda group, keys: self._walk.present(group, keys, usable))
        if found <= tail_tokens:
            return self._questions.for_tail(request_id, tail, end_block, usable)
        wanted = []
        for group, candidates in enumerate(tail):
            assert candidates is not None
            keys = tail_key_of(candidates, found)
            wanted.append(WantedPages(group, keys, self._walk.locate(group, keys, usable)))
        return self._fetch_all(request_id, lease, wanted, found - tail_tokens, in_line=False).fetches

    # --- groups that need other pages each ---

    def _look_for_boundary(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        room_pages: int,
        usable: Sequence[TierId],
    ) -> Looked:
        found = self._find_boundary(keys, start_tokens, room_pages, usable)
        end = start_tokens + self.asked_tokens(keys, start_tokens)
        asked = self._questions.for_boundary(request_id, keys, start_tokens, end, found, usable)
        if found.ready or not found.lengths:
            return Looked(self._lease_found(found), asked)
        # What is missing is fetched; meanwhile as much is promised as host memory has itself.
        wanted, tokens = self._wanted(found, keys), found.lengths[0]
        lease = self._lease_found(self._find_boundary(keys, start_tokens, room_pages, ()))
        lease.shared_tokens = found.shared_tokens
        tokens -= start_tokens + lease.tokens
        looked = self._fetch_all(request_id, lease, wanted, tokens)
        looked.fetches += asked
        return looked

    def _find_boundary(
        self, keys: Sequence[Keys], start_tokens: int, room_pages: int, usable: Sequence[TierId]
    ) -> FoundLengths:
        """The longest hit; its pages are leased, and the lease the caller's."""
        now_s = max(0, int(self._unix_s()))
        found = self._boundaries.look(
            keys, start_tokens, max(0, room_pages), _mask(usable), now_s, bool(usable)
        )
        self._drop_expired(found, keys)
        found.detach()
        return found

    def _lease_found(self, found: FoundLengths) -> Lease:
        """A lease of pages that all are in host memory."""
        shares = []
        for group, spec in enumerate(self.specs):
            entries = found.entries(group)
            first = found.start_tokens // spec.block_tokens + found.first_page(group)
            shares.append(GroupLease(entries, found.slots(group), first, len(entries)))
        tokens = found.lengths[0] - found.start_tokens if found.lengths else 0
        return Lease(
            tuple(shares),
            self._clock(),
            found.start_tokens,
            tokens,
            cut=found.cut,
            shared_tokens=found.shared_tokens,
        )

    def _wanted(self, found: FoundLengths, keys: Sequence[Keys]) -> list[WantedPages]:
        """What the hit needs of each group."""
        wanted = []
        for group, spec in enumerate(self.specs):
            first = found.start_tokens // spec.block_tokens + found.first_page(group)
            end = found.lengths[0] // spec.block_tokens
            if first < end:
                wanted.append(WantedPages(group, keys[group][first:end], runs_of(found, group)))
        return wanted

    # --- what is fetched, and what is not ---

    def _ask_for_blocks(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        lease: Lease,
        rest: list[list[PageRun]],
        usable: Sequence[TierId],
    ) -> int:
        """Asks for the blocks that follow what was found; the answers to wait for."""
        if lease.cut or not self._questions.any:
            return 0
        end = self._end_of(lease) + (sum(map(len, rest[0])) if rest else 0)
        return self._questions.for_blocks(request_id, keys, start_tokens, end, usable)

    def _fetch_all(
        self,
        request_id: str,
        lease: Lease,
        wanted: list[WantedPages],
        tokens: int,
        in_line: bool = True,
    ) -> Looked:
        """Fetches pages that are of use together or not at all.

        Args:
            in_line: the request waits for room. A tail takes a slot if there is one: for less than a block nobody
                gives up what is promised.
        """
        runs = [part.runs for part in wanted]
        if not self._choice.all_worth(runs, tokens):
            for part in wanted:
                self._walk.release(part.runs)
            self._requests.skip(request_id, self.behind)
            return Looked(lease)
        turn, last = Turn.FETCH_SOME, self._ops.last_id
        if in_line:
            need, turn = self._take_turn(request_id, lease, wanted, tokens)
        else:
            need = self._line.need_of(wanted, lease.groups)
        if turn is Turn.WAIT or turn is Turn.GO_ON:
            return self._leave_there(request_id, lease, wanted, need, turn)
        fetched = self._promotions.fetch(wanted, layerwise=False, epoch=self._epoch(), aligned=False)
        if turn is Turn.FETCH_SOME and not fetched.ops:
            self._note_without(request_id, need, fetched, last)
        return Looked(lease, self._waits.join(request_id, wanted, fetched.pages, fetched.ops))


def _mask(usable: Sequence[TierId]) -> int:
    """Of host memory and these tiers, as lookups take it."""
    mask = 1 << HUB
    for tier in usable:
        mask |= 1 << tier
    return mask
