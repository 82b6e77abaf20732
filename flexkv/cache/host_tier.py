"""The pages in host memory: which keys are in which slots, and who hears what appears there and what leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import CacheListener, GroupSpec, Keys
from flexkv.cache.leases import EntryIds
from flexkv.cache.reserve import reserve_pages
from flexkv.cache.stats import ManagerStats


class HostTier:
    """The host slots of one unit.

    Args:
        policy: eviction policy of every group's slots; allowed is "lru".
        counts: of the manager; evictions are counted there.
        listener: is told what becomes visible and what leaves.

    Attributes:
        index: keys to slots. Whoever changes it tells this tier what became visible and what it evicted.
        tokens: per group, valid tokens of the page in each slot, int32 [slots]; right only where there is a disk tier.
        on_evicted: is told of blocks that were evicted to make room, before the listener: the disk tier.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(
        self, specs: Sequence[GroupSpec], policy: str, counts: ManagerStats, listener: CacheListener | None
    ) -> None:
        self.index = BlockIndex([spec.slots for spec in specs], policy)
        self.tokens = [np.full(spec.slots, spec.block_tokens, np.int32) for spec in specs]
        self.on_evicted: Callable[[int, Keys], object] | None = None
        self._counts = counts
        self._listener = listener

    def published(self, group: int, entries: EntryIds) -> None:
        """Blocks became visible: stored, or brought up from disk."""
        if self._listener:
            self._listener.on_publish(group, self.index.keys_of(entries))

    def evicted(self, group: int, keys: Keys) -> None:
        """Blocks left to make room."""
        if not len(keys):
            return
        self._counts.evicted_blocks += len(keys)
        if self.on_evicted is not None:
            self.on_evicted(group, keys)
        if self._listener:
            self._listener.on_evict(group, keys)

    def remove(self, group: int, entries: EntryIds) -> int:
        """Makes blocks misses, visible or not; leased slots are freed with their last lease. Returns how many."""
        was_ready = self.index.ready(entries) if self._listener else None
        keys = self.index.keys_of(entries[was_ready.view(np.bool_)]) if was_ready is not None else None
        removed = int(np.count_nonzero(self.index.remove(entries)))
        if self._listener and keys is not None and len(keys):
            self._listener.on_evict(group, keys)
        return removed

    def refill_reserve(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks where fewer slots are free than `reserve_pages` says."""
        missing = reserve_pages(self.index.up_slots(group)) - self.index.free_slots(group)
        if missing > 0:
            self.evicted(group, self.index.evict(group, min(missing, most)))
