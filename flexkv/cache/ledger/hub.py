"""Manages the pages in host memory: records the slot of each key and which pages are being fetched, and notifies
listeners of changes.
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
"""Pools with fewer slots keep no reserve of free slots, because a small pool needs every slot and evicts few pages."""

RESERVE_SHARE = 64
"""In pools with at least RESERVE_FROM_SLOTS slots, one slot in this many is kept free."""

RESERVE_MAX_PAGES = 16_384
"""Maximum number of slots kept free: enough for two prompts of 128k tokens with 16 tokens per block."""

REFILL_PAGES = 512
"""When an op ends, at most this many pages are evicted to keep slots free; if the op has more pages, at most as many as
it has. Evicting 512 pages takes about 20 us."""


def reserve_pages(up_slots: int) -> int:
    """Returns the number of slots to keep free in a pool with `up_slots` usable slots, so that planning a store rarely
    has to evict.

    The engine's step waits while a store is planned, and evicting takes longer than the rest of planning. The step does
    not wait when an op ends, so slots for the next store are freed then. The price is that these slots hold no blocks.
    """
    return 0 if up_slots < RESERVE_FROM_SLOTS else min(up_slots // RESERVE_SHARE, RESERVE_MAX_PAGES)


class PageIndex(Protocol):
    """The part of `c_ext.BlockIndex` that looks up and pins pages. Calls that change which pages are visible go through
    the hub, which notifies the listeners."""

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
    """Pages that got a slot and that a fetch will bring.

    Attributes:
        positions: positions of the pages in the offered keys, uint32 [pages], ascending.
        entries: index entries of the pages, uint32 [pages], not visible yet; pinned once for the fetch and once for the
            waiting request.
        slots: host slots of the pages, int32 [pages].
        whole: whether every offered key is among these pages.
    """

    positions: NDArray[np.uint32]
    entries: EntryIds
    slots: SlotIds
    whole: bool


class Hub:
    """The host slots of one unit. All pages become visible, and are removed, through this class, which notifies the
    listeners.

    Args:
        policy: the eviction policy; one of `c_ext.eviction_policies()`.
        counts: the manager's totals, in which the hub counts evicted and expired blocks.
        reactions: the manager's callbacks, which the hub calls for evictions before it notifies the listeners.

    Attributes:
        presence: the index of the pages, with all its methods.
        index: the same object as `presence`, typed so that only methods that change no page's visibility can be called.
        tokens: per group, the number of valid tokens of the page in each slot, int32 [slots]. Groups that share slots
            share the array. Correct only if `tracks_tokens`.
        tracks_tokens: whether the numbers of valid tokens are recorded, because other tiers need them.
        any_partial: whether the number of valid tokens of some page may differ from the initial value in `tokens`.
        times: the expiry times of the pages.
        expired: keys of pages that expired recently in any tier.
        owners: the groups with slots of their own, ascending.
        listeners: objects that are notified, one after the other, when pages become visible or are removed.
        board: memory in which peers see the pages in the slots; None if there are no peers.

    Raises:
        ConfigError: there is no such policy.
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
        """Number of slots to keep free, by the index of the group that owns them."""
        self.listeners: list[CacheListener] = []
        self.board: SlotBoard | None = None

    def grow(self, group: int, slots: int) -> None:
        """Makes the first `slots` slots of the group usable, and sets the reserve of free slots."""
        self.presence.grow(group, slots)
        self._reserve[self._owner[group]] = reserve_pages(self.index.up_slots(group))

    # --- pages that are being stored or fetched ---

    def insert_for_store(
        self, group: int, keys: Keys, most: int, spare: bool
    ) -> tuple[NDArray[np.uint32], EntryIds, SlotIds, int, int]:
        """Gives slots to at most `most` of the keys that have none, evicting other pages if necessary.

        Args:
            spare: see `CacheManager.begin_store`.

        Returns:
            The positions in `keys` of the keys that got a slot, ascending; their entries, pending (not visible yet) and
            pinned once; their slots; the number of keys that had a slot already; and the number of dropped keys. When a
            key gets no slot, it and all later keys without a slot are dropped.
        """
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, spare=spare
        )
        if len(evicted):
            self._gone(group, evicted)
        return positions, entries, slots, known, dropped

    def insert_coming(self, group: int, keys: Keys, most: int, fetch: OpId) -> Inserted:
        """Gives slots, which `fetch` will fill, to at most `most` of the keys that have none, evicting other pages if
        necessary."""
        positions, entries, slots, evicted, known, dropped = self.presence.insert(
            group, keys, most, filler=fetch, leases=1
        )
        if len(evicted):
            self._gone(group, evicted)
        return Inserted(positions, entries, slots, not dropped and not known)

    def filled_by_store(
        self, group: int, slots: SlotIds, keys: Keys, tokens: int, expiries: Expiries | int | None
    ) -> None:
        """Records the pages with which a store will fill these slots.

        Args:
            tokens: number of valid tokens of each page.
            expiries: when the pages expire, in Unix seconds; None if none does.
        """
        if self.tracks_tokens:
            self.tokens[group][slots] = tokens
            self.any_partial |= tokens != self._block_tokens[group]
        self.note_times(group, slots, keys, expiries)

    def filled_by_fetch(self, group: int, slots: SlotIds, tokens: NDArray[np.integer] | None) -> None:
        """Records the number of valid tokens of each page that a fetch has brought. `tokens` is None if all pages are
        whole blocks."""
        if tokens is not None:
            self.any_partial = True
        if self.any_partial:
            self.tokens[group][slots] = self._block_tokens[group] if tokens is None else tokens

    def note_times(self, group: int, slots: SlotIds, keys: Keys, expiries: Expiries | int | None) -> None:
        """Records when the pages that will fill these slots expire. `expiries` is None if none does. Called when the op
        that fills the slots is planned.
        """
        if expiries is None:
            if not self.times.any:
                return
            expiries = NEVER
        self.times.set(group, slots, keys, expiries)
        self.times.thin_out(self._slots_of)

    def _slots_of(self, group: int, keys: Keys) -> tuple[NDArray[np.bool_], SlotIds]:
        """Returns which of the keys have a slot, bool [keys], and the slots of those that have one."""
        entries = self.index.find(group, keys, ready_only=False)
        there: NDArray[np.bool_] = entries != NO_ENTRY
        return there, self.index.slots_of(entries[there])

    # --- visible pages ---

    def there(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys are visible in host memory, bool [keys]."""
        found: NDArray[np.bool_] = self.index.find(group, keys) != NO_ENTRY
        return found

    def ready(self, entries: EntryIds) -> NDArray[np.bool_]:
        """Returns which entries are visible to lookups, bool [entries]; False for NO_ENTRY."""
        ready = np.zeros(len(entries), np.bool_)
        known = entries != NO_ENTRY
        ready[known] = self.index.ready(entries[known]).view(np.bool_)
        return ready

    def holds(self, group: int, keys: Keys, entries: EntryIds) -> bool:
        """Whether each entry still belongs to the key at the same position, is visible and is pinned."""
        return self.index.count_ready(group, keys, entries) == len(entries)

    def finish(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ends one pin of entries that an op was filling, because the op has ended. Makes the entries that `good` marks
        visible, unless they were removed meanwhile, and removes all other entries.

        Returns:
            Which entries became visible, bool [entries].
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
        """Records on the board the number of tokens and the expiry time of pages that are about to become visible."""
        assert self.board is not None
        slots = self.index.slots_of(entries)
        tokens = self.tokens[group][slots].astype(np.uint32)
        expiries = self.times.of(group, slots) if self.times.any else NO_WORDS
        self.board.note(slots, tokens, NO_WORDS, expiries, 0)

    def hide(self, slots: SlotIds) -> None:
        """Removes visible pages from the board, so that peers do not find them. Precondition: there is a board."""
        assert self.board is not None
        self.board.hide(slots)

    def show(self, group: int, entries: EntryIds) -> None:
        """Shows visible pages on the board again, after `hide` has removed them from it."""
        assert self.board is not None
        self._note(group, entries)
        self.board.show(self.index.slots_of(entries), group, self.index.keys_of(entries))

    # --- pages that are removed ---

    def drop_expired(self, now_s: int) -> None:
        """Makes expired pages misses. Pages with a lease keep their slots until their last lease ends.

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
        """Evicts up to `most` blocks of the group and of groups that share its slots."""
        if len(keys := self.presence.evict(group, most)):
            self._gone(group, keys)

    def unpin_and_evict(self, group: int, entries: EntryIds) -> None:
        """Ends one pin of each entry, and evicts the entries that have no other pin."""
        alone = entries[self.index.pins_of(entries) == 1]
        keys = self.index.keys_of(alone)
        removed = self.presence.remove(alone).view(np.bool_)
        self.index.unpin(entries)
        if removed.any():
            self._evicted(group, keys[removed])

    def _evicted(self, group: int, keys: Keys) -> None:
        """Counts evicted blocks and reports them to the callbacks and the listeners."""
        self._counts.evicted_blocks += len(keys)
        self._reactions.evicted(group, keys)
        for listener in self.listeners:
            listener.on_evict(group, keys)

    def _gone(self, group: int, keys: Keys) -> None:
        """Counts and reports the blocks that the index has just evicted from the slots of `group`. Each block is
        reported with its own group."""
        if not self._shares:
            self._evicted(group, keys)
            return
        groups = self.presence.gone_groups()
        for each in np.unique(groups):
            self._evicted(int(each), np.ascontiguousarray(keys[groups == each]))

    def give_up_coming(self, entries: EntryIds, fetch: OpId) -> None:
        """Removes those of the entries that `fetch` should have filled but will not fill. The pins of requests that
        wait for these entries stay. Precondition: the fetch's own pin has ended.
        """
        lost = entries[self.index.fillers(entries) == fetch]
        self.index.pin_coming(lost)
        self.presence.finish(lost, np.zeros(len(lost), np.uint8))

    def remove(self, group: int, entries: EntryIds) -> int:
        """Makes blocks misses, whether they are visible or still being filled, and returns how many it removed. The
        slot of a pinned block is freed when its last pin ends."""
        was_ready = self.index.ready(entries) if self.listeners else None
        keys = self.index.keys_of(entries[was_ready.view(np.bool_)]) if was_ready is not None else None
        removed = int(np.count_nonzero(self.presence.remove(entries)))
        if keys is not None and len(keys):
            for listener in self.listeners:
                listener.on_evict(group, keys)
        return removed

    def refill_reserve(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks if fewer slots are free than the pool's reserve needs (`reserve_pages`)."""
        missing = self._reserve[self._owner[group]] - self.index.free_slots(group)
        if missing > 0:
            self.evict(group, min(missing, most))

    # --- groups that share slots ---

    def owner(self, group: int) -> int:
        """Returns the number of the group that owns this group's slots: itself, unless it shares another group's."""
        return self._owner[group]

    def by_group(self, group: int, entries: EntryIds) -> list[tuple[int, EntryIds]]:
        """Splits entries by group, keeping their order in each group. The entries may belong to `group` and to the
        groups that share its slots."""
        if not self._shares:
            return [(group, entries)]
        groups = self.index.groups_of(entries)
        return [(int(each), entries[groups == each]) for each in np.unique(groups)]
