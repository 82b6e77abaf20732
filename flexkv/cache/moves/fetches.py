"""How pages of other tiers are fetched to host memory: plans the fetches and records their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import HUB, NO_ENTRIES, NO_ENTRY, EntryIds, OpRole, TierId
from flexkv.cache.ledger.leases import Lease
from flexkv.cache.ledger.ops import FetchOp, good_pages
from flexkv.cache.moves.page_walk import PageRun, PageWalk, leading
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import (
    NO_PLACES,
    NO_READS,
    FailureCause,
    OpId,
    OpResult,
    OpStatus,
    ReadIds,
    SlotIds,
)

SUSPECT_CAUSES = (FailureCause.UNKNOWN, FailureCause.CONTENT, FailureCause.SOURCE)
"""Failure causes after which a tier forgets a page that a fetch did not bring."""


@dataclass(slots=True)
class WantedPages:
    """Pages of one group that a request needs in host memory.

    Attributes:
        keys: keys of the pages, shape [pages, KEY_BYTES].
        runs: where the pages are; each run is leased. May cover only the leading pages.
    """

    group: int
    keys: Keys
    runs: list[PageRun]


@dataclass(frozen=True, slots=True)
class FetchedPages:
    """Pages of one group in host memory or in flight to it, each pinned once for the request that needs them.

    Attributes:
        entries: the pages' entries in the index of host memory, uint32 [pages].
        slots: the pages' host slots, int32 [pages].
        fetches: op number of the fetch that brings each page, 0 for a page that is in host memory, int64 [pages].
    """

    entries: EntryIds
    slots: SlotIds
    fetches: ReadIds

    def first(self, pages: int) -> FetchedPages:
        return FetchedPages(self.entries[:pages], self.slots[:pages], self.fetches[:pages])


NOTHING_FETCHED = FetchedPages(NO_ENTRIES, NO_PLACES, NO_READS)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of planning fetches.

    Attributes:
        pages: for each `WantedPages`, the leading pages that are in host memory or in flight to it.
        ops: by op number, the tier of each fetch in flight that brings some of these pages.
    """

    pages: list[FetchedPages]
    ops: dict[OpId, TierId]


def wanted_pages(rest: Sequence[list[PageRun]], keys: Sequence[Keys], first: int) -> list[WantedPages]:
    """Returns the wanted pages of each group. `rest` has the runs of each group, which begin with block `first` of the
    request; `keys` has the keys of each group from block 0 on."""
    return [
        WantedPages(group, keys[group][first : first + sum(map(len, runs))], runs)
        for group, runs in enumerate(rest)
    ]


def extend_lease(lease: Lease, pages: Sequence[FetchedPages], block_tokens: int) -> None:
    """Extends a lease by the blocks that follow it and are in host memory or in flight to it. Precondition: the lease
    has no tail.
    """
    more = len(pages[0].entries)
    if not more:
        return
    for group, fetched in zip(lease.groups, pages, strict=True):
        there = np.zeros(len(group.entries), np.int64)
        group.entries = np.concatenate((group.entries, fetched.entries))
        group.slots = np.concatenate((group.slots, fetched.slots))
        group.fetches = np.concatenate((there, fetched.fetches))
        group.blocks += more
    lease.tokens += more * block_tokens


@dataclass(slots=True)
class FetchPlan:
    """Collects the pages that one op will fetch from a tier: their keys, and their entries and slots in that tier
    (`entries`, `places`) and in host memory (`host`, `slots`)."""

    op_id: OpId
    keys: list[Keys] = field(default_factory=list)
    entries: list[EntryIds] = field(default_factory=list)
    places: list[SlotIds] = field(default_factory=list)
    host: list[EntryIds] = field(default_factory=list)
    slots: list[SlotIds] = field(default_factory=list)
    pages: int = 0

    def add(self, keys: Keys, run: PageRun, host: EntryIds, slots: SlotIds) -> None:
        self.keys.append(keys)
        self.entries.append(run.entries)
        self.places.append(run.slots)
        self.host.append(host)
        self.slots.append(slots)
        self.pages += len(run)


class Promotions:
    """Plans fetches and records their results.

    While a fetch is in flight, its entries in the index of host memory are pending (not visible yet) and pinned, so
    that no other page gets their slots. Its entries in the tier's index are pinned, so that the tier's slots are not
    rewritten. Verified pages become visible in host memory. If a page fails with one of SUSPECT_CAUSES, its tier
    forgets the page.

    Attributes:
        walk: finds and leases pages that do not form a prefix.
    """

    def __init__(self, tables: CacheTables, walk: PageWalk) -> None:
        self._tables = tables
        self.walk = walk

    def room(self, tier: TierId) -> int:
        """Returns how many more pages may be fetched from a tier now, besides those in flight."""
        facts = self._tables.tiers[tier].facts
        if self._tables.ops.count(OpRole.FETCH, tier) >= facts.fetch_ops:
            return 0
        return max(0, facts.fetch_pages - self._tables.ops.pages(OpRole.FETCH, tier))

    def has_room(self, tier: TierId, pages: int, fetches: int) -> bool:
        """Whether `pages` more pages may be fetched from a tier now, in `fetches` more ops."""
        facts = self._tables.tiers[tier].facts
        if self._tables.ops.count(OpRole.FETCH, tier) + fetches > facts.fetch_ops:
            return False
        return self._tables.ops.pages(OpRole.FETCH, tier) + pages <= facts.fetch_pages

    def fetch(self, wanted: Sequence[WantedPages], layerwise: bool, aligned: bool = True) -> Fetched:
        """Plans fetches of the wanted pages that are neither in host memory nor in flight to it, as many as free slots
        and the tiers' limits allow.

        Takes over the leases of `wanted`. Pages in the result and in the planned fetches stay leased. The leases of all
        other pages end.

        Args:
            layerwise: whether to fetch ranges of layers one after the other, from tiers that can do so.
            aligned: whether `wanted` has the same blocks of every group. The result is then cut to the group with the
                fewest pages.
        """
        ops: dict[OpId, TierId] = {}
        pages = [self._fetch_part(part, layerwise, ops) for part in wanted]
        if aligned:
            blocks = min(len(fetched.entries) for fetched in pages)
            for fetched in pages:
                self._tables.hub.index.unpin(fetched.entries[blocks:])
            pages = [fetched.first(blocks) for fetched in pages]
        return Fetched(pages, ops)

    def tiers_of(self, fetches: ReadIds) -> set[TierId]:
        """Returns the tiers of the ops among `fetches` that are still in flight."""
        return set(self._in_flight(fetches).values())

    def pages_by_tier(self, fetches: ReadIds) -> dict[TierId, int]:
        """Returns, by tier, how many pages are still being fetched from it.

        Args:
            fetches: per page, the op number of the fetch that brings it; 0 for a page that is in host memory.
        """
        pages: dict[TierId, int] = {}
        numbers, counts = np.unique(fetches, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if (op := self._tables.ops.fetch(OpId(number))) is not None:
                pages[op.tier] = pages.get(op.tier, 0) + count
        return pages

    def _in_flight(self, fetches: ReadIds) -> dict[OpId, TierId]:
        """Returns, by op number, the tier of each op among `fetches` that is still in flight."""
        ops = (self._tables.ops.fetch(OpId(number)) for number in np.unique(fetches).tolist())
        return {op.op_id: op.tier for op in ops if op is not None}

    def _fetch_part(self, part: WantedPages, layerwise: bool, ops: dict[OpId, TierId]) -> FetchedPages:
        """Plans fetches of one group's wanted pages, and adds to `ops` all fetches that bring some of them."""
        plans: dict[TierId, FetchPlan] = {}
        brought: list[FetchedPages] = []
        runs, at, again = deque(part.runs), 0, True
        while runs:
            run = runs.popleft()
            keys = part.keys[at : at + len(run)]
            if run.tier == HUB:
                fetches = self._tables.hub.index.fillers(run.entries)
                if run.coming:
                    ops |= self._in_flight(fetches)
                brought.append(FetchedPages(run.entries, run.slots, fetches))
                at += len(run)
                continue
            plan = plans.setdefault(run.tier, FetchPlan(self._tables.ops.next_id()))
            fetched = self._give_slots(part.group, keys, run, plan, ops)
            brought.append(fetched)
            reach = len(fetched.entries)
            at += reach
            if reach == len(run):
                continue
            # The next page got no host slot, or it is being stored, so no page after it is useful. Ending the leases of
            # later pages may allow evictions, so the rest of this run is tried once more.
            self.walk.release(runs)
            runs.clear()
            if again and self.room(run.tier) > plan.pages:
                again = False
                runs.extend(self._gap(part.group, keys[reach:], run.tier))
        for tier, plan in plans.items():
            if plan.pages:
                ops[plan.op_id] = tier
                self._order(tier, part.group, plan, layerwise)
        if len(brought) == 1:
            return brought[0]
        if not brought:
            return NOTHING_FETCHED
        return FetchedPages(
            np.concatenate([fetched.entries for fetched in brought]),
            np.concatenate([fetched.slots for fetched in brought]),
            np.concatenate([fetched.fetches for fetched in brought]),
        )

    def _gap(self, group: int, keys: Keys, tier: TierId) -> list[PageRun]:
        """Leases the leading pages of `keys` that host memory lacks and the tier has. Returns them as a run."""
        gap = leading(self._tables.hub.index.find(group, keys, ready_only=False) == NO_ENTRY)
        entries = self._tables.tiers[tier].leading(group, keys[:gap])
        if not len(entries):
            return []
        return [PageRun(tier, entries, self._tables.tiers[tier].presence.pin(entries))]

    def _give_slots(
        self, group: int, keys: Keys, run: PageRun, plan: FetchPlan, ops: dict[OpId, TierId]
    ) -> FetchedPages:
        """Gives host slots to pages of a tier, as many as limits and free slots allow, and adds these pages to `plan`.
        Returns the leading pages of `keys` that are then in host memory or in flight to it.
        """
        index = self._tables.hub.index
        room = max(0, self.room(run.tier) - plan.pages)
        given = self._tables.hub.insert_coming(group, keys, room, plan.op_id)
        if given.whole:
            plan.add(keys, run, given.entries, given.slots)
            return FetchedPages(given.entries, given.slots, np.full(len(keys), plan.op_id, np.int64))
        # Some pages got no slot: no slot could be freed, or the page is already in host memory although pages before it
        # are not, or the page is being stored.
        new = np.zeros(len(keys), np.bool_)
        new[given.positions] = True
        if len(given.positions):
            plan.add(keys[new], run.at(new), given.entries, given.slots)
        self._tables.tiers[run.tier].presence.unpin(run.entries[~new])
        found = index.find(group, keys, ready_only=False)
        found = found[: leading(found != NO_ENTRY)]
        fetches = index.fillers(found)
        reach = leading(index.ready(found).view(np.bool_) | (fetches != 0))
        index.pin_coming(found[:reach][~new[:reach]])
        index.unpin(given.entries[given.positions >= reach])
        ops |= self._in_flight(fetches[:reach])
        return FetchedPages(found[:reach], index.slots_of(found[:reach]), fetches[:reach])

    def _order(self, tier: TierId, group: int, plan: FetchPlan, layerwise: bool) -> None:
        source = self._tables.tiers[tier].source
        assert source is not None
        entries, host, keys = _joined(plan.entries), _joined(plan.host), _joined(plan.keys)
        transfer = source.plan_fetch(
            plan.op_id,
            group,
            keys,
            entries,
            _joined(plan.places),
            _joined(plan.slots),
            layerwise,
        )
        self._tables.hub.note_times(group, transfer.slots, keys, source.expiries_of(transfer))
        op = FetchOp(
            plan=transfer,
            role=OpRole.FETCH,
            tier=tier,
            entries=entries,
            host=host,
            epoch=self._tables.epoch,
            ahead=self._tables.ops.pages(OpRole.FETCH, tier),
        )
        self._tables.ops.add(op)
        self._tables.outbox.put(tier, transfer)

    def end_fetch(self, op: FetchOp, result: OpResult, current: bool) -> NDArray[np.bool_]:
        """Ends a fetch: makes its verified pages visible, and makes its tier forget the suspect ones.

        Args:
            current: False if the cache was reset since the fetch was planned.

        Returns:
            Which pages became visible, bool [pages].
        """
        tier = self._tables.tiers[op.tier]
        source = tier.source
        assert source is not None
        now_s = self._tables.clock()
        if result.status is OpStatus.OK:
            self._tables.cost.fetch(op.tier).see(op.ahead + op.pages, now_s - op.begun_s, now_s)
        good = good_pages(result, op.pages)
        suspect = _suspect(good, result) if current else np.zeros_like(good)
        tier.counts.failed_reads += int(np.count_nonzero(suspect))
        tier.counts.unread += int(np.count_nonzero(~good & ~suspect)) if current else len(good)
        if not current:
            good = np.zeros_like(good)
        self._tables.hub.filled_by_fetch(op.group, op.plan.slots, source.tokens_of(op.plan))
        published = self._tables.hub.finish(op.group, op.host, good)
        tier.counts.read += int(np.count_nonzero(published))
        lost = tier.presence.keys_of(op.entries[suspect])
        source.end_fetch(op.plan, op.entries, suspect)
        if len(lost):
            self._tables.reactions.forgotten(op.tier, op.group, lost)
        return published


def _suspect(good: NDArray[np.bool_], result: OpResult) -> NDArray[np.bool_]:
    """Returns which pages the tier may no longer have although its index lists them, bool [pages]. If the fetch of a
    page never began, its failure says nothing about the tier's content.
    """
    if result.status is not OpStatus.FAILED:
        return np.zeros_like(good)
    suspect: NDArray[np.bool_] = ~good & np.isin(result.page_causes(len(good)), SUSPECT_CAUSES)
    return suspect


Array = TypeVar("Array", bound=np.generic)


def _joined(parts: list[NDArray[Array]]) -> NDArray[Array]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
