"""The pages in host memory: which keys are in which slots, which are on their way there, and whom the hub notifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_ENTRY, CacheListener, EntryIds, GroupSpec, sharing
from flexkv.cache.ledger.reactions import Reactions
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpId, ReadIds, SlotIds

RESERVE_FROM_SLOTS = 4096
"""Smaller pools keep no reserve: in them every slot counts, and their evictions are few."""

RESERVE_SHARE = 64
"""One slot in so many is kept free."""

RESERVE_MAX_PAGES = 16_384
"""More is never kept free: two prompts of 128k tokens at 16 a block."""

REFILL_PAGES = 512
"""Evicted at most when an op ends, or as many as that op had pages: some 20 us beyond the op's own share."""


def reserve_pages(up_slots: int) -> int:
    """Slots to keep free in a pool of which `up_slots` may be used, so that planning a store rarely has to evict.

    The engine's step waits for a store's plan, and evicting costs more than all the rest of it. Nothing waits for the
    end of an op, so the slots that the next store will want are freed then. The price: this share of the pool holds no
    blocks.
    """
    return 0 if up_slots < RESERVE_FROM_SLOTS else min(up_slots // RESERVE_SHARE, RESERVE_MAX_PAGES)


class PageIndex(Protocol):
    """The part of `c_ext.BlockIndex` that asks and pins. What changes which pages are visible goes through the hub,
    which notifies the listeners."""

    def match_prefix(self, group: int, keys: Keys) -> EntryIds: ...
    def match_and_pin(self, group: int, keys: Keys) -> tuple[EntryIds, SlotIds]: ...
    def find(self, group: int, keys: Keys, ready_only: bool = True) -> EntryIds: ...
    def pin(self, entries: EntryIds) -> SlotIds: ...
    def pin_coming(self, entries: EntryIds) -> SlotIds: ...
    def unpin(self, entries: EntryIds, hit: bool = False) -> None: ...
    def touch(self, entries: EntryIds, hits: int = 0) -> None: ...
    def take_coldest(self, group: int, count: int) -> EntryIds: ...
    def count_ready(self, group: int, keys: Keys, entries: EntryIds) -> int: ...
    def ready(self, entries: EntryIds) -> NDArray[np.uint8]: ...
    def fillers(self, entries: EntryIds) -> ReadIds: ...
    def pins_of(self, entries: EntryIds) -> NDArray[np.uint32]: ...
    def keys_of(self, entries: EntryIds) -> Keys: ...
    def slots_of(self, entries: EntryIds) -> SlotIds: ...
    def groups_of(self, entries: EntryIds) -> NDArray[np.uint32]: ...
    def free_slots(self, group: int) -> int: ...
    def up_slots(self, group: int) -> int: ...
    def idle_slots(self, group: int) -> int: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Inserted:
    """Pages that a fetch is to bring, at `positions` of the keys that were offered.

    Attributes:
        entries: pending, pinned once for the fetch and once for who waits for it.
        whole: every key got a slot.
    """

    positions: NDArray[np.uint32]
    entries: EntryIds
    slots: SlotIds
    whole: bool


class Hub:
    """The host slots of one unit. Whatever becomes visible or leaves does so in here, and the listeners are notified.

    Args:
        policy: which pages are evicted first; allowed are `c_ext.eviction_policies()`.
        counts: of the manager; evictions are counted there.
        reactions: of the manager; evictions are reported there, before the listeners.

    Attributes:
        presence: keys to slots, for lookups over all tiers.
        index: the same, for everybody else.
        tokens: per group, valid tokens of the page in each slot, int32 [slots], one array for groups that share slots;
            right only where `tracks_tokens`.
        tracks_tokens: other tiers want to know the tokens of pages.
        any_partial: some slot may have other tokens than `tokens` says at the start.
        owners: the groups with slots of their own.
        listeners: notified of what becomes visible and what leaves, in this order.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        policy: str,
        counts: ManagerStats,
        reactions: Reactions,
    ) -> None:
        owners = sharing(specs)
        self._owner = owners
        self.owners = sorted(set(owners))
        self._shares = len(self.owners) < len(specs)
        self.presence = BlockIndex([spec.slots for spec in specs], policy, owners if self._shares else [])
        self.index: PageIndex = self.presence
        tokens = {owner: np.full(specs[owner].slots, specs[owner].block_tokens, np.int32) for owner in owners}
        self.tokens = [tokens[owner] for owner in owners]
        self._block_tokens = [spec.block_tokens for spec in specs]
        self.tracks_tokens = False
        self.any_partial = any(
            spec.block_tokens != specs[owner].block_tokens for spec, owner in zip(specs, owners, strict=True)
        )
        self._counts = counts
        self._reactions = reactions
        self._reserve = [0] * len(specs)
        """Slots to keep free, by group with slots of its own."""
        self.listeners: list[CacheListener] = []

    def grow(self, group: int, slots: int) -> None:
        """The slots up to number `slots` may be used from now on."""
        self.presence.grow(group, slots)
        self._reserve[self._owner[group]] = reserve_pages(self.index.up_slots(group))

    # --- what is on its way ---

    def insert_for_store(
        self, group: int, keys: Keys, most: int, spare: bool
    ) -> tuple[NDArray[np.uint32], EntryIds, SlotIds, int, int]:
        """Gives a slot to those of `keys` that have none, for at most `most` of them.

        Args:
            spare: see `CacheManager.begin_store`.

        Returns:
            Positions in `keys` of those that got one, ascending; their entries, pending and pinned once; their
            slots; how many keys were known, and how many were dropped: all from the first that found no slot.
        """
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, spare=spare
        )
        if len(evicted):
            self._gone(group, evicted)
        return positions, entries, slots, known, dropped

    def insert_coming(self, group: int, keys: Keys, most: int, fetch: OpId) -> Inserted:
        """Gives a slot to those of `keys` that have none, for at most `most` of them; `fetch` is to fill them."""
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, filler=fetch, leases=1
        )
        if len(evicted):
            self._gone(group, evicted)
        return Inserted(positions, entries, slots, not dropped and not known)

    def filled_by_store(self, group: int, slots: SlotIds, tokens: int) -> None:
        """A store was given these slots, for pages of so many valid tokens each."""
        if self.tracks_tokens:
            self.tokens[group][slots] = tokens
            self.any_partial |= tokens != self._block_tokens[group]

    def filled_by_fetch(self, group: int, slots: SlotIds, tokens: NDArray[np.integer] | None) -> None:
        """A fetch has brought pages of so many valid tokens each; None where all are whole."""
        if tokens is not None:
            self.any_partial = True
        if self.any_partial:
            self.tokens[group][slots] = self._block_tokens[group] if tokens is None else tokens

    # --- what is there ---

    def there(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are visible, bool [keys]."""
        found: NDArray[np.bool_] = self.index.find(group, keys) != NO_ENTRY
        return found

    def ready(self, entries: EntryIds) -> NDArray[np.bool_]:
        """Which entries may be hit, bool [entries]; not NO_ENTRY."""
        ready = np.zeros(len(entries), np.bool_)
        known = entries != NO_ENTRY
        ready[known] = self.index.ready(entries[known]).view(np.bool_)
        return ready

    def holds(self, group: int, keys: Keys, entries: EntryIds) -> bool:
        """Whether all entries, one a key, are still those of the keys, ready and leased."""
        return self.index.count_ready(group, keys, entries) == len(entries)

    def finish(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The ops that filled these pending entries have ended: those marked in `good` become visible, unless they were
        removed meanwhile, and the others leave. Ends the pin of the insert.

        Returns:
            Which became visible, bool [entries].
        """
        published = self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)
        if self.listeners and published.any():
            keys = self.index.keys_of(entries[published])
            for listener in self.listeners:
                listener.on_publish(group, keys)
        return published

    # --- what leaves ---

    def evict(self, group: int, most: int) -> None:
        """Evicts up to so many blocks, of the group or of others that share its slots."""
        if len(keys := self.presence.evict(group, most)):
            self._gone(group, keys)

    def unpin_and_evict(self, group: int, entries: EntryIds) -> None:
        """Ends one pin on each entry, and evicts those that nothing else pins."""
        alone = entries[self.index.pins_of(entries) == 1]
        keys = self.index.keys_of(alone)
        removed = self.presence.remove(alone).view(np.bool_)
        self.index.unpin(entries)
        if removed.any():
            self._evicted(group, keys[removed])

    def _evicted(self, group: int, keys: Keys) -> None:
        """Blocks left to make room."""
        self._counts.evicted_blocks += len(keys)
        self._reactions.evicted(group, keys)
        for listener in self.listeners:
            listener.on_evict(group, keys)

    def _gone(self, group: int, keys: Keys) -> None:
        """The index has just evicted these blocks for room in the group."""
        if not self._shares:
            self._evicted(group, keys)
            return
        groups = self.presence.gone_groups()
        for each in np.unique(groups):
            self._evicted(int(each), np.ascontiguousarray(keys[groups == each]))

    def give_up_coming(self, entries: EntryIds, fetch: OpId) -> None:
        """What a fetch was to bring, and who pinned these entries waits for, will not come."""
        lost = entries[self.index.fillers(entries) == fetch]
        self.index.pin_coming(lost)
        self.presence.finish(lost, np.zeros(len(lost), np.uint8))

    def remove(self, group: int, entries: EntryIds) -> int:
        """Makes blocks misses, visible or not; leased slots are freed with their last lease. Returns how many."""
        was_ready = self.index.ready(entries) if self.listeners else None
        keys = self.index.keys_of(entries[was_ready.view(np.bool_)]) if was_ready is not None else None
        removed = int(np.count_nonzero(self.presence.remove(entries)))
        if keys is not None and len(keys):
            for listener in self.listeners:
                listener.on_evict(group, keys)
        return removed

    def refill_reserve(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks where fewer slots are free than `reserve_pages` says."""
        missing = self._reserve[self._owner[group]] - self.index.free_slots(group)
        if missing > 0:
            self.evict(group, min(missing, most))

    # --- groups that share slots ---

    def owner(self, group: int) -> int:
        """The group whose slots this one shares; itself where it has its own."""
        return self._owner[group]

    def by_group(self, group: int, entries: EntryIds) -> list[tuple[int, EntryIds]]:
        """Entries of the group and of those that share its slots, apart; each in order."""
        if not self._shares:
            return [(group, entries)]
        groups = self.index.groups_of(entries)
        return [(int(each), entries[groups == each]) for each in np.unique(groups)]
