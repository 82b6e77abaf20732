"""What is on the unit's own disks: an index of pages that are there, and of those on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupSpec, Keys
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.leases import EntryIds
from flexkv.storage.base import DiskTier, Places
from flexkv.storage.tags import NEVER, make_tags, tag_fields
from flexkv.transfer.graph import PageTags


class DiskIndex(StoredIndex):
    """The index of one unit's disks, which it also writes.

    Args:
        ttl_s: see `DiskLimits`.
        others: as of `StoredIndex`.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        tier: DiskTier,
        policy: str,
        now_s: Callable[[], float],
        ttl_s: int | None = None,
    ) -> None:
        super().__init__(specs, tier, policy, now_s)
        self._written = tier
        self._ttl_s = ttl_s
        self._any_expires |= ttl_s is not None

    def begin_write(
        self, group: int, keys: Keys, tokens: NDArray[np.int32], room: int
    ) -> tuple[NDArray[np.uint32], EntryIds, Places, PageTags]:
        """Gives a place to keys that have none, evicting what is used least, for at most `room` of them.

        Returns:
            Positions in `keys` of those that got one, their entries (leased until `end_write`), places and tags.
        """
        positions, entries, places, evicted, _, _ = self.entries.insert(group, keys, room)
        self.counts.evicted += len(evicted)
        former = self._fields(group, places)["generation"]
        if former.any():
            # Before the place is written, so that no crash leaves an index that still believes in its old content.
            self.tier.record_evict(group, places[former != 0], former[former != 0])
        expiry = NEVER if self._ttl_s is None else self._now() + self._ttl_s
        generations = self._written.next_generations(len(places))
        tags = make_tags(keys[positions], self.epoch, generations, tokens[positions], expiry)
        self._tags[group][places] = tag_fields(tags)
        return positions, entries, places, tags

    def under_way(self, group: int, entries: EntryIds) -> NDArray[np.bool_]:
        """Which of these entries, leased since `begin_write`, are still to become visible, bool [entries]."""
        return np.asarray(
            self.entries.find(group, self.entries.keys_of(entries), ready_only=False) == entries
        )

    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Makes pages visible whose bytes are all in place; returns which became so."""
        places, keys = self.entries.slots_of(entries), self.entries.keys_of(entries)
        published = self.entries.finish(entries, good.view(np.uint8)).view(np.bool_)
        there = places[published]
        if len(there):
            tags = self._fields(group, there)
            self._written.record_publish(
                group,
                keys[published],
                there,
                tags["generation"].copy(),
                tags["tokens"].astype(np.int32),
                tags["expiry"].copy(),
            )
        return published
