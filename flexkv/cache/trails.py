"""The blocks each live request has used, so that they can be marked as used together.

A request stores its blocks chunk by chunk, so by age alone its first chunk would be evicted first, and the rest would
be useless without it. Marking all of them in order whenever their number has doubled, and once at the end, costs O(1) a
block. Entry numbers here are hints without a lease: one that was reused meanwhile only gets another block marked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.leases import EntryIds, GroupLease

MAX_TRAILS = 16_384
"""Requests tracked at once; the oldest is dropped beyond. Far above what an engine runs; a bound on leaked ids."""


class Trail:
    """Entries of one request in one group, by block number. Parts are kept as they come and joined when read."""

    __slots__ = ("_marked_blocks", "_parts", "blocks")

    def __init__(self) -> None:
        self._parts: list[tuple[int, NDArray[np.integer] | None, EntryIds]] = []
        self.blocks = 0
        self._marked_blocks = 0

    def put(self, first_block: int, entries: EntryIds) -> None:
        """`entries` are those of the blocks from `first_block` on; the array must not be changed later."""
        if len(entries):
            self._parts.append((first_block, None, entries))
            self.blocks = max(self.blocks, first_block + len(entries))

    def put_at(self, first_block: int, positions: NDArray[np.integer], entries: EntryIds) -> None:
        """Entry i is that of block `first_block + positions[i]`; ascending, at least one."""
        last = int(positions[-1])
        self._parts.append((first_block, None if last < len(positions) else positions, entries))
        self.blocks = max(self.blocks, first_block + last + 1)

    def entries(self) -> EntryIds:
        """Entry of each block, uint32 [blocks]; no entry at all where none was put."""
        if len(self._parts) == 1:
            first_block, positions, entries = self._parts[0]
            if first_block == 0 and positions is None:
                return entries
        joined = np.full(self.blocks, np.iinfo(np.uint32).max, np.uint32)
        for first_block, positions, entries in self._parts:
            if positions is None:
                joined[first_block : first_block + len(entries)] = entries
            else:
                joined[first_block:][positions] = entries
        self._parts = [(0, None, joined)]
        return joined

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

    def put_lookup(self, request_id: str, before: Sequence[EntryIds], promised: Sequence[GroupLease]) -> None:
        """A lookup used, per group, blocks that the engine has itself and those that it was promised."""
        trails = self.of(request_id)
        for trail, entries in zip(trails, before, strict=False):
            trail.put(0, entries)
        for trail, group in zip(trails, promised, strict=False):
            trail.put(group.first_block, group.entries[: group.blocks])

    def peek(self, request_id: str, group: int) -> Trail | None:
        trails = self._trails.get(request_id)
        return None if trails is None else trails[group]

    def pop(self, request_id: str) -> tuple[Trail, ...]:
        return self._trails.pop(request_id, ())

    def clear(self) -> None:
        self._trails.clear()
