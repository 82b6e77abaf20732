"""What lies at places of disks: keys to places, with what each place was written with. Knows nothing of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex, in_a_row
from flexkv.cache.base import GroupSpec, Keys
from flexkv.cache.disk.base import DiskCounts
from flexkv.cache.leases import NO_ENTRY, EntryIds
from flexkv.storage.base import Places, StoredPages
from flexkv.storage.striping import striped_slots
from flexkv.storage.tags import NEVER, TAG, TagFields, make_tags, tag_fields
from flexkv.transfer.graph import TAG_BYTES, PageTags


class StoredIndex:
    """The index of pages that are there, to be looked up and read. An entry is leased while an op uses its place.

    Epochs are even while the weights are those that the process loaded at its start, which is what the fingerprint of
    the folder names, and odd after a reset: then they are known to this process alone. What was written in an odd epoch
    is dropped by the next process, because nothing says that it has the same weights.

    Args:
        specs: the unit's KV groups.
        tier: what survives the process; also says how many places there are and what lies in them.
        policy: what is evicted first.
        now_s: Unix time in seconds; only times to live are read from it.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        tier: StoredPages,
        policy: str,
        now_s: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.counts = DiskCounts()
        if tier.epoch % 2:
            tier.reset(tier.epoch + 1)
        self.epoch = tier.epoch
        self._now_s = now_s
        slots = [tier.slots(group) for group in range(len(specs))]
        self.entries = BlockIndex(slots, policy)
        self._tags = [np.zeros(n, TAG) for n in slots]
        """Of each place, the tag that it was written with last."""
        self._any_expires = False
        self.any_partial = False
        """Whether a page, here or in host memory, may have other than `block_tokens` tokens."""
        self.block_tokens = specs[0].block_tokens
        for group, count in enumerate(slots):
            self.entries.grow(group, count)
            self._adopt(group)
        for disk, alive in enumerate(tier.alive):
            if not alive:
                self.lose(disk)

    def _adopt(self, group: int) -> None:
        rows = self.tier.rows(group)
        taken = self.entries.adopt(group, rows.keys, rows.places).view(np.bool_)
        tags = make_tags(
            rows.keys[taken], self.epoch, rows.generations[taken], rows.tokens[taken], rows.expiries[taken]
        )
        self._tags[group][rows.places[taken]] = tag_fields(tags)
        self._any_expires |= bool((rows.expiries != NEVER).any())
        self.any_partial |= bool((rows.tokens != self.block_tokens).any())

    def __len__(self) -> int:
        return len(self.entries)

    # --- lookups ---

    def leading(self, group: int, keys: Keys) -> EntryIds:
        """The entries of the leading keys that are on disk and have not expired."""
        entries = self.entries.match_prefix(group, keys)
        if not self._any_expires or not len(entries):
            return entries
        expired = self._expired(group, entries)
        if not expired.any():
            return entries
        self._drop_expired(group, entries[expired])
        return entries[: int(np.argmax(expired))]

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are on disk and have not expired, bool [keys]."""
        entries = self.entries.find(group, keys)
        there: NDArray[np.bool_] = entries != NO_ENTRY
        if self._any_expires and there.any():
            expired = self._expired(group, entries[there])
            if expired.any():
                self._drop_expired(group, entries[there][expired])
                there[np.flatnonzero(there)[expired]] = False
        return there

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are on disk or on their way to it, bool [keys]."""
        return np.asarray(self.entries.find(group, keys, ready_only=False) != NO_ENTRY)

    def _expired(self, group: int, entries: EntryIds) -> NDArray[np.bool_]:
        expiries = self._fields(group, self.entries.slots_of(entries))["expiry"]
        past: NDArray[np.bool_] = (expiries != NEVER) & (expiries <= self._now())
        return past

    def _drop_expired(self, group: int, entries: EntryIds) -> None:
        self.counts.expired += self.remove(group, entries)

    def _now(self) -> int:
        return max(0, int(self._now_s()))

    # --- reads ---

    def begin_read(self, group: int, keys: Keys, entries: EntryIds) -> tuple[Places, PageTags]:
        """Leases pages that are there until `end_read`.

        Args:
            entries: of `keys`, as a lookup found them.

        Returns:
            Their places, and what to ask for there.

        Raises:
            ContractError: an entry is not, or no longer, that of its key. Nothing is leased.
        """
        places = self.entries.pin_found(group, keys, entries)
        return places, self._tags_of(group, places)

    def end_read(self, group: int, entries: EntryIds, places: Places, suspect: NDArray[np.bool_]) -> None:
        """The pages marked in `suspect` did not hold what was asked for, and are forgotten."""
        self.tier.record_use(group, places)
        if suspect.any():
            self.remove(group, entries[suspect])
        self.entries.unpin(entries)

    def used(self, group: int, keys: Keys) -> None:
        """Pages that were used from host memory count as used here too, so that the disk keeps them."""
        entries = self.entries.find(group, keys)
        entries = entries[entries != NO_ENTRY]
        if len(entries):
            self.entries.touch(entries)
            self.tier.record_use(group, self.entries.slots_of(entries))

    def _tags_of(self, group: int, places: Places) -> PageTags:
        """The tags of places; to be read only, and while the places are leased."""
        # As whole numbers, five a tag: NumPy takes those four times as fast as records.
        rows = self._tags[group].view(np.uint64).reshape(-1, TAG_BYTES // 8)
        if not in_a_row(places):
            return rows.take(places, axis=0).view(np.uint8)
        # Written together, as most chains are: they need no copy.
        tags = rows[places[0] : places[0] + len(places)].view(np.uint8)
        tags.flags.writeable = False
        return tags

    def _fields(self, group: int, places: Places) -> TagFields:
        return tag_fields(self._tags_of(group, places))

    # --- leaving ---

    def remove(self, group: int, entries: EntryIds) -> int:
        """Makes pages misses; their places are free when no op touches them. Returns how many were there."""
        gone = self.entries.slots_of(entries[self.entries.ready(entries).view(np.bool_)])
        removed = int(np.count_nonzero(self.entries.remove(entries)))
        if len(gone):
            self.tier.record_evict(group, gone, self._fields(group, gone)["generation"].copy())
        return removed

    def forget(self, group: int, keys: Keys) -> int:
        """`remove` by key."""
        entries = self.entries.find(group, keys, ready_only=False)
        return self.remove(group, entries[entries != NO_ENTRY])

    def lose(self, disk: int) -> None:
        """A disk is gone for good, and what was on it a miss."""
        for group, tags in enumerate(self._tags):
            on_disk, _ = striped_slots(np.arange(len(tags), dtype=np.int32), self.tier.disks)
            gone = (on_disk == disk).astype(np.uint8)
            self.counts.gone += len(self.entries.retire(group, gone))

    def reset(self) -> None:
        """Forgets everything, durably."""
        self.entries.clear()
        self.epoch += 2 if self.epoch % 2 else 1
        self.tier.reset(self.epoch)
