"""When pages in host memory expire (`flexkv.ttl_s` of the request that stored them), and which keys expired recently.

The index does not know these times. Instead, the hub drops expired pages before each lookup (`Hub.drop_expired`). That
costs one comparison, and nothing in a cache without pages that expire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.transfer.graph import NEVER, SlotIds

Expiries = NDArray[np.uint64]
"""Unix seconds from which on a page is a miss; NEVER for a page that does not expire."""

NOTED_PAGES = 4096
"""Notes are thinned out once they name more pages than this and twice the slots: pages that left before their time
leave their notes."""

REMEMBERED = 16_384
"""Most expired keys that are remembered, so that a miss can be named: a comparison with all of them takes some 20
us."""


def earlier(one: Expiries, other: Expiries | int) -> Expiries:
    """The earlier of two times, element by element; NEVER is later than all others."""
    is_later = (one == NEVER) | ((np.uint64(NEVER) != other) & (other < one))
    both: Expiries = np.where(is_later, np.asarray(other, np.uint64), one)
    return both


class PageTimes:
    """The expiry of the page in each host slot. Pages that expire in the same second are recorded together, by their
    keys.

    Args:
        slots: host slots of each group.
        owners: for each group, the group that owns its slots.

    Attributes:
        any: some page has had an expiry since this was made. While it is False, no other method need be called.
    """

    def __init__(self, slots: Sequence[int], owners: Sequence[int]) -> None:
        self._slots, self._owners = slots, owners
        self._of_slot: dict[int, Expiries] = {}
        self._seconds: list[int] = []
        """A heap of the keys of `_noted`."""
        self._noted: dict[int, list[tuple[int, Keys]]] = {}
        self._pages = 0
        """Pages in `_noted`."""
        self.any = False

    def set(self, group: int, slots: SlotIds, keys: Keys, expiries: Expiries | int) -> None:
        """Records when the pages expire with which `slots` are filled."""
        of_slot = self._table(group)
        of_slot[slots] = expiries
        for second in np.unique(of_slot[slots]).tolist():
            if second == NEVER:
                continue
            self.any = True
            if second not in self._noted:
                heappush(self._seconds, second)
            chosen = keys[of_slot[slots] == second]
            self._noted.setdefault(second, []).append((group, chosen))
            self._pages += len(chosen)

    def of(self, group: int, slots: SlotIds) -> Expiries:
        """When the pages in these slots expire."""
        times: Expiries = self._table(group)[slots]
        return times

    def first_due(self, now_s: int) -> Sequence[tuple[int, Keys]]:
        """The pages, by group, that expire first, if their time has come; else none. Some may have left, or been stored
        again with another expiry.
        """
        if not self._seconds or self._seconds[0] > now_s:
            return ()
        return self._noted[self._seconds[0]]

    def end_first(self) -> None:
        """Drops the records of the pages that `first_due` returns: they have left."""
        self._pages -= sum(len(keys) for _, keys in self._noted.pop(heappop(self._seconds)))

    def thin_out(self, slots_of: Callable[[int, Keys], tuple[NDArray[np.bool_], SlotIds]]) -> None:
        """Drops records of pages that left before their time, if there are many.

        Args:
            slots_of: tells which of a group's keys are in host memory, and the slots of these.
        """
        if self._pages <= NOTED_PAGES + 2 * sum(self._slots):
            return
        noted, self._noted, self._seconds, self._pages = self._noted, {}, [], 0
        for second, pages in noted.items():
            for group, keys in pages:
                there, slots = slots_of(group, keys)
                kept = self.of(group, slots) == second
                if kept.any():
                    self.set(group, slots[kept], np.unique(keys[there][kept], axis=0), second)

    def clear(self) -> None:
        """Called when every page has left."""
        self._noted.clear()
        self._seconds.clear()
        self._pages = 0

    def _table(self, group: int) -> Expiries:
        owner = self._owners[group]
        if owner not in self._of_slot:
            self._of_slot[owner] = np.full(self._slots[owner], NEVER, np.uint64)
        return self._of_slot[owner]


class ExpiredKeys:
    """Keys of pages that expired recently, the last REMEMBERED of all tiers."""

    def __init__(self) -> None:
        self._keys: NDArray[np.uint64] | None = None
        self._next = 0

    def add(self, keys: Keys) -> None:
        if self._keys is None:
            self._keys = np.zeros((REMEMBERED, KEY_BYTES // 8), np.uint64)
        new = np.ascontiguousarray(keys[-REMEMBERED:]).view(np.uint64)
        self._keys[(self._next + np.arange(len(new))) % REMEMBERED] = new
        self._next = (self._next + len(new)) % REMEMBERED

    def holds(self, key: Keys) -> bool:
        """Whether a key, shape [1, KEY_BYTES], is among them."""
        if self._keys is None:
            return False
        return bool((self._keys == np.ascontiguousarray(key).view(np.uint64)).all(axis=1).any())
