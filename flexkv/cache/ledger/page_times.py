"""The times at which pages in host memory expire, and the keys that expired recently. A page expires `flexkv.ttl_s`
seconds after a request with this setting stored it.

The index of host memory does not contain these times. Instead, the hub drops expired pages before each lookup
(`Hub.drop_expired`). That costs one comparison if no page is due, and nothing if no page has a time to live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.transfer.graph import NEVER, SlotIds

Expiries = NDArray[np.uint64]
"""Per page, the Unix time in seconds at which the page becomes a miss; NEVER for a page that does not expire."""

NOTED_PAGES = 4096
"""Records of expiry times are thinned out when there are more than this number plus twice the number of slots.
Otherwise the record of a page that was evicted before it expired would stay until its expiry time."""

REMEMBERED = 16_384
"""Maximum number of remembered expired keys, which are needed to find the reason of a miss. Comparing a key with all of
them takes about 20 us."""


def earlier(one: Expiries, other: Expiries | int) -> Expiries:
    """Returns the earlier of two times, element by element. NEVER is later than all other times."""
    is_later = (one == NEVER) | ((np.uint64(NEVER) != other) & (other < one))
    both: Expiries = np.where(is_later, np.asarray(other, np.uint64), one)
    return both


class PageTimes:
    """The expiry time of the page in each host slot, and the keys of the pages that expire in each second.

    Args:
        slots: number of host slots of each group.
        owners: for each group, the number of the group that owns its slots.

    Attributes:
        any: whether any page has ever had an expiry time. While it is False, no other method need be called.
    """

    def __init__(self, slots: Sequence[int], owners: Sequence[int]) -> None:
        self._slots, self._owners = slots, owners
        self._of_slot: dict[int, Expiries] = {}
        self._seconds: list[int] = []
        """The seconds in `_noted`, as a heap."""
        self._noted: dict[int, list[tuple[int, Keys]]] = {}
        """For each Unix second in which pages expire, the groups and keys of these pages."""
        self._pages = 0
        """Number of pages in `_noted`."""
        self.any = False

    def set(self, group: int, slots: SlotIds, keys: Keys, expiries: Expiries | int) -> None:
        """Records the expiry times of the pages with which `slots` are filled.

        Args:
            keys: the key of the page in each slot.
            expiries: the expiry time of each page, or one time for all.
        """
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
        """Returns the expiry times of the pages in these slots."""
        times: Expiries = self._table(group)[slots]
        return times

    def first_due(self, now_s: int) -> Sequence[tuple[int, Keys]]:
        """Returns the groups and keys of the pages with the earliest expiry time; empty if that time is after `now_s`.
        Some of the pages may no longer be in host memory, or may have been stored again with another expiry time.
        """
        if not self._seconds or self._seconds[0] > now_s:
            return ()
        return self._noted[self._seconds[0]]

    def end_first(self) -> None:
        """Drops the records of the pages that `first_due` returned, which the caller has removed from host memory."""
        self._pages -= sum(len(keys) for _, keys in self._noted.pop(heappop(self._seconds)))

    def thin_out(self, slots_of: Callable[[int, Keys], tuple[NDArray[np.bool_], SlotIds]]) -> None:
        """If there are many records, drops those of pages that left host memory before they expired.

        Args:
            slots_of: returns, for a group and keys, which of the keys are in host memory, and the slots of these keys.
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
        """Drops all records. Called when host memory has no page any more."""
        self._noted.clear()
        self._seconds.clear()
        self._pages = 0

    def _table(self, group: int) -> Expiries:
        owner = self._owners[group]
        if owner not in self._of_slot:
            self._of_slot[owner] = np.full(self._slots[owner], NEVER, np.uint64)
        return self._of_slot[owner]


class ExpiredKeys:
    """The keys of pages that expired recently in any tier, at most REMEMBERED keys."""

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
        """Whether a page with this key, shape [1, KEY_BYTES], expired recently."""
        if self._keys is None:
            return False
        return bool((self._keys == np.ascontiguousarray(key).view(np.uint64)).all(axis=1).any())
