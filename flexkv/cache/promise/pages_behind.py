"""Decides about pages that a lookup found in tiers behind host memory: they are promised for straight loads, fetched,
or left to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.base import EntryIds, OpRole, TierId
from flexkv.cache.ledger.leases import Lease
from flexkv.cache.moves.fetches import Fetched, Promotions, WantedPages, extend_lease, wanted_pages
from flexkv.cache.moves.page_walk import PageRun, PageWalk
from flexkv.cache.promise.ask import Ask, Looked
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.room_line import Need, RoomLine, Turn
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.observe import MissReason
from flexkv.transfer.graph import OpId

Rest = list[list[PageRun]]
"""Per group, the runs of the blocks that follow a lease. Each run (consecutive pages in one tier) is leased in its
tier. The runs of all groups cover the same blocks."""


class PagesBehind:
    """Decides about pages in tiers behind host memory. All pages passed to its methods are leased. The methods end
    these leases, or pass them on to a fetch or a promise."""

    def __init__(
        self,
        tables: CacheTables,
        walk: PageWalk,
        promotions: Promotions,
        waits: FetchWaits,
        line: RoomLine,
        choice: FetchChoice,
    ) -> None:
        self.walk = walk
        self._tables = tables
        self._promotions = promotions
        self._waits = waits
        self._line = line
        self._choice = choice
        self._block_tokens = tables.specs[0].block_tokens

    # --- what follows a prefix ---

    def take_rest(self, ask: Ask, lease: Lease, rest: Rest) -> Looked:
        """Promises the pages of `rest` for straight loads, or fetches them, or leaves them to the engine. A lease with
        a tail is not extended.
        """
        first = (lease.start_tokens + lease.tokens) // self._block_tokens
        may_grow = not lease.tail_tokens
        for tier in ask.tiers if may_grow and ask.straight else ():
            entries = self._straight_entries(ask, tier, rest, first)
            if entries is not None:
                self._take_straight(tier, rest, entries)
                return self._promise_straight(ask, lease, rest, tier)
        rest, left = self._choice.cut_to_worth(rest, ask.keys, first)
        if left:
            self._skip_tiers(ask, MissReason.COMPUTED_SOONER)
        if not any(rest):
            return Looked(lease)
        wanted = wanted_pages(rest, ask.keys, first)
        need, turn = self._take_turn(ask, lease, wanted, len(wanted[0].keys) * self._block_tokens)
        if turn is Turn.WAIT or turn is Turn.GO_ON:
            return self._leave_there(ask, lease, wanted, need, turn)
        streamed, layerwise = self._streams(rest)
        streamed, layerwise = may_grow and streamed, may_grow and layerwise
        last = self._tables.ops.last_id
        fetched = self._promotions.fetch(wanted, layerwise)
        left_out = None
        if turn is Turn.FETCH_SOME and (streamed or not fetched.ops):
            left_out = self._note_without_room(ask, need, fetched, last)
        if streamed:
            extend_lease(lease, fetched.pages, self._block_tokens)
            return Looked(lease, left_out=left_out)
        return Looked(lease, self._waits.join_fetches(ask.request_id, wanted, fetched), left_out=left_out)

    def prefetch(self, ask: Ask, rest: Rest, first: int, most_pages: int) -> int:
        """If a lookup would fetch these pages, begins to fetch up to `most_pages` of them. `rest` begins with block
        `first`. Returns the number of fetches for which the request then waits."""
        if any(self._straight_entries(ask, tier, rest, first) is not None for tier in ask.tiers):
            for runs in rest:
                self.walk.release(runs)
            return 0
        rest = [self.walk.cut(runs, most_pages // len(ask.keys)) for runs in rest]
        rest, _ = self._choice.cut_to_worth(rest, ask.keys, first, counted=False)
        if not any(rest):
            return 0
        wanted, last = wanted_pages(rest, ask.keys, first), self._tables.ops.last_id
        # The pages are fetched layer by layer if a lookup would do so, because the lookup then promises pages that have
        # not arrived yet.
        _, layerwise = self._streams(rest)
        fetched = self._promotions.fetch(wanted, layerwise)
        fetches = self._waits.join_fetches(ask.request_id, wanted, fetched, counted=False)
        if fetches:
            self._tables.requests.begin_prefetch(ask.request_id, first)
        for op_id, tier in fetched.ops.items():
            if op_id > last:
                op = self._tables.ops.fetch(op_id)
                assert op is not None
                op.prefetched = True
                self._tables.tiers[tier].counts.prefetched += op.pages
        return fetches

    def _streams(self, rest: Rest) -> tuple[bool, bool]:
        """Returns whether all tiers that have the pages stream them, and whether all of these tiers stream them layer
        by layer."""
        facts = [self._tables.tiers[tier].facts for tier in self._choice.tiers_of(rest)]
        streams = all(fact.streams for fact in facts)
        return streams, streams and all(fact.stream_layers for fact in facts)

    # --- pages that are useful only together ---

    def fetch_together(
        self, ask: Ask, lease: Lease, wanted: list[WantedPages], tokens: int, in_line: bool = True
    ) -> Looked:
        """Begins to fetch the pages `wanted`, which together make the hit longer by `tokens` tokens, if they arrive
        sooner than the engine computes these tokens.

        Args:
            in_line: whether the request waits in the queue if there are not enough free slots. False for a tail: a
                request in the queue loses its lease, and a tail of less than a block is not worth the lease.
        """
        if not self._choice.choose_fetch([part.runs for part in wanted], tokens):
            for part in wanted:
                self.walk.release(part.runs)
            self._skip_tiers(ask, MissReason.COMPUTED_SOONER)
            return Looked(lease)
        if in_line:
            need, turn = self._take_turn(ask, lease, wanted, tokens)
        else:
            need = self._line.need_of(wanted, lease.groups)
            turn = Turn.FETCH if self._line.has_room(need) else Turn.FETCH_SOME
        if turn is Turn.WAIT or turn is Turn.GO_ON:
            return self._leave_there(ask, lease, wanted, need, turn)
        if turn is Turn.FETCH_SOME:
            for part in wanted:
                self.walk.release(part.runs)
            self._line.note_without(ask.request_id, need.pages)
            return Looked(lease, left_out=MissReason.NO_ROOM)
        fetched = self._promotions.fetch(wanted, layerwise=False, aligned=False)
        return Looked(lease, self._waits.join_fetches(ask.request_id, wanted, fetched))

    # --- slots for fetches ---

    def _take_turn(
        self, ask: Ask, lease: Lease, wanted: Sequence[WantedPages], tokens: int
    ) -> tuple[Need, Turn]:
        """Decides whether the request may fetch `wanted` (`tokens` tokens) now, waits in the queue, or continues
        without these pages. Returns the slots and fetches that it needs, and the decision.
        """
        if self._line.fits_at_once(wanted):
            return Need(), Turn.FETCH
        need = self._line.need_of(wanted, lease.groups)
        wait_s = max((self._choice.room_wait_s(tier, tokens) for tier in need.fetches), default=0.0)
        return need, self._line.take_turn(ask.request_id, need, wait_s)

    def _leave_there(
        self, ask: Ask, lease: Lease, wanted: Sequence[WantedPages], need: Need, turn: Turn
    ) -> Looked:
        """Ends the leases of `wanted` without a fetch. The request waits in the queue, or continues without these
        pages."""
        for part in wanted:
            self.walk.release(part.runs)
        if turn is Turn.WAIT:
            return Looked(lease, awaited=wanted)
        self._line.note_without(ask.request_id, need.pages)
        self._skip_tiers(ask, MissReason.NO_ROOM)
        return Looked(lease)

    def _note_without_room(self, ask: Ask, need: Need, fetched: Fetched, last: OpId) -> MissReason | None:
        """Counts the pages of `need` that the fetches planned after op `last` do not bring. Returns the reason why
        these pages are left out; None if the fetches bring all pages.
        """
        pages = dict(need.pages)
        for op_id, tier in fetched.ops.items():
            op = self._tables.ops.fetch(op_id)
            if op_id > last and op is not None:
                pages[tier] -= op.pages
        left = {tier: max(0, count) for tier, count in pages.items()}
        self._line.note_without(ask.request_id, left)
        return MissReason.NO_ROOM if any(left.values()) else None

    def _skip_tiers(self, ask: Ask, reason: MissReason) -> None:
        """Records that the request continues without any tier behind host memory."""
        behind = [TierId(n) for n, tier in enumerate(self._tables.tiers) if n and tier.source is not None]
        self._tables.requests.skip(ask.request_id, behind, reason)

    # --- straight loads ---

    def _straight_entries(self, ask: Ask, tier: TierId, rest: Rest, first: int) -> list[EntryIds] | None:
        """Returns, per group, the entries of all pages of `rest` in one tier, if they should be loaded straight from
        that tier. Returns None if they should not, or if the tier lacks some of them.
        """
        route = self._tables.tiers[tier].straight
        pages = [sum(map(len, runs)) for runs in rest]
        if route is None or not route.wants(sum(pages), self._tables.ops.pages(OpRole.FETCH, tier)):
            return None
        whole = []
        for group, count in enumerate(pages):
            # The tier must also have the pages of `rest` that are in host memory, because a promise changes from host
            # memory to another tier at most once.
            entries = self._tables.tiers[tier].leading(group, ask.keys[group][first : first + count])
            if len(entries) < count:
                return None
            whole.append(entries)
        return whole

    def _take_straight(self, tier: TierId, rest: Rest, entries: Sequence[EntryIds]) -> None:
        """Replaces the runs of each group in `rest` with one run: the group's `entries` in the tier. Leases the pages
        of the new runs, and ends the leases of the former runs."""
        for runs, of_tier in zip(rest, entries, strict=True):
            slots = self._tables.tiers[tier].presence.pin(of_tier)
            self.walk.release(runs)
            runs[:] = [PageRun(tier, of_tier, slots)]

    def _promise_straight(self, ask: Ask, lease: Lease, rest: Rest, tier: TierId) -> Looked:
        """Adds `rest`, one run of the tier per group, to the lease, if loading it straight takes less time than
        computing it. Otherwise leaves it to the engine."""
        route = self._tables.tiers[tier].straight
        assert route is not None
        blocks = len(rest[0][0])
        pages, tokens = blocks * len(rest), blocks * self._block_tokens
        if not self._choice.choose_straight_load(tier, route, pages, tokens):
            for runs in rest:
                self.walk.release(runs)
            self._skip_tiers(ask, MissReason.COMPUTED_SOONER)
            return Looked(lease)
        for group, runs in enumerate(rest):
            lease.groups[group].straight = route.lease(group, runs[0].entries, runs[0].slots)
            lease.groups[group].blocks += blocks
        lease.tokens += tokens
        return Looked(lease)
