"""The tier of pages that running peers have, in their host pools or in their folders."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex, PeerDirectory
from flexkv.cache.base import NO_ENTRY, EntryIds
from flexkv.cache.ledger.page_times import Expiries
from flexkv.cache.tiers.contract import (
    NAMELESS,
    Follower,
    Plane,
    Series,
    Source,
    Tier,
    TierCounts,
    TierFacts,
)
from flexkv.cache.tiers.running_peers.keeper import DepartedPeers, PeerKeeper
from flexkv.cache.tiers.tables import TierContext
from flexkv.cache.tiers.unexpired import unexpired_leading, unexpired_present
from flexkv.facts.keys import Keys
from flexkv.peers.pool_reader import OUTCOMES
from flexkv.peers.share import OnceCounts
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import NEVER, NO_BLOCKS, OpId, OpKind, Priority, SlotIds, TransferOp

KNOWN_PAGES = 262_144
"""Maximum number of peers' pages in the index, over all groups. The index then takes about 25 MB. If peers have more
pages, the eviction policy removes pages from the index, and these are misses."""

NEWS_PER_POLL = 4_096
"""Maximum number of changed pages that one poll enters in the index: about 1 ms of the engine's thread, four times per
second. Lookups do not wait for this, because each lookup first enters the changes of its own pages."""


News = tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.bool_]]
"""Changed pages: keys, groups, valid tokens, expiry times, and whether a peer has the page now; see
`PeerDirectory.take`."""


class SharingUnit(DepartedPeers, Protocol):
    """The part that this tier uses of `flexkv.peers.share.PeerShare`, which shares this unit's pages with peers."""

    def start(self, weights: bytes) -> None: ...
    def retire(self) -> None: ...
    def close(self) -> None: ...
    @property
    def leaves(self) -> bool:
        """Whether a thread that ends after `retire` is still running, so that `close` would wait for it."""

    @property
    def joined(self) -> int:
        """Number of peers that this unit follows."""


class ReadingPlane(Plane, Protocol):
    """A plane that copies pages of peers to host memory.

    Attributes:
        outcomes: number of pages requested from peers, by outcome, in the order of `OUTCOMES`, int64 [outcomes].
    """

    outcomes: NDArray[np.int64]

    @property
    def down_reason(self) -> str: ...


class LivePeerTier(Tier, Source, Follower):
    """The tier of running peers' pages. Its `presence` is copied from `directory` and may be out of date: a page that a
    peer no longer has fails when it is read, and is then a miss.

    Args:
        directory: the pages that peers have; another thread keeps it up to date.
        share: shares this unit's own pages with its peers.
        plane: copies the pages.
        once: totals of pages that were left out, promoted and lost. None except for the tier of host pools with
            `peers.store: once`.
    """

    def __init__(
        self,
        context: TierContext,
        directory: PeerDirectory,
        facts: TierFacts,
        share: SharingUnit,
        plane: ReadingPlane,
        once: OnceCounts | None = None,
    ) -> None:
        self.facts, self.counts = facts, TierCounts()
        self.source = self.follower = self
        self.plane = self._reader = plane
        self._directory, self._share = directory, share
        specs = context.tables.specs
        # All groups share one table, even if they share no host slots.
        self.presence = BlockIndex([KNOWN_PAGES] * len(specs), context.policy, [0] * len(specs))
        self.presence.grow(0, KNOWN_PAGES)
        self._unix_s = context.tables.unix_s
        self._block_tokens = [spec.block_tokens for spec in specs]
        self._tokens = np.zeros(KNOWN_PAGES, np.int32)
        """Number of valid tokens of the page in each slot of the index."""
        self._expiries: Expiries = np.zeros(KNOWN_PAGES, np.uint64)
        """Expiry time of the page in each slot of the index."""
        self._any_partial = self._any_expires = False
        self._once = once
        self._keeper: PeerKeeper | None = None
        if once is not None:
            self._keeper = self.keeper = PeerKeeper(
                self.presence,
                KNOWN_PAGES,
                self.present,
                lambda: self.in_use,
                directory,
                share,
                once,
                context.tables.clock,
            )

    # --- news of peers ---

    def take_news(self, group: int, keys: Keys) -> None:
        if not self._directory.has_news or self.down:
            return
        news = self._directory.take_of(group, keys)
        if news is not None:
            self._take_over(news)

    def take_all_news(self, most: int = NEWS_PER_POLL) -> None:
        """Updates `presence` with the changes of up to `most` pages."""
        if self._directory.has_news and not self.down:
            self._take_over(self._directory.take(most))

    def _take_over(self, news: News) -> None:
        keys, groups, tokens, expiries, there = news
        # `news` begins with the pages that no peer has any more.
        went = len(there) - int(np.count_nonzero(there))
        for group, those in self._by_group(groups[:went], 0):
            found = self.presence.find(group, keys[those])
            self._remove(found[found != NO_ENTRY])
        for group, those in self._by_group(groups[went:], went):
            self._enter(group, keys[those], tokens[those].astype(np.int32), expiries[those])

    def _by_group(
        self, groups: NDArray[np.uint32], first: int
    ) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
        """Yields each group that is in `groups`, and its positions there. `first` is added to all positions."""
        if not len(groups):
            return
        if len(self._block_tokens) == 1:
            yield 0, slice(first, first + len(groups))
            return
        for group in np.unique(groups).tolist():
            yield group, np.flatnonzero(groups == group) + first

    def _enter(self, group: int, keys: Keys, tokens: NDArray[np.int32], expiries: Expiries) -> None:
        positions, new, places, *_ = self.presence.insert(group, keys, len(keys))
        self._tokens[places] = tokens[positions]
        if self._keeper is not None:
            self._keeper.entered(places)
        if self._any_expires or expiries.any():
            self._any_expires = True
            self._expiries[places] = expiries[positions]
            self.presence.set_expiry(new, self._expiries[places])
        self._any_partial |= bool((tokens != self._block_tokens[group]).any())
        self.presence.finish(new, np.ones(len(new), np.uint8))

    def _remove(self, entries: EntryIds) -> int:
        """Removes pages from the index because no peer has an intact copy any more, and returns how many it removed."""
        if self._keeper is not None:
            self._keeper.leaving(entries)
        return int(np.count_nonzero(self.presence.remove(entries)))

    def _clear(self) -> None:
        self.presence.clear()
        if self._keeper is not None:
            self._keeper.clear()

    # --- lookups ---

    def leading(self, group: int, keys: Keys) -> EntryIds:
        return unexpired_leading(self.presence, group, keys, self._expired)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        return unexpired_present(self.presence, group, keys, self._expired)

    def _expired(self, entries: EntryIds) -> NDArray[np.bool_]:
        if not self._any_expires:
            return np.zeros(len(entries), np.bool_)
        expiries = self.presence.expiries(entries)
        past: NDArray[np.bool_] = (expiries != NEVER) & (expiries <= np.uint64(max(0, int(self._unix_s()))))
        return past

    def forget(self, group: int, keys: Keys) -> int:
        """Makes the pages misses in this process, until a peer stores them again."""
        if self._keeper is not None:
            # The caller asks for the removal, so the pages must not count as lost.
            self._keeper.take_back(group, keys)
        entries = self.presence.find(group, keys, ready_only=False)
        return self._remove(entries[entries != NO_ENTRY])

    # --- fetches ---

    def plan_fetch(
        self,
        op_id: OpId,
        group: int,
        keys: Keys,
        entries: EntryIds,
        places: SlotIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> TransferOp:
        # DISK_READ is the kind of all ops that fetch pages to host slots. The tier's plane runs it, here by copying
        # from the memory or the folders of a peer.
        none = np.zeros(len(keys), np.uint64)
        tags = make_tags(keys, 0, none, self._tokens[places], self._expiries[places])
        return TransferOp(
            op_id, OpKind.DISK_READ, group, Priority.LOAD, NO_BLOCKS, slots, places=places, tags=tags
        )

    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        if suspect.any():
            self._remove(entries[suspect])
        self.presence.unpin(entries, hit=True)

    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer] | None:
        return self._tokens[plan.places] if self._any_partial else None

    def expiries_of(self, plan: TransferOp) -> Expiries | None:
        return self._expiries[plan.places] if self._any_expires else None

    # --- the unit's life ---

    def open_for(self, weights: bytes) -> None:
        super().open_for(weights)
        self._share.start(weights)

    def begin_reset(self) -> None:
        # After a reset nothing identifies the new weights, so pages can no longer be exchanged with peers.
        self._share.retire()
        self.go_down(NAMELESS)
        self._clear()

    @property
    def resets(self) -> bool:
        return self._share.leaves

    def finish_reset(self, ends_s: float) -> None:
        # `begin_reset` has taken the tier out of use, so no page of a peer is served. If no time is left, this method
        # does not wait for the threads of `share`.
        if time.monotonic() < ends_s:
            self._share.close()

    def poll(self, now_s: float) -> None:
        self.take_all_news()
        if not self.down and (reason := self._reader.down_reason):
            self.go_down(reason)
            self._clear()

    def close(self, deadline_s: float) -> bool:
        self._share.close()
        return True

    def gauges(self) -> Mapping[str, float]:
        return {"flexkv_peers": self._share.joined}

    def totals(self) -> Mapping[Series, int]:
        totals: dict[Series, int] = {
            ("flexkv_peer_pages_total", (("outcome", end),)): pages
            for end, pages in zip(OUTCOMES, self._reader.outcomes.tolist(), strict=True)
            if pages
        }
        if self._once is not None:
            for end, pages in asdict(self._once).items():
                if pages:
                    totals["flexkv_once_pages_total", (("outcome", end),)] = pages
        return totals
