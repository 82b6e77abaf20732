"""The blocks each live request has used, so that they can be marked as used together.

A request stores its blocks chunk by chunk, so by age alone its first chunk would be evicted first, and the rest would
be useless without it. Marking all of them in order whenever their number has doubled, and once at the end, costs O(1) a
block. Entry numbers here are hints without a lease: one that was reused meanwhile only gets another block marked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.leases import NO_ENTRIES, EntryIds

MAX_TRAILS = 16_384
"""Requests tracked at once; the oldest is dropped beyond. Far above what an engine runs; a bound on leaked ids."""


class Trail:
    """Entries of one request in one group, by block number."""

    __slots__ = ("_entries", "_marked_blocks", "blocks")

    def __init__(self) -> None:
        self._entries: EntryIds = NO_ENTRIES
        self.blocks = 0
        self._marked_blocks = 0

    def put(self, first_block: int, entries: EntryIds) -> None:
        end = first_block + len(entries)
        if end > len(self._entries):
            grown = np.full(max(end, 2 * len(self._entries)), np.iinfo(np.uint32).max, np.uint32)
            grown[: self.blocks] = self._entries[: self.blocks]
            self._entries = grown
        self._entries[first_block:end] = entries
        self.blocks = max(self.blocks, end)

    def put_at(self, block_numbers: NDArray[np.int64], entries: EntryIds) -> None:
        """`block_numbers` ascending."""
        last = int(block_numbers[-1])
        if last >= len(self._entries):
            self.put(last, entries[-1:])
        self._entries[block_numbers] = entries
        self.blocks = max(self.blocks, last + 1)

    def entries(self) -> EntryIds:
        return self._entries[: self.blocks]

    def due(self) -> bool:
        """Whether the blocks have doubled since this last said so."""
        if self.blocks < 2 * self._marked_blocks or self.blocks == self._marked_blocks:
            return False
        self._marked_blocks = self.blocks
        return True


class TrailTable:
    """Trails by request and group."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._trails: dict[str, tuple[Trail, ...]] = {}

    def of(self, request_id: str) -> tuple[Trail, ...]:
        trails = self._trails.get(request_id)
        if trails is None:
            if len(self._trails) >= MAX_TRAILS:
                del self._trails[next(iter(self._trails))]
            trails = self._trails[request_id] = tuple(Trail() for _ in range(self._groups))
        return trails

    def peek(self, request_id: str, group: int) -> Trail | None:
        trails = self._trails.get(request_id)
        return None if trails is None else trails[group]

    def pop(self, request_id: str) -> tuple[Trail, ...]:
        return self._trails.pop(request_id, ())

    def clear(self) -> None:
        self._trails.clear()
