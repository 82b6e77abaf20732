"""`peers.store: once`: a page that a running peer has in host memory is not kept in this unit's host memory too.

This unit leaves out a page that a peer keeps (`Keeper`) in two cases: it does not store the page, and after a load it
drops the copy that the load needed. As soon as a copy arrives, it is hidden from peers. Otherwise two units could leave
out a page because of each other's copies, and then both drop them. So a unit leaves out only a peer's own pages.

    fetched for a load:  copy, hidden ----------- no peer has it any more --------> own page, shown to peers,
                           |  ^                                                     written to the tiers behind
           dropped after   |  |  fetched for the next load, or because the peer
           the load        v  |  has ended and its memory can still be read
    not stored:          left out, with a record - the last peer evicted it ------> lost: a miss, stored when the
                                                                                    engine has computed it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRY, EntryIds, OpRole, StorePlan, TierId
from flexkv.cache.ledger.ops import FetchOp, RankOp
from flexkv.cache.moves.fetches import Promotions, WantedPages
from flexkv.cache.moves.page_walk import PageRun
from flexkv.cache.tiers.contract import Keeper
from flexkv.cache.tiers.routes import StoreOffer, StoreRoute
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys, first_words
from flexkv.transfer.graph import NEVER

SWEEP_S = 0.25
"""Seconds between two searches for copies that no load has used, because their request ended or continued without
them."""

ORPHANS_PER_POLL = 512
"""Maximum number of pages that one poll begins to copy from the memory of ended peers: about 100 us of planning."""


class StoreOnce:
    """The pages that one unit leaves out, and its copies of peers' pages. A store or load looks up only its own pages
    in the index of peers' pages. A poll without work makes only a few comparisons.

    Args:
        number: number of the tier that has the peers' pages.
        keeper: the `Keeper` of that tier. The tier also has a `Follower`.
        offer: called with the group and keys of pages that became the unit's own, to write them to the tiers behind
            host memory.
    """

    def __init__(
        self,
        tables: CacheTables,
        promotions: Promotions,
        number: TierId,
        keeper: Keeper,
        offer: Callable[[int, Keys], None],
    ) -> None:
        self._tables, self._promotions, self._number, self._keeper = tables, promotions, number, keeper
        self._offer = offer
        # All groups share the slots of the first group.
        self._names = np.zeros(tables.specs[0].slots, np.uint64)
        """For each host slot that contains a copy, the first word of the copy's key. For other slots, 0 or the first
        word of another key."""
        self._copies: deque[tuple[int, Keys]] = deque()
        """The group and keys of the pages that each fetch copied; some of them may no longer be in host memory."""
        self._sweep_at_s = 0.0
        self._closing = False

    # --- stores ---

    def begin_store(self, offer: StoreOffer, room: int, route: StoreRoute) -> StorePlan:
        """Plans a store, on `route`, of the offered blocks that no peer keeps. Blocks that a peer keeps count as known.

        Args:
            room: maximum number of pages to store.
        """
        kept = self._left_to_peers(offer)
        pages = int(np.count_nonzero(kept))
        if not pages:
            return route.begin_store(offer, room)
        self._keeper.leave_out(offer.group, offer.keys[kept])
        if pages == len(kept):
            return StorePlan(None, np.empty(0, np.int32), pages, 0)
        plan = route.begin_store(offer.part(np.flatnonzero(~kept)), room)
        return replace(plan, known=plan.known + pages)

    def _left_to_peers(self, offer: StoreOffer) -> NDArray[np.bool_]:
        """Returns which of the offered blocks peers keep, bool [blocks], except blocks that are in this unit's host
        memory or in flight to it."""
        follower = self._tables.tiers[self._number].follower
        assert follower is not None
        follower.take_news(offer.group, offer.keys)
        kept = self._keeper.kept(offer.group, offer.keys, offer.expiry)
        if kept.any():
            here = self._tables.hub.index.find(offer.group, offer.keys[kept], ready_only=False) != NO_ENTRY
            kept[kept] = ~here
        return kept

    def kept(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns for which of the keys peers keep pages that do not expire, bool [keys]."""
        return self._keeper.kept(group, keys, NEVER)

    def end_store(self, op: RankOp) -> None:
        """Called before the pages of a store to host memory become visible. Records that they are the unit's own."""
        self._names[op.plan.slots] = 0

    def stored(self, group: int, keys: Keys) -> None:
        """Called when pages of a store to host memory have become visible. Records that they are no longer left out."""
        self._keeper.take_back(group, keys)

    # --- copies ---

    def end_fetch(self, op: FetchOp, published: NDArray[np.bool_]) -> None:
        """Called when the pages of a fetch have become visible. If they were fetched from peers, records them as copies
        and hides them from peers."""
        slots = op.plan.slots[published]
        if op.tier != self._number:
            self._names[slots] = 0
        elif len(slots):
            keys = self._tables.hub.index.keys_of(op.host[published])
            self._tables.hub.hide(slots)
            self._names[slots] = first_words(keys)
            self._keeper.take_back(op.group, keys)
            self._copies.append((op.group, keys))
            if self._keeper.has_orphans:
                # If these pages come from an ended peer, they are promoted now. Other units that left them out then
                # see early that they need not copy them.
                self._settle(op.group, keys)

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def end_load(self, group: int, keys: Keys) -> None:
        """Called when a load of these pages has ended and unpinned them. Drops the unpinned copies among them that a
        peer keeps, and promotes the copies that no peer keeps."""
        self._settle(group, keys)

    def _settle(self, group: int, keys: Keys) -> None:
        hub, index = self._tables.hub, self._tables.hub.index
        keys, entries = self._copies_among(group, keys)
        if not len(keys):
            return
        kept = self._keeper.kept(group, keys)
        if not kept.all():
            self._promote(group, keys[~kept], entries[~kept])
        dropped = kept & (index.pins_of(entries) == 0)
        if dropped.any():
            self._names[index.slots_of(entries[dropped])] = 0
            self._keeper.leave_out(group, keys[dropped])
            hub.remove(group, entries[dropped])

    def _copies_among(self, group: int, keys: Keys) -> tuple[Keys, EntryIds]:
        """Returns the keys whose page in host memory is a copy of a peer's page, and their entries."""
        index = self._tables.hub.index
        entries = index.find(group, keys)
        there = entries != NO_ENTRY
        keys, entries = keys[there], entries[there]
        copies = self._names[index.slots_of(entries)] == first_words(keys)
        return keys[copies], entries[copies]

    def _promote(self, group: int, keys: Keys, entries: EntryIds) -> None:
        hub = self._tables.hub
        self._names[hub.index.slots_of(entries)] = 0
        hub.show(group, entries)
        self._keeper.promoted(len(keys))
        self._offer(group, keys)

    # --- periodic work ---

    def poll(self) -> None:
        """Drops or promotes copies that no load has used, and begins to copy pages that only ended peers have."""
        if self._closing:
            return
        if self._copies and (now_s := self._tables.clock()) >= self._sweep_at_s:
            self._sweep_at_s = now_s + SWEEP_S
            self._sweep()
        if self._keeper.has_orphans and self._promotions.room(self._number):
            self._take_over()

    def begin_close(self) -> None:
        """Stops copying pages of ended peers. A unit that closes needs its time and its host slots for its own pages,
        and copies made now would only be written to its disks.
        """
        self._closing = True

    @property
    def busy(self) -> bool:
        """Whether `poll` has pages of ended peers to copy, now or when it is this unit's turn (see `PeerKeeper`)."""
        return self._keeper.has_orphans and not self._closing

    def _sweep(self) -> None:
        index = self._tables.hub.index
        fetched, self._copies = self._copies, deque()
        for group in sorted({group for group, _ in fetched}):
            entries = index.find(group, np.concatenate([keys for its, keys in fetched if its == group]))
            keys = index.keys_of(np.unique(entries[entries != NO_ENTRY]))
            self._settle(group, keys)
            keys, _ = self._copies_among(group, keys)
            if len(keys):
                self._copies.append((group, keys))

    def _take_over(self) -> None:
        """Plans a fetch of pages that only ended peers have. When it has ended, `end_fetch` promotes them, because no
        running peer keeps them."""
        group, keys = self._keeper.orphans(ORPHANS_PER_POLL)
        index, tier = self._tables.hub.index, self._tables.tiers[self._number]
        keys = keys[index.find(group, keys, ready_only=False) == NO_ENTRY]
        entries = tier.presence.find(group, keys)
        keys, entries = keys[entries != NO_ENTRY], entries[entries != NO_ENTRY]
        if len(keys):
            run = PageRun(self._number, entries, tier.presence.pin(entries))
            fetched = self._promotions.fetch([WantedPages(group, keys, [run])], layerwise=False)
            for pages in fetched.pages:
                index.unpin(pages.entries)
            self._keeper.put_back(group, keys[index.find(group, keys, ready_only=False) == NO_ENTRY])
        if not self._tables.ops.count(OpRole.FETCH, self._number):
            self._keeper.end_orphans()

    def reset(self) -> None:
        """Forgets which pages are copies. Called by a reset, which removes all pages."""
        self._names[:] = 0
        self._copies.clear()
