"""The cache manager of one ownership unit. It leases the pages of an ordered list of tiers, and plans ops on them.

The manager implements `flexkv.cache.base.CacheManager`. Its tiers implement the contract in
`flexkv.cache.tiers.contract`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import (
    HUB,
    MOST_BLOCKS,
    NO_ENTRY,
    CacheListener,
    CacheManager,
    Completion,
    GroupSpec,
    ManagerLimits,
    MatchResult,
    OpRole,
    StorePlan,
    TailCandidates,
    TierId,
)
from flexkv.cache.checks import (
    as_block_ids,
    check_alignment,
    check_groups,
    check_limits,
    check_lookup,
    load_targets,
)
from flexkv.cache.keys import named_mark
from flexkv.cache.ledger.cost import CostModel
from flexkv.cache.ledger.hub import REFILL_PAGES, Hub
from flexkv.cache.ledger.leases import HeldPages
from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.cache.moves.broken_plan import BrokenPlans
from flexkv.cache.moves.dispatch import TierWork
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.moves.op_log import OpLog
from flexkv.cache.moves.page_walk import PageWalk
from flexkv.cache.promise.fetch_choice import FetchChoice
from flexkv.cache.promise.promises import Promises
from flexkv.cache.tiers.contract import Tier
from flexkv.cache.tiers.routes import StoreOffer, StoreRoute
from flexkv.cache.tiers.tables import TierContext, TierFactory, new_tables
from flexkv.errors import BlockRangeError, ContractError
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import unix_now_s
from flexkv.transfer.graph import NEVER, BlockIds, OpResult, TransferGraph

RESET_S = 30.0
"""Maximum time in seconds for which a reset waits until no tier can serve an older page, even after a crash."""


class LocalCacheManager(CacheManager):
    """Implements the manager in one process. It is deterministic: its only inputs are the calls and the clocks.

    Args:
        groups: the unit's KV groups, each with its own rule and block size.
        alignment_tokens: the number of tokens of every hit is a multiple of this number; None for the least common
            multiple of the block sizes.
        tiers: factories of the tiers, in the order in which a lookup asks them; the first factory makes host memory.
            Ops of the other tiers are not in the graphs for the workers: `work.poll` returns them.
        policy: the eviction policy of every tier; one of `c_ext.eviction_policies()`.
        clock: returns seconds and never runs backwards; used for leases, waits and the speed of tiers.
        listener: notified of pages that become visible or are removed; None for no listener.
        compute_if_faster: whether pages are not fetched if the engine computes them sooner than a tier delivers them.
        unix_s: returns the wall-clock time in Unix seconds, for times to live.

    Attributes:
        tables: the records that all parts of the manager share.
        promises: the promises and waits of requests.
        choice: decides which pages are fetched and which the engine computes.
        work: hands the ops between host memory and the other tiers to the code that runs them.

    Raises:
        ConfigError: a group or limit is out of range; the message names it.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        limits: ManagerLimits = ManagerLimits(),  # noqa: B008 - frozen
        *,
        tiers: Sequence[TierFactory],
        alignment_tokens: int | None = None,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        listener: CacheListener | None = None,
        compute_if_faster: bool = True,
        unix_s: Callable[[], float] = unix_now_s,
    ) -> None:
        check_groups(groups)
        check_limits(limits)
        alignment = check_alignment(groups, alignment_tokens)
        self._limits = limits
        tables = self.tables = new_tables(groups, policy, clock, unix_s)
        tables.hub.listeners += [] if listener is None else [listener]
        for number, make in enumerate(tiers):
            tier = make(TierContext(TierId(number), policy, tables))
            tier.facts.check()
            tables.tiers.append(tier)
        tables.hub.tracks_tokens = len(tables.tiers) > 1
        self._followers = [tier.follower for tier in tables.tiers if tier.follower is not None]
        self._log = OpLog(tables)
        self._broken_plans = BrokenPlans(tables, limits.ranks)
        promotions = Promotions(tables, PageWalk(tables))
        self.work = TierWork(tables, promotions, self._log, self._broken_plans)
        self.choice = FetchChoice(tables, promotions, compute_if_faster)
        self.promises = Promises(tables, promotions, self.choice, self._log, limits, alignment)
        self._resetting: list[Tier] = []
        """Tiers that have not finished the last reset yet."""
        self._reset_ends_s = 0.0
        tables.reactions.evicted = self.work.evicted
        tables.reactions.forgotten = self.work.forgotten
        tables.reactions.reused = self.work.reused
        tables.reactions.undone = self.work.recount
        tables.reactions.answered = self.promises.resume_prefetch

    # --- state ---

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers by number; the first is host memory."""
        return self.tables.tiers

    @property
    def hub(self) -> Hub:
        """The pages in host memory."""
        return self.tables.hub

    @property
    def cost(self) -> CostModel:
        """The measured times of the tiers and of the engine's steps."""
        return self.tables.cost

    @property
    def counts(self) -> ManagerStats:
        """The running totals. This is the live record, not a copy."""
        return self.tables.counts

    @property
    def epoch(self) -> int:
        """Number of resets that have begun."""
        return self.tables.epoch

    def stats(self) -> ManagerStats:
        """A copy of the running totals."""
        return self.tables.counts.copy()

    def cached_blocks(self) -> int:
        """Number of blocks of all groups that are visible in host memory or being stored or fetched to it."""
        return len(self.tables.hub.index)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys are visible in some tier, bool [keys]. Drops expired pages, but neither leases nor
        fetches pages."""
        if self.tables.hub.times.any:
            self._drop_expired()
        there = np.zeros(len(keys), np.bool_)
        for tier in self.tables.tiers:
            if not tier.held:
                there |= tier.present(group, keys)
        return there

    def free_slots(self, group: int) -> int:
        return self.tables.hub.index.free_slots(group)

    def leased_pages(self, request_id: str) -> int:
        lease = self.tables.requests.lease(request_id)
        return 0 if lease is None else lease.pages

    def held_pages(self, request_id: str) -> int:
        """Number of pages that are held for the request until its next lookup: pages that are in host memory or are
        being fetched to it."""
        return self.tables.requests.held_pages(request_id)

    def fetches(self, request_id: str) -> int:
        """Number of fetches and of questions to tiers that are in flight for the request."""
        return self.tables.requests.awaited(request_id)

    def held_slots(self, group: int) -> set[int]:
        """Host slots held for waiting requests, except those that a fetch is still filling."""
        return self.promises.held_slots(group)

    # --- pages that plugins keep ---

    @property
    def kept_pages(self) -> int:
        """Number of pages in host memory that `keep` has pinned."""
        return sum(len(pages.entries) for kept in self.tables.requests.kept.values() for pages in kept)

    def keep(self, name: str, keys: Sequence[Keys], most: int) -> int:
        """Pins up to `most` of a prompt's pages in host memory, from its first page on, until `end_keep` or a reset.
        Pages still expire at the end of their time to live. Returns the number of pinned pages.

        Precondition: no pages are kept under this name.
        """
        check_lookup(self.tables.specs, keys, 0, None)
        index, kept, pages = self.tables.hub.index, self.tables.requests.kept, 0
        with self._broken_plans:
            if self.tables.hub.times.any:
                self._drop_expired()
            for group, of_group in enumerate(keys):
                entries = index.find(group, of_group)
                entries = entries[entries != NO_ENTRY][: most - pages]
                if len(entries):
                    kept.setdefault(name, []).append(HeldPages(group, entries, index.pin(entries)))
                    pages += len(entries)
        return pages

    def end_keep(self, name: str) -> None:
        """Releases the pages kept under this name. Idempotent."""
        for pages in self.tables.requests.kept.pop(name, ()):
            self.tables.hub.index.unpin(pages.entries)

    # --- lookups ------------------------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> MatchResult:
        check_lookup(self.tables.specs, keys, start_tokens, tail)
        self._take_news(keys, tail)
        with self._broken_plans:
            if self.tables.hub.times.any:
                self._drop_expired()
            return self.promises.match(request_id, keys, start_tokens, tail, settings)

    def prefetch(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int = 0,
        settings: RequestSettings = NO_SETTINGS,
    ) -> int:
        check_lookup(self.tables.specs, keys, start_tokens, None)
        self._take_news(keys)
        with self._broken_plans:
            if self.tables.hub.times.any:
                self._drop_expired()
            return self.promises.prefetch(request_id, keys, start_tokens, settings)

    def _take_news(self, keys: Sequence[Keys], tail: Sequence[TailCandidates | None] | None = None) -> None:
        """Brings the tiers that follow other units up to date on the pages with these keys."""
        for follower in self._followers:
            for group, of_group in enumerate(keys):
                follower.take_news(group, of_group)
            for group, candidates in enumerate(tail or ()):
                if candidates is not None:
                    follower.take_news(group, candidates.keys)

    def waits(self, request_id: str) -> bool:
        requests = self.tables.requests
        if self.promises.disabled or request_id not in requests.waits:
            return False
        return requests.is_waiting(request_id, self.tables.clock())

    def still_waits(self, request_id: str) -> bool:
        return self.promises.line.still_waits(request_id, self.waits(request_id))

    def release(self, request_id: str) -> None:
        with self._broken_plans:
            self.promises.release(request_id)

    def end_request(self, request_id: str) -> None:
        with self._broken_plans:
            self.promises.end_request(request_id)

    def abandon_loads(self, request_id: str) -> None:
        self.promises.abandon_loads(request_id)

    def expire(self) -> int:
        with self._broken_plans:
            if self.tables.hub.times.any:
                self._drop_expired()
            expired = self.promises.expire()
            self._log.flush()
            for group in self.tables.hub.owners:
                self.tables.hub.refill_reserve(group, REFILL_PAGES)
        return expired

    # --- loads and stores ---------------------------------------------------------------------------------------------

    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        lease = self.promises.lease_to_load(request_id, blocks)
        if lease is None:
            return None
        targets = load_targets(self.tables.specs, request_id, lease, blocks, tail)
        with self._broken_plans:
            return self.promises.load(request_id, lease, targets)

    def begin_store(
        self,
        request_id: str,
        group: int,
        keys: Keys,
        blocks: BlockIds,
        first_block: int,
        tokens: int | None = None,
        spare: bool = False,
        ttl_s: int | None = None,
    ) -> StorePlan:
        self._check_group(group)
        sources = as_block_ids(blocks, f"begin_store of request {request_id!r}")
        if len(sources) != len(keys):
            raise ContractError(f"begin_store: {len(keys)} keys and {len(sources)} blocks")
        if not 0 <= first_block <= MOST_BLOCKS - len(keys):
            raise BlockRangeError(
                f"begin_store: blocks {first_block} to {first_block + len(keys)}; allowed is [0, {MOST_BLOCKS})"
            )
        room = max(0, self._limits.inflight_store_pages - self.tables.ops.pages(OpRole.STORE))
        whole = self.tables.specs[group].block_tokens
        valid = whole if tokens is None else tokens
        if not 1 <= valid <= whole:
            raise ContractError(
                f"begin_store of request {request_id!r}: tokens={valid}; allowed are 1 to {whole}, a block's"
            )
        if self.promises.disabled:
            return StorePlan(None, np.empty(0, np.int32), 0, 0)
        with self._broken_plans:
            if self.tables.hub.times.any:
                self._drop_expired()
            expiry = NEVER if ttl_s is None else self.tables.now_s + ttl_s
            offer = StoreOffer(request_id, group, keys, sources, first_block, valid, spare, expiry)
            route, once = self._store_route(), self.work.once
            plan = route.begin_store(offer, room) if once is None else once.begin_store(offer, room, route)
            self.tables.counts.busy_pages += plan.dropped
            return plan

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        if self.tables.hub.times.any:
            self._drop_expired()
        found = np.zeros(len(keys), np.bool_)
        # Tiers that follow running peers do not count: their pages may be gone when this engine needs them.
        for tier in (tier for tier in self.tables.tiers if tier.in_use and tier.follower is None):
            found |= tier.presence.find(group, keys, ready_only=False) != NO_ENTRY
        if self.work.once is not None:
            found |= self.work.once.kept(group, keys)
        return found

    def _store_route(self) -> StoreRoute:
        """The route that stores take now: the store route of the last tier that is in use and has one."""
        routes = [tier.stores for tier in self.tables.tiers if tier.stores is not None and tier.in_use]
        return routes[-1]

    # --- completions --------------------------------------------------------------------------------------------------

    def complete(self, rank: int, result: OpResult) -> Completion | None:
        if not 0 <= rank < self._limits.ranks:
            raise ContractError(f"rank {rank} reported; allowed are 0 to {self._limits.ranks - 1}")
        op = self.tables.ops.get(result.op_id)
        if not isinstance(op, RankOp):
            raise ContractError(f"rank {rank} reported op {op.op_id}, which is a tier's own")
        if rank in op.reported:
            raise ContractError(f"op {op.op_id}: rank {rank} reported twice")
        with self._broken_plans.ending(op, rank):
            return self._complete(op, rank, result)

    def _complete(self, op: RankOp, rank: int, result: OpResult) -> Completion | None:
        op.report(rank, result)
        if op.role is OpRole.LOAD:
            if op.source_failed:
                self.tables.loads_of(op.tier).source_failed(f"rank {rank}: {result.reason}")
            if op.failed.any():
                first = int(op.block_numbers[op.failed].min())
                self.discard_from(op.request_id, first * self.tables.specs[op.group].block_tokens)
                if op.epoch == self.tables.epoch:
                    self.promises.load_tries.note_failure(op, self.tables.specs[op.group].block_tokens)
        if len(op.reported) < self._limits.ranks:
            return None
        self.tables.ops.remove(op)
        self._log.ended(op, expected=op.abandoned or op.epoch != self.tables.epoch)
        done = self._end_load(op) if op.role is OpRole.LOAD else self._end_store(op)
        self.tables.hub.refill_reserve(op.group, max(op.pages, REFILL_PAGES))
        return done

    def _end_load(self, op: RankOp) -> Completion:
        current = op.epoch == self.tables.epoch
        once = self.work.once
        copied = None
        if once is not None and once.has_copies and current:
            copied = self.tables.tiers[op.tier].presence.keys_of(op.entries)
        self.tables.loads_of(op.tier).end_load(op, current)
        if once is not None and copied is not None:
            once.end_load(op.group, copied)
        self._mark_used(op)
        if not current:
            op.failed[:] = True
            op.reasons.append("the cache was reset while the load was in flight")
        failed_pages = int(np.count_nonzero(op.failed))
        self.tables.counts.failed_load_pages += failed_pages
        self.tables.counts.loaded_pages += op.pages - failed_pages
        return op.completion(op.failed, np.empty(0, np.int32))

    def _end_store(self, op: RankOp) -> Completion:
        good = ~op.failed & ~op.revoked
        if op.epoch != self.tables.epoch or any(load in self.tables.ops for load in op.waits_for):
            good[:] = False
        once = self.work.once if op.tier == HUB else None
        if once is not None:
            once.end_store(op)
        published = self.tables.stores_of(op.tier).end_store(op, good)
        if once is not None and published.any():
            once.stored(op.group, self.tables.hub.index.keys_of(op.entries[published]))
        if op.tier == HUB and published.any() and self.work.takes_pages:
            self.work.offer(op.group, self.tables.hub.index.keys_of(op.entries[published]))
        self._mark_used(op)
        positions = np.flatnonzero(published).astype(np.int32)
        self.tables.counts.add_store(op.pages, int(np.count_nonzero(op.failed)), len(positions))
        return op.completion(~published, positions)

    def _mark_used(self, op: RankOp) -> None:
        order = self.tables.access_orders.peek(op.request_id, op.group)
        if order is not None and order.mark_doubled():
            self.tables.hub.index.touch(order.entries())

    def discard_from(self, request_id: str, first_token: int) -> int:
        stores = self.tables.ops.of_request(request_id, OpRole.STORE)
        revoked = 0
        try:
            for op in stores:
                first_block = first_token // self.tables.specs[op.group].block_tokens
                pages = (op.block_numbers >= first_block) & ~op.revoked
                count = int(np.count_nonzero(pages))
                if not count:
                    continue
                op.revoked |= pages
                revoked += count
                self.tables.stores_of(op.tier).bar(op, pages)
        except BaseException:
            # After an error, revoke all pages of these stores: losing good pages is better than publishing a page that
            # was computed from a failed load.
            for op in stores:
                op.revoked[:] = True
            raise
        return revoked

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, group: int, keys: Keys) -> int:
        self._check_group(group)
        known = np.zeros(len(keys), np.bool_)
        removed = 0
        for tier in self.tables.tiers:
            there = tier.presence.find(group, keys, ready_only=False) != NO_ENTRY
            tier.forget(group, keys[known])
            # A block in several tiers is counted once, for the first of these tiers.
            removed += tier.forget(group, keys[~known])
            known |= there
        self.tables.counts.forgotten_blocks += removed
        return removed

    def erase_namespace(self, name: str) -> int:
        mark, removed = named_mark(name), 0
        for group in range(len(self.tables.specs)):
            marked = [
                tier.presence.keys_of(tier.presence.find_marked(group, mark)) for tier in self.tables.tiers
            ]
            removed += self.forget(group, np.unique(np.concatenate(marked), axis=0))
        for listener in self.tables.hub.listeners:
            listener.on_erase(name)
        return removed

    def reset(self) -> int:
        epoch = self.begin_reset()
        self._finish_reset(self._reset_ends_s)
        return epoch

    def begin_reset(self) -> int:
        """Begins a reset without waiting: older pages are misses at once, and pages stored from now on may be promised.
        After a crash, older pages may be found again until `poll_reset` has finished the reset.

        Returns:
            The new epoch.
        """
        # If this method is interrupted, `resetting` stays True, because old pages may still be visible. Nothing is then
        # promised until another reset has begun.
        self.promises.resetting = True
        with self._broken_plans:
            self.promises.end_all()
            for name in list(self.tables.requests.kept):
                self.end_keep(name)
            self.tables.access_orders.clear()
            self.work.reset()
            self.tables.epoch += 1
            # If a tier has not finished the previous reset, the deadline of that reset stays: a new reset must not
            # extend it.
            if not any(tier.resets for tier in self._resetting):
                self._reset_ends_s = time.monotonic() + RESET_S
            for tier in self.tables.tiers:
                tier.begin_reset()
            self._resetting = list(self.tables.tiers)
        self.promises.resetting = False
        self.tables.counts.resets += 1
        for listener in self.tables.hub.listeners:
            listener.on_reset(self.tables.epoch)
        return self.tables.epoch

    @property
    def resets(self) -> bool:
        """Whether a reset has begun and needs further calls of `poll_reset`."""
        return bool(self._resetting)

    def poll_reset(self) -> None:
        """Continues a reset that has begun. Never waits. `RESET_S` seconds after the reset began, the parts of tiers
        that have not finished it are taken out of use."""
        if time.monotonic() < self._reset_ends_s and any(tier.resets for tier in self._resetting):
            return
        self._finish_reset(0.0)

    def _finish_reset(self, ends_s: float) -> None:
        while self._resetting:
            self._resetting[0].finish_reset(ends_s)
            self._resetting.pop(0)  # after `finish_reset`: if that raises, the next call tries the tier again

    def disable(self) -> None:
        self.promises.disabled = True

    def grow(self, group: int, slots: int) -> None:
        self._check_group(group)
        if slots < 0:
            raise BlockRangeError(f"grow of group {group} to {slots} slots; allowed are 0 and more")
        self.tables.hub.grow(group, slots)

    def inflight_ops(self) -> int:
        return self.tables.ops.of_ranks

    def _drop_expired(self) -> None:
        """Drops expired pages from host memory, so that the caller's lookup does not find them."""
        self.tables.hub.drop_expired(self.tables.now_s)

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self.tables.specs):
            raise BlockRangeError(f"group {group}; allowed are 0 to {len(self.tables.specs) - 1}")

    def flush_log(self) -> None:
        """Logs how many failures had no log line of their own. Called when the manager ends."""
        self._log.flush(at_end=True)

    def check_integrity(self) -> None:
        self.tables.ops.check_integrity()
        self.tables.requests.check_integrity()
        if (room := self.promises.room_for_loads()) < 0:
            raise ContractError(f"{-room} more load pages are promised than allowed")
        for request_id in self.promises.line:
            if self.leased_pages(request_id) or self.held_pages(request_id):
                raise ContractError(f"request {request_id!r} waits for room and holds some")
        for tier, entries in zip(self.tables.tiers, self._broken_plans.leased(), strict=True):
            tier.check_integrity(entries)
