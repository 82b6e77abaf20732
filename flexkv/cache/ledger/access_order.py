"""The blocks each live request has used, so that they can be marked as used together.

A request stores its blocks chunk by chunk, so by age alone its first chunk would be evicted first, and the rest would
be useless without it. Marking all of them in order whenever their number has doubled, and once at the end, costs O(1) a
block. Entry numbers here are hints without a lease: one that was reused meanwhile only gets another block marked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRIES, EntryIds
from flexkv.cache.ledger.leases import GroupLease

MAX_REQUESTS = 16_384
"""Requests tracked at once; the oldest is dropped beyond. Far above what an engine runs; a bound on leaked ids."""


MOST_STORED = 4
"""Entries that an order keeps of its stores for each of its blocks: stores that fail are offered again and again."""

Part = tuple[int, NDArray[np.integer] | None, EntryIds]
"""First block, positions after it (None: one after the other), and the entry of each."""


class AccessOrder:
    """Entries of one request in one group, by block number. Parts are kept as they come and joined when read.

    What a lookup found is kept apart from the stores: an engine without free blocks looks a request up at every step,
    and each lookup replaces what the former one found. Where both have a block, the store's entry counts.

    Attributes:
        blocks: up to the last that is known.
        found: the leading ones, up to the last that the latest lookup found.
    """

    __slots__ = ("_looked_up", "_marked_blocks", "_parts", "_stored", "blocks", "found")

    def __init__(self) -> None:
        self._looked_up: tuple[Part, ...] = ()
        self._parts: list[Part] = []
        self._stored = 0
        """Entries in the stores' parts."""
        self.blocks = 0
        self.found = 0
        self._marked_blocks = 0

    def put_lookup(self, before: EntryIds, first_block: int, promised: EntryIds) -> None:
        """A lookup found `before` for the blocks from 0 on and `promised` for those from `first_block` on. Neither
        array may be changed later."""
        parts: tuple[Part, ...] = ()
        self.found = len(before)
        if len(before):
            parts = ((0, None, before),)
        if len(promised):
            parts += ((first_block, None, promised),)
            self.found = max(self.found, first_block + len(promised))
        self.blocks = max(self.blocks, self.found)
        self._looked_up = parts

    @property
    def parts(self) -> int:
        """Arrays that are kept."""
        return len(self._looked_up) + len(self._parts)

    def put_at(self, first_block: int, positions: NDArray[np.integer], entries: EntryIds) -> None:
        """Entry i is that of block `first_block + positions[i]`; ascending, at least one."""
        last = int(positions[-1])
        # The room for the part first: where this breaks off, what is kept still fits.
        self.blocks = max(self.blocks, first_block + last + 1)
        self._stored += len(entries)
        self._parts.append((first_block, None if last < len(positions) else positions, entries))
        if self._stored > MOST_STORED * self.blocks:
            self.entries()

    def entries(self) -> EntryIds:
        """Entry of each block, uint32 [blocks]; no entry at all where none was put."""
        parts = [*self._looked_up, *self._parts]
        if len(parts) == 1:
            first_block, positions, entries = parts[0]
            if first_block == 0 and positions is None:
                return entries
        joined = np.full(self.blocks, np.iinfo(np.uint32).max, np.uint32)
        for first_block, positions, entries in parts:
            if positions is None:
                joined[first_block : first_block + len(entries)] = entries
            else:
                joined[first_block:][positions] = entries
        self._looked_up, self._parts, self._stored = (), [(0, None, joined)], len(joined)
        return joined

    def due(self) -> bool:
        """Whether the blocks have doubled since this last said so."""
        if self.blocks < 2 * self._marked_blocks or self.blocks == self._marked_blocks:
            return False
        self._marked_blocks = self.blocks
        return True


class AccessOrders:
    """AccessOrders by request and group."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._access_orders: dict[str, tuple[AccessOrder, ...]] = {}

    def orders_of(self, request_id: str) -> tuple[AccessOrder, ...]:
        access_orders = self._access_orders.get(request_id)
        if access_orders is None:
            if len(self._access_orders) >= MAX_REQUESTS:
                del self._access_orders[next(iter(self._access_orders))]
            access_orders = tuple([AccessOrder() for _ in range(self._groups)])
            self._access_orders[request_id] = access_orders
        return access_orders

    def put_lookup(self, request_id: str, before: Sequence[EntryIds], promised: Sequence[GroupLease]) -> None:
        """A lookup used, per group, blocks that the engine has itself and those that it was promised; what an earlier
        lookup of the request found is forgotten."""
        if not before and not promised and request_id not in self._access_orders:
            return
        for group, order in enumerate(self.orders_of(request_id)):
            found = promised[group] if promised else None
            order.put_lookup(
                before[group] if before else NO_ENTRIES,
                found.first_block if found is not None else 0,
                found.entries[: found.blocks] if found is not None else NO_ENTRIES,
            )

    def peek(self, request_id: str, group: int) -> AccessOrder | None:
        access_orders = self._access_orders.get(request_id)
        return None if access_orders is None else access_orders[group]

    def pop_orders(self, request_id: str) -> tuple[AccessOrder, ...]:
        return self._access_orders.pop(request_id, ())

    def clear(self) -> None:
        self._access_orders.clear()
