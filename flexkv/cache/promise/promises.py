"""What requests were promised and what they wait for: from a lookup, or a prefetch before it, to the load."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.base import HUB, GroupMatch, ManagerLimits, MatchResult, OpRole, TailCandidates
from flexkv.cache.ledger.access_order import AccessOrders
from flexkv.cache.ledger.leases import GroupLease, HeldPages, Lease, StraightPages, joined_shares
from flexkv.cache.ledger.ops import FetchOp
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.moves.op_log import OpLog
from flexkv.cache.promise.failed_loads import FailedLoads
from flexkv.cache.promise.lookup import Looked, Lookup
from flexkv.cache.promise.room_line import RoomLine
from flexkv.cache.promise.waits import FetchWaits
from flexkv.cache.tiers.tables import CacheTables
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds, TransferGraph

PREFETCH_SLOTS = 0.25
"""Share of the host slots that are kept for prefetched requests at most: the others are for requests that run."""

PREFETCH_BUDGET = 0.5
"""Share of what may be fetched from a tier at once that prefetches fill at most: the rest is for lookups."""


class Promises:
    """Leases and waits by request, of one manager.

    Args:
        tables, counts: of the manager.

    Attributes:
        disabled: nothing is promised any more, nor prefetched.
        resetting: the same until a reset has ended.
    """

    def __init__(
        self,
        tables: CacheTables,
        waits: FetchWaits,
        access_orders: AccessOrders,
        lookup: Lookup,
        promotions: Promotions,
        line: RoomLine,
        failed_loads: FailedLoads,
        limits: ManagerLimits,
        counts: ManagerStats,
        log: OpLog,
    ) -> None:
        self._tiers = tables.tiers
        self._hub = tables.hub
        self._ops = tables.ops
        self._requests = tables.requests
        self._waits = waits
        self._access_orders = access_orders
        self._lookup = lookup
        self._promotions = promotions
        self._line = line
        self._failed_loads = failed_loads
        self._limits = limits
        self._counts = counts
        self._log = log
        self._clock = tables.clock
        self._sizes = [spec.block_tokens for spec in lookup.specs]
        self._block_tokens = self._sizes[0]
        self._none_behind = (0,) * (len(tables.tiers) - 1)
        self._routes = [tier.loads for tier in tables.tiers if tier.loads is not None]
        self.disabled = False
        self.resetting = False

    @property
    def _silent(self) -> bool:
        """Whether nothing is promised to anybody."""
        return self.disabled or self.resetting

    # --- lookups ---

    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None,
    ) -> MatchResult:
        """As of `CacheManager`; the arguments are checked."""
        asked = self._lookup.asked_tokens(keys, start_tokens)
        lease, fetches, awaits_room = None, 0, False
        if tail is None and self._requests.knows(request_id):
            lease = self._lease_again(request_id, keys, start_tokens)
        if lease is None:
            looked = self._look(request_id, keys, start_tokens, tail)
            lease, fetches, awaits_room = looked.lease, looked.fetches, bool(looked.awaited)
        if lease.pages:
            self._requests.add_lease(request_id, lease)
        self._note_use(request_id, keys, lease)
        size = self._block_tokens
        self._counts.add_lookup(asked // size, lease.tokens // size, lease.tail_tokens > 0, lease.cut)
        if fetches:
            self._requests.begins_to_wait(request_id, (start_tokens + lease.tokens) // size)
        lease.by_tier = self._by_tier(request_id, lease)
        result = self._answer(request_id, lease, fetches, awaits_room)
        self._log.looked_up(result, asked)
        return result

    def _lease_again(self, request_id: str, keys: Sequence[Keys], start_tokens: int) -> Lease | None:
        """One lease in place of all that is leased and held for a request already, where that is all that it asks for;
        None, and nothing has changed, where a lookup has to find out.

        The pages are pinned already, so what is compared is whether they are still those of the keys: a page whose
        fetch failed, or that was cached before a reset, is not.
        """
        requests, former = self._requests, self._requests.lease(request_id)
        held = requests.held_by(request_id)
        if held is None or (former is None and not held) or not self._lookup.same_blocks:
            return None
        if self._silent or self._failed_loads.of(request_id) is not None:
            return None
        if former is None and self._failed_loads.rests:
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
            if not self._hub.holds(group, wanted[:in_host], share.entries):
                return None
            if share.straight is not None and not self._keeps(group, wanted[in_host:], share.straight):
                return None
        requests.pop_lease(request_id)
        requests.take_held(request_id)
        return Lease(groups, self._clock(), start_tokens, blocks * self._block_tokens)

    def _keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        """Whether pages that are promised where they lie may still be loaded from there."""
        route = self._tiers[pages.tier].straight
        return route is not None and route.keeps(group, keys, pages)

    def _look(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None,
    ) -> Looked:
        """A lookup in all tiers, as far as the request may be promised what it finds."""
        promised = self.end_lease(request_id)
        failed = self._failed_loads.of(request_id)
        end = None
        if self._silent or (failed is None and self._failed_loads.rests and not promised):
            end = start_tokens
        elif failed is not None:
            end, tail = failed.end_of_promise(start_tokens), None
        if end is not None:
            keys, tail = self._lookup.cut(keys, end), None
        straight = failed is None or not failed.straight
        if request_id in self._requests.prefetched:
            self._waits.end_prefetch(request_id)
        # Taken before the lookup, which may hold other pages; unpinned after it, so that what it finds is still there.
        held = self._requests.take_held(request_id) if self._requests.waits else ()
        looked = self._lookup.look(request_id, keys, start_tokens, tail, self.room_for_loads(), straight)
        if looked.awaited:
            self._give_up(request_id, looked, held)
            return looked
        self._line.leave(request_id)
        for pages in held:
            self._hub.index.unpin(pages.entries)
        return looked

    def _give_up(self, request_id: str, looked: Looked, held: Sequence[HeldPages]) -> None:
        """Nothing is kept for a request that waits for room: two that each kept a part would wait for each other."""
        lease = looked.lease
        self._end_shares(lease)
        for pages in held:
            self._hub.index.unpin(pages.entries)
        self._line.note_released(request_id, lease.groups, looked.awaited)
        looked.lease = self._lookup.lease_of_nothing(lease.start_tokens)

    def _note_use(self, request_id: str, keys: Sequence[Keys], lease: Lease) -> None:
        """What the engine has itself, and what it was promised, counts as used together."""
        find = self._hub.index.find
        before = (
            [find(g, k) for g, k in enumerate(self._lookup.had(keys, lease))] if lease.start_tokens else ()
        )
        self._access_orders.put_lookup(request_id, before, lease.groups if lease.tokens else ())

    def _by_tier(self, request_id: str, lease: Lease) -> tuple[int, ...]:
        """Of a lease's tokens, how many each tier has supplied."""
        if not lease.tokens:
            return ()
        group = lease.groups[0]
        in_host = group.straight is None and group.fetches is None
        # A hit that ends with a chunk may need no page at all.
        if not lease.pages or (in_host and request_id not in self._requests.waits):
            return (lease.tokens, *self._none_behind)
        counts = [0] * len(self._tiers)
        if not self._lookup.same_blocks:
            # Pages of other groups hold other tokens: by the share of all pages.
            for tier, pages in self._requests.fetched_pages(request_id, lease.pages).items():
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
        for tier, pages in self._requests.fetched_for(request_id, start, host_end).items():
            counts[tier] += pages
        counts[HUB] = blocks - sum(counts)
        return tuple(count * self._block_tokens for count in counts)

    def _has_room(self, former: Lease | None, groups: Sequence[GroupLease]) -> bool:
        """Whether so much may be promised to a request instead of its former lease."""
        more = sum(group.pages for group in groups) - (0 if former is None else former.pages)
        return more <= self.room_for_loads()

    def room_for_loads(self) -> int:
        """Pages that may be promised besides those that are promised or being loaded."""
        taken = self._requests.reserved_pages + self._ops.pages(OpRole.LOAD)
        return self._limits.inflight_load_pages - taken

    def _answer(self, request_id: str, lease: Lease, fetches: int, awaits_room: bool) -> MatchResult:
        matches = tuple(
            GroupMatch(
                blocks=lease.tokens // block_tokens,
                slots=group.slots[: group.blocks],
                tail_tokens=lease.tail_tokens,
                tail_slot=int(group.slots[-1]) if lease.tail_tokens else -1,
                first_block=group.first_block,
            )
            for group, block_tokens in zip(lease.groups, self._sizes, strict=True)
        )
        return MatchResult(
            request_id,
            lease.start_tokens,
            matches,
            lease.tokens,
            lease.tail_tokens,
            fetches,
            lease.by_tier,
            lease.shared_tokens,
            awaits_room,
        )

    # --- loads ---

    def lease_to_load(self, request_id: str, blocks: Sequence[BlockIds]) -> Lease | None:
        """The request's lease; None where there is none, nor a block to load to.

        Raises:
            ContractError: blocks are to be loaded without a lease.
        """
        lease = self._requests.lease(request_id)
        if lease is None and any(len(b) for b in blocks):
            raise ContractError(
                f"begin_load: request {request_id!r} has no lease (released, expired or reset?)"
            )
        return lease

    def load(
        self, request_id: str, lease: Lease, targets: Sequence[BlockIds], epoch: int
    ) -> TransferGraph | None:
        """Turns the request's promise into a load to `targets`, as of `load_targets`; None when nothing is loaded."""
        taken = max(len(blocks) * tokens for blocks, tokens in zip(targets, self._sizes, strict=True))
        for tier, tokens in zip(self._tiers, _of_first(lease.by_tier, taken), strict=False):
            tier.counts.hits += tokens // self._block_tokens
        self._requests.pop_lease(request_id)
        self._waits.end(request_id)
        self._line.forget(request_id)
        ops = [op for route in self._routes for op in route.begin(request_id, lease, targets, epoch)]
        begun = [op for op in self._ops.of_request(request_id, OpRole.LOAD) if op.load is None]
        for op in begun:
            op.load = begun[0].op_id
        self._log.load_begun(begun)
        return TransferGraph(tuple(ops)) if ops else None

    # --- prefetches ---

    def prefetch(self, request_id: str, keys: Sequence[Keys], start_tokens: int) -> int:
        """As of `CacheManager`; the arguments are checked."""
        requests = self._requests
        if self._silent or self._failed_loads.rests:
            return 0
        if self._failed_loads.of(request_id) is not None:
            return 0
        if requests.lease(request_id) is not None or request_id in requests.waits:
            return 0
        if len(requests.prefetched) >= self._limits.prefetch_requests or len(self._line):
            return 0
        pages = self._room_for_prefetch(len(keys))
        return self._lookup.prefetch(request_id, keys, start_tokens, self.room_for_loads(), pages)

    def resume_prefetch(self, request_id: str, keys: Sequence[Keys], start_tokens: int) -> None:
        """A tier has said what it has of a request: what of it is there is fetched, if no lookup has asked yet."""
        if request_id not in self._requests.prefetched or self._silent or self._failed_loads.rests:
            return
        if len(self._line):
            return
        pages = self._room_for_prefetch(len(keys))
        self._lookup.prefetch(request_id, keys, start_tokens, self.room_for_loads(), pages)

    def _room_for_prefetch(self, groups: int) -> int:
        """Pages that one more prefetch may bring."""
        owners = self._hub.owners
        slots = len(owners) * min(self._hub.index.up_slots(owner) for owner in owners)
        room = int(PREFETCH_SLOTS * slots) - self._requests.prefetched_pages()
        # What is read for requests that have gone takes as many slots until it has come.
        room -= self._ops.unawaited_prefetches()
        for tier in self._lookup.behind:
            facts = self._tiers[tier].facts
            if self._ops.count(OpRole.FETCH, tier) >= PREFETCH_BUDGET * facts.fetch_ops:
                return 0
            fetched = self._ops.pages(OpRole.FETCH, tier)
            room = min(room, int(PREFETCH_BUDGET * facts.fetch_pages) - fetched)
        return max(0, room)

    def held_slots(self, group: int) -> set[int]:
        """Host slots that are kept for requests which wait, besides those that are being filled."""
        held = [pages for pages in self._requests.held() if pages.group == group]
        slots = {slot for pages in held for slot in pages.slots.tolist()}
        fetches = [op for op in self._ops if isinstance(op, FetchOp) and op.group == group]
        return slots - {slot for op in fetches for slot in op.plan.slots.tolist()}

    # --- ends ---

    def end_lease(self, request_id: str) -> bool:
        """What was promised to the request is promised no more; whether anything was."""
        lease = self._requests.pop_lease(request_id)
        if lease is None:
            return False
        self._end_shares(lease)
        return True

    def _end_shares(self, lease: Lease) -> None:
        """Ends the leases of all pages of a promise."""
        for route in self._routes:
            for group in lease.groups:
                route.release(group)

    def release(self, request_id: str) -> None:
        """As of `CacheManager`."""
        self.end_lease(request_id)
        self._waits.end(request_id)
        self._line.leave(request_id)
        if not self._limits.asks_again:
            self._line.forget(request_id)
        for order in self._access_orders.pop(request_id):
            # Here and not with each lookup or load, so that a request hits a block once.
            self._hub.index.touch(order.entries(), order.found)

    def abandon_loads(self, request_id: str) -> None:
        """As of `CacheManager`."""
        for op in self._ops.of_request(request_id, OpRole.LOAD):
            op.abandoned = True

    def end_request(self, request_id: str) -> None:
        """As of `CacheManager`."""
        self.release(request_id)
        self._line.forget(request_id)
        self._failed_loads.end(request_id)
        self.abandon_loads(request_id)

    def expire(self) -> int:
        """Ends leases and waits that nobody follows up; returns how many leases those are."""
        now_s = self._clock()
        expired = self._requests.leased_before(now_s - self._limits.lease_s)
        for request_id in expired:
            self.release(request_id)
        self._counts.expired_leases += len(expired)
        longest_s = max((tier.facts.wait_s for tier in self._tiers[1:]), default=0.0)
        for request_id in self._requests.waiting_before(now_s - longest_s):
            self._waits.end(request_id)
        return len(expired)

    def end_all(self) -> None:
        """Nothing is promised or waited for any more."""
        for request_id in self._requests.leased():
            self.end_lease(request_id)
        for request_id in list(self._requests.waits):
            self._waits.end(request_id)
        self._line.clear()


def _of_first(by_tier: tuple[int, ...], tokens: int) -> list[int]:
    """Of a lease's first `tokens`, how many each tier has supplied: those of host memory come first."""
    taken = []
    for supplied in by_tier:
        taken.append(min(supplied, tokens))
        tokens -= taken[-1]
    return taken
