"""Manages the promises and waits of requests, from the lookup (or a prefetch before it) to the load."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.base import (
    HUB,
    EntryIds,
    GroupMatch,
    ManagerLimits,
    MatchResult,
    OpRole,
    Outcome,
    TailCandidates,
    TierId,
    of_first_tokens,
)
from flexkv.cache.ledger.leases import GroupLease, HeldPages, Lease, StraightPages, joined_shares
from flexkv.cache.ledger.ops import FetchOp
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.moves.op_log import OpLog
from flexkv.cache.promise.ask import Ask, Looked
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.load_tries import LoadTries
from flexkv.cache.promise.lookup import Lookup
from flexkv.cache.promise.misses import Misses
from flexkv.cache.promise.pages_behind import PagesBehind
from flexkv.cache.promise.questions import Questions
from flexkv.cache.promise.room_line import RoomLine
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import MissReason
from flexkv.transfer.graph import BlockIds, TransferGraph

PREFETCH_SLOTS = 0.25
"""Maximum share of the host slots that pages of prefetched requests occupy; all other slots are for running requests.
"""

PREFETCH_BUDGET = 0.5
"""No prefetch begins while fetches use this share of a tier's fetch limits; the rest is for lookups."""


class Promises:
    """Makes and ends the promises and waits of one manager's requests.

    Args:
        alignment_tokens: the number of tokens of every hit is a multiple of this number.

    Attributes:
        lookup: finds the pages that may be promised.
        line: the queue of requests that wait for host slots.
        load_tries: the failed loads of each request. Pages that they failed to bring are not promised to the request
            again.
        disabled: whether nothing is promised or prefetched any more.
        resetting: whether nothing is promised or prefetched until `begin_reset` has completed.
    """

    def __init__(
        self,
        tables: CacheTables,
        promotions: Promotions,
        choice: FetchChoice,
        log: OpLog,
        limits: ManagerLimits,
        alignment_tokens: int,
    ) -> None:
        self._tables = tables
        self._promotions = promotions
        self._log = log
        self._limits = limits
        self._waits = FetchWaits(tables)
        self.line = RoomLine(tables, promotions, limits.asks_again)
        questions = Questions(tables, self._waits, choice, alignment_tokens)
        behind = PagesBehind(tables, promotions.walk, promotions, self._waits, self.line, choice)
        self.lookup = Lookup(tables, behind, questions, alignment_tokens)
        self._misses = Misses(tables, self.lookup)
        self.load_tries = LoadTries(limits.rest_s, tables.clock)
        self._block_tokens = tables.specs[0].block_tokens
        self._sizes = [spec.block_tokens for spec in tables.specs]
        self._none_behind = (0,) * (len(tables.tiers) - 1)
        self._routes = [tier.loads for tier in tables.tiers if tier.loads is not None]
        self.disabled = False
        self.resetting = False

    @property
    def _silent(self) -> bool:
        """Whether nothing is promised to any request."""
        return self.disabled or self.resetting

    # --- lookups ---

    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None,
        settings: RequestSettings,
    ) -> MatchResult:
        """Implements `CacheManager.match`; the arguments are already validated.

        The common case, a new request, takes three steps: make an `Ask`, look it up, add the lease.
        """
        tables, requests, size = self._tables, self._tables.requests, self._block_tokens
        asked_tokens = self.lookup.asked_tokens(keys, start_tokens)
        is_known = requests.knows(request_id)
        lease = None
        if is_known and tail is None and settings is NO_SETTINGS:
            lease = self._lease_again(request_id, keys, start_tokens)
        if lease is not None:
            looked, ask = Looked(lease), None
        else:
            ask = self._ask(request_id, keys, start_tokens, tail, is_known, settings)
            looked = self._look(ask, is_known)
            lease = looked.lease
        requests.add_lease(request_id, lease)
        self._note_use(request_id, keys, lease)
        if looked.fetches:
            requests.begins_to_wait(request_id, (start_tokens + lease.tokens) // size)
        lease.by_tier = self._by_tier(request_id, lease)
        miss = None
        # A lookup with a tail asks only for the blocks of an earlier hit and the tail after them. So the miss that the
        # earlier lookup recorded must stay.
        if lease.tokens < asked_tokens or (requests.misses and tail is None):
            miss = self._misses.note(request_id, keys, looked, ask, asked_tokens)
        result = self._answer(request_id, lease, looked, miss)
        tables.counts.add_lookup(asked_tokens // size, lease.tokens // size, lease.tail_tokens > 0, lease.cut)
        self._log.looked_up(result, asked_tokens)
        return result

    def _ask(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None,
        is_known: bool,
        settings: RequestSettings,
    ) -> Ask:
        """Ends the request's former lease, its prefetch, and a wait that is over. Returns the lookup's arguments."""
        was_promised = False
        if is_known:
            was_promised = self.end_lease(request_id)
            if request_id in self._tables.requests.prefetched:
                self._waits.end_prefetch(request_id)
            self._waits.skip_late(request_id)
        bound, straight = None, True
        failed = self.load_tries.of_request(request_id)
        if self.disabled or self.resetting:
            bound, keys, tail = MissReason.OFF, self.lookup.cut(keys, start_tokens), None
        elif failed is not None:
            straight, tail = not failed.straight, None
            end = failed.end_of_promise(start_tokens)
            if end is not None:
                bound, keys = MissReason.FAILED_LOAD, self.lookup.cut(keys, end)
        elif self.load_tries.rests and not was_promised:
            bound, keys, tail = MissReason.FAILED_LOAD, self.lookup.cut(keys, start_tokens), None
        tiers = self._tiers_for(request_id) if self.lookup.behind else ()
        ask = Ask(
            request_id, keys, start_tokens, tail, tiers, self.room_for_loads(), straight, settings, bound
        )
        return ask if settings is NO_SETTINGS else self._heed(ask)

    def _heed(self, ask: Ask) -> Ask:
        """Applies the limits in the request's settings to the arguments of its lookup, and returns the new
        arguments."""
        settings, tiers = ask.settings, ask.tiers
        if settings.tiers is not None:
            tiers = [t for t in tiers if self._tables.tiers[t].facts.label in settings.tiers]
            ask = ask._replace(tiers=tiers)
        most = 0 if settings.skip_load else settings.max_load_tokens
        if most is None:
            return ask
        more = most - self.lookup.asked_tokens(ask.keys, ask.start_tokens)
        if more >= 0:
            # If at least one more block is allowed, so is any tail, because a tail is shorter than a block.
            return ask if more >= self._block_tokens else ask._replace(tail=None)
        keys = self.lookup.cut(ask.keys, ask.start_tokens + most)
        return ask._replace(keys=keys, tail=None, bound=ask.bound or MissReason.ASKED)

    def _tiers_for(self, request_id: str) -> list[TierId]:
        """Returns the tiers behind host memory whose pages the request may use."""
        skipped = self._tables.requests.skipped(request_id)
        tiers = self._tables.tiers
        return [tier for tier in self.lookup.behind if tier not in skipped and tiers[tier].in_use]

    def _look(self, ask: Ask, is_known: bool) -> Looked:
        """Looks the request up in all tiers. Then unpins the pages that were held for it, because its new lease pins
        those that it found."""
        # The held pages are removed from the request's record before the lookup, because the lookup may add new pages
        # to the record. They are unpinned only after the lookup, so that it does not evict them.
        held = self._tables.requests.take_held(ask.request_id) if is_known else ()
        looked = self.lookup.look(ask)
        if looked.awaited:
            self._give_up(ask.request_id, looked, held)
            return looked
        self.line.leave(ask.request_id)
        for pages in held:
            self._tables.hub.index.unpin(pages.entries)
        return looked

    def _give_up(self, request_id: str, looked: Looked, held: Sequence[HeldPages]) -> None:
        """Ends the lease of a request that waits for host slots, and unpins the pages held for it. If two requests each
        kept some slots, they could wait for each other forever.
        """
        lease = looked.lease
        self._end_shares(lease)
        for pages in held:
            self._tables.hub.index.unpin(pages.entries)
        self.line.note_released(request_id, lease.groups, looked.awaited)
        looked.lease = self.lookup.lease_of_nothing(lease.start_tokens)

    def _lease_again(self, request_id: str, keys: Sequence[Keys], start_tokens: int) -> Lease | None:
        """Joins the request's lease and the pages held for it into one new lease, if these are all the pages that the
        request asks for. Returns None and changes nothing if a lookup is needed.

        The pages are pinned, so only their keys are checked. A page whose fetch failed, or that was cached before a
        reset, no longer belongs to its key.
        """
        requests, former = self._tables.requests, self._tables.requests.lease(request_id)
        held = requests.held_by(request_id)
        if held is None or (former is None and not held) or not self.lookup.same_blocks:
            return None
        if self._silent or self.load_tries.of_request(request_id) is not None:
            return None
        if former is None and self.load_tries.rests:
            return None
        start_block = start_tokens // self._block_tokens
        groups = joined_shares(former, held, len(keys), start_tokens, start_block)
        blocks = len(keys[0]) - start_block
        if not groups or any(share.blocks != blocks for share in groups):
            return None
        if any(len(k) != len(keys[0]) for k in keys) or not self._has_room(former, groups):
            return None
        for group, share in enumerate(groups):
            wanted, in_host = keys[group][start_block:], len(share.entries)
            if not self._tables.hub.holds(group, wanted[:in_host], share.entries):
                return None
            if share.straight is not None and not self._keeps(group, wanted[in_host:], share.straight):
                return None
        requests.pop_lease(request_id)
        requests.take_held(request_id)
        return Lease(groups, self._tables.clock(), start_tokens, blocks * self._block_tokens)

    def _keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        """Whether pages that were promised for a straight load may still be loaded straight."""
        route = self._tables.tiers[pages.tier].straight
        return route is not None and route.keeps(group, keys, pages)

    def _note_use(self, request_id: str, keys: Sequence[Keys], lease: Lease) -> None:
        """Records that the request uses the blocks that the engine has itself and the blocks that were promised."""
        before: Sequence[EntryIds] = ()
        if lease.start_tokens:
            own = self.lookup.engine_keys(keys, lease.start_tokens)
            before = [self._tables.hub.index.find(group, k) for group, k in enumerate(own)]
        promised = lease.groups if lease.tokens else ()
        self._tables.access_orders.put_lookup(request_id, before, promised)

    def _by_tier(self, request_id: str, lease: Lease) -> tuple[int, ...]:
        """Returns how many of a lease's tokens each tier has supplied."""
        if not lease.tokens:
            return ()
        group = lease.groups[0]
        in_host = group.straight is None and group.fetches is None
        # A hit that ends exactly at the end of an attention chunk may need no pages.
        if (in_host and request_id not in self._tables.requests.waits) or not lease.pages:
            return (lease.tokens, *self._none_behind)
        counts = [0] * len(self._tables.tiers)
        if not self.lookup.same_blocks:
            # Pages of different groups have different numbers of tokens, so tokens are counted in proportion to pages.
            for tier, pages in self._tables.requests.fetched_pages(request_id, lease.pages).items():
                counts[tier] += lease.tokens * pages // lease.pages
            counts[HUB] = lease.tokens - sum(counts)
            return tuple(counts)
        if group.straight is not None:
            counts[group.straight.tier] += len(group.straight)
        if group.fetches is not None:
            for tier, pages in self._promotions.pages_by_tier(group.fetches).items():
                counts[tier] += pages
        start, blocks = lease.start_tokens // self._block_tokens, lease.tokens // self._block_tokens
        host_end = start + blocks - sum(counts)
        for tier, pages in self._tables.requests.fetched_for(request_id, start, host_end).items():
            counts[tier] += pages
        counts[HUB] = blocks - sum(counts)
        return tuple(count * self._block_tokens for count in counts)

    def _has_room(self, former: Lease | None, groups: Sequence[GroupLease]) -> bool:
        """Whether these pages may be promised to a request in place of its former lease."""
        more = sum(group.pages for group in groups) - (0 if former is None else former.pages)
        return more <= self.room_for_loads()

    def room_for_loads(self) -> int:
        """Returns how many more pages may be promised, besides those that are promised or being loaded."""
        taken = self._tables.requests.reserved_pages + self._tables.ops.pages(OpRole.LOAD)
        return self._limits.inflight_load_pages - taken

    def _answer(self, request_id: str, lease: Lease, looked: Looked, miss: MissReason | None) -> MatchResult:
        if looked.awaited:
            outcome = Outcome.ASK_AGAIN
        elif looked.fetches:
            outcome = Outcome.COMING
        else:
            outcome = Outcome.HIT if lease.tokens or lease.tail_tokens else Outcome.MISS
        tail_tokens, groups = lease.tail_tokens, []
        for group, block_tokens in zip(lease.groups, self._sizes, strict=True):
            blocks = lease.tokens // block_tokens
            if tail_tokens:
                slots, tail_slot = group.slots[: group.blocks], int(group.slots[-1])
                groups.append(GroupMatch(blocks, slots, tail_tokens, tail_slot, group.first_block))
            else:
                groups.append(GroupMatch(blocks, group.slots, 0, -1, group.first_block))
        return MatchResult(
            request_id,
            lease.start_tokens,
            tuple(groups),
            lease.tokens,
            tail_tokens,
            outcome,
            miss,
            looked.fetches,
            lease.by_tier,
            lease.shared_tokens,
        )

    # --- loads ---

    def lease_to_load(self, request_id: str, blocks: Sequence[BlockIds]) -> Lease | None:
        """Returns the request's lease; None if it has none and `blocks` has no blocks.

        Raises:
            ContractError: there are blocks to load to, but no lease.
        """
        lease = self._tables.requests.lease(request_id)
        if lease is None and any(len(b) for b in blocks):
            raise ContractError(
                f"begin_load: request {request_id!r} has no lease (released, expired or reset?)"
            )
        return lease

    def load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> TransferGraph | None:
        """Plans the load of the promised pages to `targets`, ends the request's lease and wait, and returns the graph;
        None if nothing is loaded. Precondition: `targets` come from `load_targets`."""
        taken = max(len(blocks) * tokens for blocks, tokens in zip(targets, self._sizes, strict=True))
        for tier, tokens in zip(self._tables.tiers, of_first_tokens(lease.by_tier, taken), strict=False):
            tier.counts.hits += tokens // self._block_tokens
        self._tables.requests.pop_lease(request_id)
        self._misses.count(request_id)
        self._waits.end_wait(request_id)
        self.line.forget(request_id)
        ops = [op for route in self._routes for op in route.begin_load(request_id, lease, targets)]
        begun = [op for op in self._tables.ops.of_request(request_id, OpRole.LOAD) if op.load is None]
        for op in begun:
            op.load = begun[0].op_id
        self._log.load_begun(begun)
        return TransferGraph(tuple(ops)) if ops else None

    # --- prefetches ---

    def prefetch(
        self, request_id: str, keys: Sequence[Keys], start_tokens: int, settings: RequestSettings
    ) -> int:
        """Implements `CacheManager.prefetch`; the arguments are already validated."""
        requests = self._tables.requests
        if self._silent or self.load_tries.rests:
            return 0
        if self.load_tries.of_request(request_id) is not None:
            return 0
        if requests.lease(request_id) is not None or request_id in requests.waits:
            return 0
        if len(requests.prefetched) >= self._limits.prefetch_requests or len(self.line):
            return 0
        return self._begin_prefetch(request_id, keys, start_tokens, settings)

    def resume_prefetch(
        self, request_id: str, keys: Sequence[Keys], start_tokens: int, settings: RequestSettings
    ) -> None:
        """Called when a tier has answered a question about a request. If the request is still prefetched, begins to
        fetch the pages that the tier has."""
        if request_id not in self._tables.requests.prefetched or self._silent or self.load_tries.rests:
            return
        if len(self.line):
            return
        self._begin_prefetch(request_id, keys, start_tokens, settings)

    def _begin_prefetch(
        self, request_id: str, keys: Sequence[Keys], start_tokens: int, settings: RequestSettings
    ) -> int:
        """Begins to fetch as many pages of the request as the limits allow; returns the number of fetches in flight."""
        tiers = [tier for tier in self.lookup.behind if self._tables.tiers[tier].in_use]
        ask = Ask(request_id, keys, start_tokens, None, tiers, self.room_for_loads(), settings=settings)
        if settings is not NO_SETTINGS:
            ask = self._heed(ask)
        return self.lookup.prefetch(ask, self._room_for_prefetch(len(keys)))

    def _room_for_prefetch(self, groups: int) -> int:
        """Returns how many more pages may be prefetched now."""
        owners = self._tables.hub.owners
        slots = len(owners) * min(self._tables.hub.index.up_slots(owner) for owner in owners)
        room = int(PREFETCH_SLOTS * slots) - self._tables.requests.prefetched_pages()
        # Pages in prefetches for which no request waits any more occupy slots too.
        room -= self._tables.ops.unawaited_prefetches()
        for tier in self.lookup.behind:
            facts = self._tables.tiers[tier].facts
            if self._tables.ops.count(OpRole.FETCH, tier) >= PREFETCH_BUDGET * facts.fetch_ops:
                return 0
            fetched = self._tables.ops.pages(OpRole.FETCH, tier)
            room = min(room, int(PREFETCH_BUDGET * facts.fetch_pages) - fetched)
        return max(0, room)

    def held_slots(self, group: int) -> set[int]:
        """Returns the host slots held for waiting requests, except those that a fetch is still filling."""
        held = [pages for pages in self._tables.requests.held() if pages.group == group]
        slots = {slot for pages in held for slot in pages.slots.tolist()}
        fetches = [op for op in self._tables.ops if isinstance(op, FetchOp) and op.group == group]
        return slots - {slot for op in fetches for slot in op.plan.slots.tolist()}

    # --- ends ---

    def end_lease(self, request_id: str) -> bool:
        """Ends the request's lease, and returns whether it had one."""
        lease = self._tables.requests.pop_lease(request_id)
        if lease is None:
            return False
        self._end_shares(lease)
        return True

    def _end_shares(self, lease: Lease) -> None:
        """Unpins all pages of a lease."""
        for route in self._routes:
            for group in lease.groups:
                route.release_share(group)

    def release(self, request_id: str) -> None:
        """Implements `CacheManager.release`."""
        self.end_lease(request_id)
        self._misses.count(request_id)
        self._waits.end_wait(request_id)
        self.line.leave(request_id)
        if not self._limits.asks_again:
            self.line.forget(request_id)
        for order in self._tables.access_orders.pop_orders(request_id):
            # Hits are counted here, not by each lookup or load, so that a request counts as one hit per block.
            self._tables.hub.index.touch(order.entries(), order.found)

    def abandon_loads(self, request_id: str) -> None:
        """Implements `CacheManager.abandon_loads`."""
        for op in self._tables.ops.of_request(request_id, OpRole.LOAD):
            op.abandoned = True

    def end_request(self, request_id: str) -> None:
        """Implements `CacheManager.end_request`."""
        self.release(request_id)
        self.line.forget(request_id)
        self.load_tries.end_request(request_id)
        self.abandon_loads(request_id)

    def expire(self) -> int:
        """Implements `CacheManager.expire`."""
        now_s = self._tables.clock()
        expired = self._tables.requests.leased_before(now_s - self._limits.lease_s)
        for request_id in expired:
            self.release(request_id)
        self._tables.counts.expired_leases += len(expired)
        longest_s = max((tier.facts.wait_s for tier in self._tables.tiers[1:]), default=0.0)
        for request_id in self._tables.requests.waiting_before(now_s - longest_s):
            self._waits.end_wait(request_id)
        return len(expired)

    def end_all(self) -> None:
        """Ends all leases and waits, and empties the queue for host slots."""
        for request_id in self._tables.requests.leased():
            self.end_lease(request_id)
        for request_id in list(self._tables.requests.waits):
            self._waits.end_wait(request_id)
        self._tables.requests.misses.clear()
        self.line.clear()
