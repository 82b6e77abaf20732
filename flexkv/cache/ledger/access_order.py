"""Records which blocks each live request has used, so that all of them can be marked as used together.

A request stores its blocks chunk by chunk. If only age counted, its first chunk would be evicted first, and its other
blocks would be useless without that chunk. So all its blocks are marked as used, in order, whenever their number has
doubled and once at the request's end. This costs O(1) per block. The entries recorded here are not pinned. If an entry
was given to another block meanwhile, that block is marked as used, which does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_ENTRIES, EntryIds
from flexkv.cache.ledger.leases import GroupLease

MAX_REQUESTS = 16_384
"""Maximum number of tracked requests; if it is exceeded, the oldest is dropped. Engines run far fewer requests. The
limit bounds the memory for requests whose end is never reported."""


MOST_STORED = 4
"""Maximum number of entries from stores, per block, before `AccessOrder` joins its arrays into one. Without this limit,
a block that is offered again and again because its store fails would add entries without end."""

Part = tuple[int, NDArray[np.integer] | None, EntryIds]
"""First block number, the blocks' positions relative to it (None if consecutive), and the entry of each block."""


class AccessOrder:
    """The index entries of one request in one group, by block number. Added arrays are kept as they are, and joined
    when `entries` is called.

    Entries from lookups and entries from stores are recorded separately: an engine without free blocks looks a request
    up at every step, and each lookup replaces only the entries of the previous lookup. If a block has an entry from a
    lookup and one from a store, the store's entry counts.

    Attributes:
        blocks: number of leading blocks of the request up to the last block with an entry.
        found: number of leading blocks of the request up to the last block that the latest lookup found.
    """

    __slots__ = ("_looked_up", "_marked_blocks", "_parts", "_stored", "blocks", "found")

    def __init__(self) -> None:
        self._looked_up: tuple[Part, ...] = ()
        self._parts: list[Part] = []
        self._stored = 0
        """Number of entries that came from stores since the parts were last joined."""
        self.blocks = 0
        self.found = 0
        self._marked_blocks = 0

    def put_lookup(self, before: EntryIds, first_block: int, promised: EntryIds) -> None:
        """Replaces the entries of the previous lookup. `before` are the entries of the blocks from block 0 on,
        `promised` those of the blocks from `first_block` on. The caller must not change the arrays afterwards."""
        parts: tuple[Part, ...] = ((0, None, before),) if len(before) else ()
        found = len(before)
        if len(promised):
            parts += ((first_block, None, promised),)
            # This method compares instead of calling `max`, because that call takes longer than the rest of the method.
            if (end := first_block + len(promised)) > found:
                found = end
        if found > self.blocks:
            self.blocks = found
        self.found = found
        self._looked_up = parts

    @property
    def parts(self) -> int:
        """Number of arrays that are not joined yet."""
        return len(self._looked_up) + len(self._parts)

    def put_at(self, first_block: int, positions: NDArray[np.integer], entries: EntryIds) -> None:
        """Adds entries from a store: `entries[i]` is the entry of block `first_block + positions[i]`.

        Args:
            positions: positions of the blocks after `first_block`, ascending; at least one.
        """
        last = int(positions[-1])
        # `blocks` grows first, so that no part extends beyond it if this method is interrupted.
        self.blocks = max(self.blocks, first_block + last + 1)
        self._stored += len(entries)
        self._parts.append((first_block, None if last < len(positions) else positions, entries))
        if self._stored > MOST_STORED * self.blocks:
            self.entries()

    def entries(self) -> EntryIds:
        """Returns the entry of each block, uint32 [blocks]; NO_ENTRY for a block without one. The joined array replaces
        the arrays from which it was made."""
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
        """Returns whether the number of blocks has at least doubled since it was last recorded; if so, records it."""
        if self.blocks < 2 * self._marked_blocks or self.blocks == self._marked_blocks:
            return False
        self._marked_blocks = self.blocks
        return True


class AccessOrders:
    """The access orders of all requests, by request and group."""

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
        """Replaces the entries of the request's previous lookup.

        Args:
            before: per group, entries of the blocks that the engine has itself; empty for no blocks.
            promised: per group, the blocks that the lookup promised; empty if it promised nothing.
        """
        if not before and not promised and request_id not in self._access_orders:
            return
        for group, order in enumerate(self.orders_of(request_id)):
            first_block, entries = 0, NO_ENTRIES
            if promised:
                share = promised[group]
                first_block, entries = share.first_block, share.entries
                if len(entries) != share.blocks:  # the last entry is the tail's
                    entries = entries[: share.blocks]
            order.put_lookup(before[group] if before else NO_ENTRIES, first_block, entries)

    def peek(self, request_id: str, group: int) -> AccessOrder | None:
        access_orders = self._access_orders.get(request_id)
        return None if access_orders is None else access_orders[group]

    def pop_orders(self, request_id: str) -> tuple[AccessOrder, ...]:
        return self._access_orders.pop(request_id, ())

    def clear(self) -> None:
        self._access_orders.clear()
