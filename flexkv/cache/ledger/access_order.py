"""The blocks each live request has used, so that they can be marked as used together.

A request stores its blocks chunk by chunk. By age alone its first chunk would be evicted first, and the rest would be
useless without it. All of them are therefore marked in order whenever their number has doubled, and once at the end,
which costs O(1) per block. Entry numbers here are hints without a lease: if one was reused meanwhile, another block
gets marked, and nothing worse happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRIES, EntryIds
from flexkv.cache.ledger.leases import GroupLease

MAX_REQUESTS = 16_384
"""Requests tracked at once; beyond it the oldest is dropped. Far above what an engine runs: it bounds the ids that
leak."""


MOST_STORED = 4
"""Entries from stores that an order keeps per block at most: an engine offers a failed store again and again."""

Part = tuple[int, NDArray[np.integer] | None, EntryIds]
"""First block, positions relative to it (None: consecutive), and the entry at each position."""


class AccessOrder:
    """Entries of one request in one group, by block number. Parts are kept as they arrive and joined when they are
    read.

    Entries from lookups are kept apart from those of stores, because an engine without free blocks looks a request up
    at every step, and each lookup replaces the entries of the one before. If both have a block, the store's entry takes
    precedence.

    Attributes:
        blocks: number of blocks up to the last one with a known entry.
        found: number of blocks up to the last one that the latest lookup found.
    """

    __slots__ = ("_looked_up", "_marked_blocks", "_parts", "_stored", "blocks", "found")

    def __init__(self) -> None:
        self._looked_up: tuple[Part, ...] = ()
        self._parts: list[Part] = []
        self._stored = 0
        """Entries in the parts that came from stores."""
        self.blocks = 0
        self.found = 0
        self._marked_blocks = 0

    def put_lookup(self, before: EntryIds, first_block: int, promised: EntryIds) -> None:
        """Replaces the entries of the last lookup: `before` for the blocks from 0 on, `promised` for those from
        `first_block` on. The caller must not change either array later."""
        parts: tuple[Part, ...] = ((0, None, before),) if len(before) else ()
        found = len(before)
        if len(promised):
            parts += ((first_block, None, promised),)
            # Comparisons here and below, because `max` takes longer than the rest of this method.
            if (end := first_block + len(promised)) > found:
                found = end
        if found > self.blocks:
            self.blocks = found
        self.found = found
        self._looked_up = parts

    @property
    def parts(self) -> int:
        """Number of arrays kept."""
        return len(self._looked_up) + len(self._parts)

    def put_at(self, first_block: int, positions: NDArray[np.integer], entries: EntryIds) -> None:
        """Adds entries from a store: entry i is that of block `first_block + positions[i]`. `positions` ascend; there
        is at least one."""
        last = int(positions[-1])
        # `blocks` grows before the part is added: if this method is interrupted, the parts still fit.
        self.blocks = max(self.blocks, first_block + last + 1)
        self._stored += len(entries)
        self._parts.append((first_block, None if last < len(positions) else positions, entries))
        if self._stored > MOST_STORED * self.blocks:
            self.entries()

    def entries(self) -> EntryIds:
        """Entry of each block, uint32 [blocks]; NO_ENTRY for blocks without one. Keeps the joined array in place of the
        parts."""
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

    def mark_doubled(self) -> bool:
        """Records the number of blocks if it has doubled since it was last recorded, and returns whether it had."""
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
        """Replaces what the request's last lookup found. Per group, `before` are the blocks that the engine has itself,
        and `promised` those that the lookup promised."""
        if not before and not promised and request_id not in self._access_orders:
            return
        for group, order in enumerate(self.orders_of(request_id)):
            first_block, entries = 0, NO_ENTRIES
            if promised:
                share = promised[group]
                first_block, entries = share.first_block, share.entries
                if len(entries) != share.blocks:  # a tail follows
                    entries = entries[: share.blocks]
            order.put_lookup(before[group] if before else NO_ENTRIES, first_block, entries)

    def peek(self, request_id: str, group: int) -> AccessOrder | None:
        access_orders = self._access_orders.get(request_id)
        return None if access_orders is None else access_orders[group]

    def pop_orders(self, request_id: str) -> tuple[AccessOrder, ...]:
        return self._access_orders.pop(request_id, ())

    def clear(self) -> None:
        self._access_orders.clear()
