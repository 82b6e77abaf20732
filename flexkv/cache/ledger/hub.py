"""The pages in host memory: which keys are in which slots, which are being fetched, and which listeners are
notified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex, SlotBoard
from flexkv.cache.base import NO_ENTRY, CacheListener, EntryIds, GroupSpec, sharing
from flexkv.cache.ledger.page_times import ExpiredKeys, Expiries, PageTimes
from flexkv.cache.ledger.reactions import Reactions
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import NEVER, OpId, ReadIds, SlotIds

NO_WORDS = np.zeros(0, np.uint64)

RESERVE_FROM_SLOTS = 4096
"""Smaller pools keep no reserve: every slot counts there, and evictions are few."""

RESERVE_SHARE = 64
"""One slot in this many is kept free."""

RESERVE_MAX_PAGES = 16_384
"""Most slots kept free: two prompts of 128k tokens at 16 tokens per block."""

REFILL_PAGES = 512
"""Most pages evicted when an op ends (or the op's own number of pages, if larger): some 20 us beyond the op's share."""


def reserve_pages(up_slots: int) -> int:
    """Number of slots to keep free in a pool with `up_slots` usable ones, so that planning a store rarely has to evict.

    The engine's step waits for a store's plan, and evicting costs more than the rest of the plan. Nothing waits for the
    end of an op, so the slots for the next store are freed then. The price is that this share of the pool holds no
    blocks.
    """
    return 0 if up_slots < RESERVE_FROM_SLOTS else min(up_slots // RESERVE_SHARE, RESERVE_MAX_PAGES)


class PageIndex(Protocol):
    """The part of `c_ext.BlockIndex` that looks up and pins. Changes to which pages are visible go through the hub,
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
    """Pages that a fetch will bring; `positions` are their indices in the offered keys.

    Attributes:
        entries: pending; pinned once for the fetch and once for the request that waits for it.
        whole: every key got a slot.
    """

    positions: NDArray[np.uint32]
    entries: EntryIds
    slots: SlotIds
    whole: bool


class Hub:
    """The host slots of one unit. Every page that becomes visible or leaves does so through this class, which notifies
    the listeners.

    Args:
        policy: decides which pages are evicted first; one of `c_ext.eviction_policies()`.
        counts: the manager's totals; the hub counts evictions there.
        reactions: the manager's; the hub reports evictions there before it notifies the listeners.

    Attributes:
        presence: maps keys to slots; for lookups over all tiers.
        index: the same object, for all other callers.
        tokens: per group, valid tokens of the page in each slot, int32 [slots]. Groups that share slots share the
            array. Correct only if `tracks_tokens`.
        tracks_tokens: other tiers need the number of valid tokens per page.
        any_partial: some page may have another number of tokens than `tokens` had initially.
        times: when pages expire.
        expired: keys that expired lately in any tier.
        owners: the groups with slots of their own.
        listeners: notified, in this order, of the pages that become visible or leave.
        board: shows other units what the slots hold; None if no unit reads it.

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
        self.times = PageTimes([spec.slots for spec in specs], owners)
        self.expired = ExpiredKeys()
        self._counts = counts
        self._reactions = reactions
        self._reserve = [0] * len(specs)
        """Slots to keep free, by the group that owns them."""
        self.listeners: list[CacheListener] = []
        self.board: SlotBoard | None = None

    def grow(self, group: int, slots: int) -> None:
        """Makes the first `slots` slots of the group usable."""
        self.presence.grow(group, slots)
        self._reserve[self._owner[group]] = reserve_pages(self.index.up_slots(group))

    # --- pages under way ---

    def insert_for_store(
        self, group: int, keys: Keys, most: int, spare: bool
    ) -> tuple[NDArray[np.uint32], EntryIds, SlotIds, int, int]:
        """Gives a slot to those of `keys` that have none, for at most `most` of them.

        Args:
            spare: see `CacheManager.begin_store`.

        Returns:
            Positions in `keys` of those that got a slot, ascending; their entries, pending and pinned once; their
            slots; how many keys were known already; how many were dropped, which are all from the first one without a
            slot on.
        """
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, spare=spare
        )
        if len(evicted):
            self._gone(group, evicted)
        return positions, entries, slots, known, dropped

    def insert_coming(self, group: int, keys: Keys, most: int, fetch: OpId) -> Inserted:
        """Gives a slot, which `fetch` will fill, to those of `keys` that have none, for at most `most` of them."""
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, filler=fetch, leases=1
        )
        if len(evicted):
            self._gone(group, evicted)
        return Inserted(positions, entries, slots, not dropped and not known)

    def filled_by_store(
        self, group: int, slots: SlotIds, keys: Keys, tokens: int, expiries: Expiries | int | None
    ) -> None:
        """Records that a store got these slots, for pages of `tokens` valid tokens each, and when they expire, None if
        none does.
        """
        if self.tracks_tokens:
            self.tokens[group][slots] = tokens
            self.any_partial |= tokens != self._block_tokens[group]
        self.note_times(group, slots, keys, expiries)

    def filled_by_fetch(self, group: int, slots: SlotIds, tokens: NDArray[np.integer] | None) -> None:
        """Records the valid tokens of each page that a fetch has brought; None if all are whole blocks."""
        if tokens is not None:
            self.any_partial = True
        if self.any_partial:
            self.tokens[group][slots] = self._block_tokens[group] if tokens is None else tokens

    def note_times(self, group: int, slots: SlotIds, keys: Keys, expiries: Expiries | int | None) -> None:
        """Records when the pages that will fill these slots expire, None if none does. Called once the op that fills
        them is planned.
        """
        if expiries is None:
            if not self.times.any:
                return
            expiries = NEVER
        self.times.set(group, slots, keys, expiries)
        self.times.thin_out(self._slots_of)

    def _slots_of(self, group: int, keys: Keys) -> tuple[NDArray[np.bool_], SlotIds]:
        """Which of the keys have a slot, bool [keys], and the slots of those."""
        entries = self.index.find(group, keys, ready_only=False)
        there: NDArray[np.bool_] = entries != NO_ENTRY
        return there, self.index.slots_of(entries[there])

    # --- visible pages ---

    def there(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are visible, bool [keys]."""
        found: NDArray[np.bool_] = self.index.find(group, keys) != NO_ENTRY
        return found

    def ready(self, entries: EntryIds) -> NDArray[np.bool_]:
        """Which entries are ready, so that a lookup may hit them, bool [entries]; False for NO_ENTRY."""
        ready = np.zeros(len(entries), np.bool_)
        known = entries != NO_ENTRY
        ready[known] = self.index.ready(entries[known]).view(np.bool_)
        return ready

    def holds(self, group: int, keys: Keys, entries: EntryIds) -> bool:
        """Whether all entries, one per key, still belong to the keys, and are ready and leased."""
        return self.index.count_ready(group, keys, entries) == len(entries)

    def finish(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Publishes the pending entries that `good` marks, unless they were removed meanwhile, and removes the others.
        Ends the pin of the insert. Called when the op that filled the entries has ended.

        Returns:
            Which became visible, bool [entries].
        """
        if self.board is not None:
            self._note(group, entries)
        published = self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)
        if self.listeners and published.any():
            keys = self.index.keys_of(entries[published])
            for listener in self.listeners:
                listener.on_publish(group, keys)
        return published

    def _note(self, group: int, entries: EntryIds) -> None:
        """Records on the board, for pages that are about to become visible, how many tokens they have and when they
        expire.
        """
        assert self.board is not None
        slots = self.index.slots_of(entries)
        tokens = self.tokens[group][slots].astype(np.uint32)
        expiries = self.times.of(group, slots) if self.times.any else NO_WORDS
        self.board.note(slots, tokens, NO_WORDS, expiries, 0)

    def hide(self, slots: SlotIds) -> None:
        """Withdraws visible pages from the board: peers do not find them. Precondition: there is a board."""
        assert self.board is not None
        self.board.hide(slots)

    def show(self, group: int, entries: EntryIds) -> None:
        """Shows peers ready pages that `hide` has withdrawn."""
        assert self.board is not None
        self._note(group, entries)
        self.board.show(self.index.slots_of(entries), group, self.index.keys_of(entries))

    # --- pages that leave ---

    def drop_expired(self, now_s: int) -> None:
        """Makes expired pages misses. Promised pages keep their slots until their last lease ends.

        Call order:
            Before keys are looked up or stored, if `times.any`.
        """
        while due := self.times.first_due(now_s):
            for group, keys in due:
                entries = self.index.find(group, keys, ready_only=False)
                there = entries[entries != NO_ENTRY]
                expiries = self.times.of(group, self.index.slots_of(there))
                there = np.unique(there[(expiries != NEVER) & (expiries <= now_s)])
                if len(there):
                    self.expired.add(self.index.keys_of(there))
                    self._counts.expired_blocks += self.remove(group, there)
            self.times.end_first()

    def evict(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks of the group and of others that share its slots."""
        if len(keys := self.presence.evict(group, most)):
            self._gone(group, keys)

    def unpin_and_evict(self, group: int, entries: EntryIds) -> None:
        """Ends one pin on each entry, and evicts entries without further pins."""
        alone = entries[self.index.pins_of(entries) == 1]
        keys = self.index.keys_of(alone)
        removed = self.presence.remove(alone).view(np.bool_)
        self.index.unpin(entries)
        if removed.any():
            self._evicted(group, keys[removed])

    def _evicted(self, group: int, keys: Keys) -> None:
        """Counts and reports blocks that left to make room."""
        self._counts.evicted_blocks += len(keys)
        self._reactions.evicted(group, keys)
        for listener in self.listeners:
            listener.on_evict(group, keys)

    def _gone(self, group: int, keys: Keys) -> None:
        """Counts and reports, each in its own group, the blocks that the index has just evicted to make room in
        `group`."""
        if not self._shares:
            self._evicted(group, keys)
            return
        groups = self.presence.gone_groups()
        for each in np.unique(groups):
            self._evicted(int(each), np.ascontiguousarray(keys[groups == each]))

    def give_up_coming(self, entries: EntryIds, fetch: OpId) -> None:
        """Removes those of these entries that `fetch` should have filled and will not fill. Requests that wait for them
        keep their pins; the pin of the fetch has ended before.
        """
        lost = entries[self.index.fillers(entries) == fetch]
        self.index.pin_coming(lost)
        self.presence.finish(lost, np.zeros(len(lost), np.uint8))

    def remove(self, group: int, entries: EntryIds) -> int:
        """Turns blocks into misses, whether they are visible or still being filled, and returns how many. A leased slot
        is freed with its last lease."""
        was_ready = self.index.ready(entries) if self.listeners else None
        keys = self.index.keys_of(entries[was_ready.view(np.bool_)]) if was_ready is not None else None
        removed = int(np.count_nonzero(self.presence.remove(entries)))
        if keys is not None and len(keys):
            for listener in self.listeners:
                listener.on_evict(group, keys)
        return removed

    def refill_reserve(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks if fewer slots are free than `reserve_pages` asks for."""
        missing = self._reserve[self._owner[group]] - self.index.free_slots(group)
        if missing > 0:
            self.evict(group, min(missing, most))

    # --- groups that share slots ---

    def owner(self, group: int) -> int:
        """The group that owns this one's slots: itself, unless it shares another's."""
        return self._owner[group]

    def by_group(self, group: int, entries: EntryIds) -> list[tuple[int, EntryIds]]:
        """Splits entries of the groups that share these slots by group, and keeps their order."""
        if not self._shares:
            return [(group, entries)]
        groups = self.index.groups_of(entries)
        return [(int(each), entries[groups == each]) for each in np.unique(groups)]
