"""A tier whose pages are in slots on disks (volumes). It maps keys to slots (`places`), and keeps the tag (the page's
identity) with which each slot was written.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex, in_a_row
from flexkv.cache.base import NO_ENTRY, EntryIds, sharing
from flexkv.cache.ledger.page_times import Expiries
from flexkv.cache.tiers.contract import Source, Tier, TierCounts, TierFacts
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.storage.base import Places, StoredPages
from flexkv.storage.striping import striped_slots
from flexkv.storage.tags import TAG, TagFields, make_tags, tag_fields
from flexkv.transfer.graph import (
    NEVER,
    NO_BLOCKS,
    TAG_BYTES,
    OpId,
    OpKind,
    PageTags,
    Priority,
    SlotIds,
    TransferOp,
)

NO_GROUPS = np.empty(0, np.uint32)
NO_KEYS = np.empty((0, KEY_BYTES), np.uint8)

LOOKED_THROUGH = 65_536
"""Number of slots of a group that one search for expired pages examines, in about 100 us."""


class StoredTier(Tier, Source):
    """Looks up and reads pages in storage. An entry is pinned while an op uses its slot.

    The epoch is even while the weights are those that the process loaded at its start, which the folder's fingerprint
    identifies. After a reset, it is odd, because only this process knows the new weights. The next process drops pages
    that were written in an odd epoch, because it cannot know whether it has the same weights.

    Args:
        pages: the storage, which survives the process. It says how many slots there are and which pages they contain.
    """

    def __init__(self, context: TierContext, pages: StoredPages, facts: TierFacts) -> None:
        self.facts = facts
        self.pages = pages
        self.counts = TierCounts()
        self.source = self
        if pages.epoch % 2:
            pages.reset(pages.epoch + 1)
        self.epoch = pages.epoch
        self._unix_s = context.tables.unix_s
        self._hub = context.tables.hub
        slots = [pages.slots(group) for group in range(len(context.tables.specs))]
        owners = sharing(context.tables.specs)
        self._owner_of, self._owners = owners, sorted(set(owners))
        self._looked_through = dict.fromkeys(self._owners, 0)
        """For each group with slots of its own, the first slot that the next `let_go_expired` examines."""
        self.presence = BlockIndex(slots, context.policy, owners if len(self._owners) < len(owners) else [])
        tags = {owner: np.zeros(slots[owner], TAG) for owner in self._owners}
        self._tags = [tags[owner] for owner in owners]
        """Per group, the tag with which each slot was last written. Groups that share slots share the array."""
        self._asked: dict[int, NDArray[np.bool_]] = {}
        """For each group with slots of its own, which slots contain a page whose expiry time a request has set. Empty
        until there is such a page. A page found at the start that expires counts too, because nothing says who set its
        expiry time."""
        self._any_expires = False
        self._any_partial = False
        self._sizes = [spec.block_tokens for spec in context.tables.specs]
        for owner in self._owners:
            self.presence.grow(owner, slots[owner])
            self._adopt(owner)
        for volume, alive in enumerate(pages.alive):
            if not alive:
                self.lose(volume)

    def _adopt(self, group: int) -> None:
        rows = self.pages.rows(group)
        groups = None if rows.groups is None else rows.groups.astype(np.uint32)
        taken = self.presence.adopt(group, rows.keys, rows.places, groups).view(np.bool_)
        tags = make_tags(
            rows.keys[taken], self.epoch, rows.generations[taken], rows.tokens[taken], rows.expiries[taken]
        )
        self._tags[group][rows.places[taken]] = tag_fields(tags)
        if bool((rows.expiries != NEVER).any()):
            self._any_expires = True
            self.note_asked(group, rows.places[taken], rows.expiries[taken] != NEVER)
            for each in (group,) if groups is None else np.unique(groups):
                those = taken if groups is None else taken & (groups == each)
                entries = self.presence.find(int(each), rows.keys[those])
                self.presence.set_expiry(entries, rows.expiries[those].astype(np.uint64))
        self._any_partial |= bool((rows.tokens != self._sizes[group]).any())

    def __len__(self) -> int:
        return len(self.presence)

    # --- lookups ---

    def leading(self, group: int, keys: Keys) -> EntryIds:
        """Implements `Tier.leading`. Removes expired pages among the leading keys."""
        entries = self.presence.match_prefix(group, keys)
        if not self._any_expires or not len(entries):
            return entries
        expired = self._expired(group, entries)
        if not expired.any():
            return entries
        self._drop_expired(group, entries[expired])
        return entries[: int(np.argmax(expired))]

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        entries = self.presence.find(group, keys)
        there: NDArray[np.bool_] = entries != NO_ENTRY
        if self._any_expires and there.any():
            expired = self._expired(group, entries[there])
            if expired.any():
                self._drop_expired(group, entries[there][expired])
                there[np.flatnonzero(there)[expired]] = False
        return there

    def _expired(self, group: int, entries: EntryIds) -> NDArray[np.bool_]:
        expiries = self._fields(group, self.presence.slots_of(entries))["expiry"]
        past: NDArray[np.bool_] = (expiries != NEVER) & (expiries <= self._now())
        return past

    def _drop_expired(self, group: int, entries: EntryIds) -> None:
        self._hub.expired.add(self.presence.keys_of(entries))
        self.counts.expired += self.remove(group, entries)

    def let_go_expired(self) -> None:
        """Removes the expired pages in the next LOOKED_THROUGH slots of each group. Otherwise pages that may still be
        used could be evicted while expired pages that no request asks for stay.
        """
        if not self._any_expires:
            return
        now = self._now()
        for owner in self._owners:
            first = self._looked_through[owner]
            tags = self._tags[owner][first : first + LOOKED_THROUGH]
            self._looked_through[owner] = (first + len(tags)) % max(1, len(self._tags[owner]))
            past = np.flatnonzero((tags["expiry"] != NEVER) & (tags["expiry"] <= now))
            keys = np.ascontiguousarray(tags["key"][past])
            for group in np.flatnonzero(np.asarray(self._owner_of) == owner).tolist() if len(past) else ():
                entries = self.presence.find(group, keys)
                there = np.flatnonzero(entries != NO_ENTRY)
                # A tag stays when its page is removed, and the page may be in another slot by now.
                there = there[self.presence.slots_of(entries[there]) == past[there] + first]
                if len(there):
                    self._drop_expired(group, entries[there])

    def _now(self) -> int:
        return max(0, int(self._unix_s()))

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
        tags = self.tags_of(group, places)
        return TransferOp(
            op_id, OpKind.DISK_READ, group, Priority.LOAD, NO_BLOCKS, slots, layerwise, places, tags
        )

    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        self.end_use(plan.group, entries, plan.places, suspect)

    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer] | None:
        return tag_fields(plan.tags)["tokens"] if self._any_partial else None

    def expiries_of(self, plan: TransferOp) -> Expiries | None:
        return self._expiries_at(plan.group, plan.places) if self._asked else None

    def expiries_there(self, group: int, keys: Keys) -> Expiries | None:
        if not self._asked:
            return None
        entries = self.presence.find(group, keys, ready_only=False)
        there = entries != NO_ENTRY
        expiries = np.full(len(keys), NEVER, np.uint64)
        expiries[there] = self._expiries_at(group, self.presence.slots_of(entries[there]))
        return expiries

    def _expiries_at(self, group: int, places: Places) -> Expiries:
        """Returns when the pages in these slots expire in every tier; NEVER for pages that expire only in this tier."""
        expiries = self._fields(group, places)["expiry"]
        return np.where(self._asked[self._owner_of[group]][places], expiries, np.uint64(NEVER))

    def note_asked(self, group: int, places: Places, asked: NDArray[np.bool_] | bool) -> None:
        """Records which of these slots are being filled with a page whose expiry time a request has set."""
        owner = self._owner_of[group]
        if owner not in self._asked:
            if not np.any(asked):
                return
            self._asked |= {each: np.zeros(len(self._tags[each]), np.bool_) for each in self._owners}
        self._asked[owner][places] = asked

    def end_use(self, group: int, entries: EntryIds, places: Places, suspect: NDArray[np.bool_]) -> None:
        """Unpins pages that were read, and removes the pages marked in `suspect`, which may not be intact."""
        self.pages.record_use(group, places)
        if suspect.any():
            self.remove(group, entries[suspect])
        self.presence.unpin(entries, hit=True)

    def tags_of(self, group: int, places: Places) -> PageTags:
        """Returns the tags of slots, uint8 [places, TAG_BYTES]. The caller must not change them; they are valid while
        the slots are pinned."""
        # Tags are copied as five integers each, which NumPy does four times as fast as copying records.
        rows = self._tags[group].view(np.uint64).reshape(-1, TAG_BYTES // 8)
        if not in_a_row(places):
            return rows.take(places, axis=0).view(np.uint8)
        # The slots are contiguous, like those of most pages that were written together, so a view is enough.
        tags = rows[places[0] : places[0] + len(places)].view(np.uint8)
        tags.flags.writeable = False
        return tags

    def _fields(self, group: int, places: Places) -> TagFields:
        return tag_fields(self.tags_of(group, places))

    # --- removal ---

    def remove(self, group: int, entries: EntryIds) -> int:
        """Makes pages misses, and returns how many of them the tier had. A slot is free when no op uses it any more."""
        visible = entries[self.presence.ready(entries).view(np.bool_)]
        gone = self.presence.slots_of(visible)
        keys = self.presence.keys_of(visible) if self._tells else NO_KEYS
        removed = int(np.count_nonzero(self.presence.remove(entries)))
        if len(gone):
            self.pages.record_evict(group, gone, self._fields(group, gone)["generation"].copy())
            self._tell_gone(group, keys)
        return removed

    @property
    def _tells(self) -> bool:
        """Whether listeners are notified of removed pages: only if the tier consists of the unit's own disks."""
        return self.sink is not None and bool(self._hub.listeners)

    def _tell_gone(self, group: int, keys: Keys, groups: NDArray[np.uint32] = NO_GROUPS) -> None:
        """Notifies the hub's listeners that pages are no longer visible on the unit's own disks.

        Args:
            groups: the group of each page; empty if all pages are of `group`.
        """
        if not self._tells or not len(keys):
            return
        for each in np.unique(groups).tolist() if len(groups) else (group,):
            those = np.ascontiguousarray(keys[groups == each]) if len(groups) else keys
            for listener in self._hub.listeners:
                listener.on_unwrite(each, those)

    def forget(self, group: int, keys: Keys) -> int:
        entries = self.presence.find(group, keys, ready_only=False)
        return self.remove(group, entries[entries != NO_ENTRY])

    def lose(self, volume: int) -> None:
        """Removes the pages of a volume that is permanently lost, and counts them."""
        self.counts.gone += self.retire(volume)

    def retire(self, volume: int) -> int:
        """Makes all pages of a volume misses, keeps its slots from being written again, and returns the number of
        pages.
        """
        pages = 0
        for group in self._owners:
            places = np.arange(len(self._tags[group]), dtype=np.int32)
            on_volume, _ = striped_slots(places, self.pages.disks)
            gone = self.presence.retire(group, (on_volume == volume).astype(np.uint8))
            self._tell_gone(group, gone, self.presence.gone_groups())
            pages += len(gone)
        return pages

    def begin_reset(self) -> None:
        self.presence.clear()
        self.epoch += 2 if self.epoch % 2 else 1

    def finish_reset(self, ends_s: float) -> None:
        self.pages.reset(self.epoch, max(0.0, ends_s - time.monotonic()))
