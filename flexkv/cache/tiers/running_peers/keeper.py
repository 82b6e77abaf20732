"""Which pages this unit leaves to its peers, and which of them it must take over (`peers.store: once`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex, PeerDirectory
from flexkv.cache.base import NO_ENTRY, EntryIds
from flexkv.cache.tiers.contract import Keeper
from flexkv.facts.keys import KEY_BYTES, Keys, first_words
from flexkv.peers.share import DEPARTED_S, OnceCounts
from flexkv.transfer.graph import NEVER, SlotIds

NO_KEYS: Keys = np.zeros((0, KEY_BYTES), np.uint8)

TURN_S = 0.25
"""How long a unit leaves another's share of the orphans to that unit: a dozen looks at its board (`FOLLOW_S`)."""


class DepartedPeers(Protocol):
    """The part of `flexkv.peers.share.PeerShare` that says which peers have ended."""

    departed: tuple[int, ...]

    def end_departed(self, peers: Collection[int]) -> None: ...
    @property
    def turn(self) -> tuple[int, int]: ...


class PeerKeeper(Keeper):
    """Keeps a record for each page that this unit left out, at the page's place in the tier's index. So there are
    records only of pages that a peer has, and no more than the index has room for.

    Orphans are divided among the units, so that the units that left a page out do not all copy it. The running units
    are numbered, and a key belongs to one of them by its bits. Each unit begins with its own keys, and turns to those
    of the next unit every `TURN_S`. By then most of these are in that unit's memory, and are no longer orphans.

    Args:
        presence: the tier's index, whose `places` places have the records.
        present: which of the keys of a group the tier has and may serve.
        usable: whether the tier may be used now.
        clock: seconds, never running backwards.
    """

    def __init__(
        self,
        presence: BlockIndex,
        places: int,
        present: Callable[[int, Keys], NDArray[np.bool_]],
        usable: Callable[[], bool],
        directory: PeerDirectory,
        share: DepartedPeers,
        counts: OnceCounts,
        clock: Callable[[], float],
    ) -> None:
        self._presence, self._present, self._usable = presence, present, usable
        self._directory, self._share, self.counts, self._clock = directory, share, counts, clock
        self._left_out = np.zeros(places, np.bool_)
        self._keys = np.zeros((places, KEY_BYTES), np.uint8)
        """The key of the page in each place with a note."""
        self._groups = np.zeros(places, np.int32)
        """The page's KV group."""
        self._departed: tuple[int, ...] = ()
        """Peers for which `_orphans` was collected."""
        self._since_s = 0.0
        """When the last of these was found to have ended."""
        self._let_go: tuple[int, ...] = ()
        """Departed peers none of whose pages are needed any more. They stay known until another thread has unmapped
        them."""
        self._orphans: deque[tuple[int, Keys]] = deque()
        """Groups, each with keys of its pages."""

    # --- notifications of the tier ---

    def entered(self, places: SlotIds) -> None:
        """Called when other pages have these places."""
        self._left_out[places] = False

    def leaving(self, entries: EntryIds) -> None:
        """Called when the tier is about to remove these pages, because no peer has them any more, or none has an intact
        copy.
        """
        places = self._presence.slots_of(entries)
        self.counts.lost += int(np.count_nonzero(self._left_out[places]))
        self._left_out[places] = False

    def clear(self) -> None:
        """Called when the tier has no pages any more."""
        self._left_out[:] = False
        self._orphans.clear()

    # --- pages that the unit leaves out ---

    def kept(self, group: int, keys: Keys, expiry: int | None = None) -> NDArray[np.bool_]:
        if not self._usable():
            return np.zeros(len(keys), np.bool_)
        there = self._present(group, keys)
        if there.any():
            # The index may lack the latest news, and has the expiry of a holder that may have given the page up.
            running, expiries = self._running(group, keys[there], self._share.departed)
            if expiry is not None:
                lasts = expiries == NEVER
                if expiry != NEVER:
                    lasts |= expiries >= np.uint64(expiry)
                running &= lasts
            there[there] = running
        return there

    def _running(
        self, group: int, keys: Keys, departed: tuple[int, ...]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """Which of the keys a running peer has, bool [keys], and when its page expires."""
        peers, _, _, expiries, _ = self._directory.find(
            group, np.ascontiguousarray(keys), np.array(departed, np.int32)
        )
        return peers >= 0, expiries

    def leave_out(self, group: int, keys: Keys) -> None:
        entries = self._presence.find(group, keys)
        there = entries != NO_ENTRY
        places = self._presence.slots_of(entries[there])
        self.counts.left_out += int(np.count_nonzero(~self._left_out[places]))
        self._left_out[places] = True
        self._keys[places], self._groups[places] = keys[there], group

    def take_back(self, group: int, keys: Keys) -> None:
        entries = self._presence.find(group, keys)
        self._left_out[self._presence.slots_of(entries[entries != NO_ENTRY])] = False

    def promoted(self, pages: int) -> None:
        self.counts.promoted += pages

    # --- pages that the unit takes over ---

    @property
    def has_orphans(self) -> bool:
        return self._share.departed not in ((), self._let_go)

    def orphans(self, most: int) -> tuple[int, Keys]:
        departed = self._share.departed
        if departed != self._departed:
            if set(departed) - set(self._departed):
                self._since_s = self._clock()
                self._orphans = deque(self._noted(most))
            self._departed = departed
        if not departed or not self._orphans or not self._usable():
            return 0, NO_KEYS
        group, keys = self._orphans.popleft()
        entries = self._presence.find(group, keys)
        wanted = entries != NO_ENTRY
        wanted[wanted] = self._left_out[self._presence.slots_of(entries[wanted])]
        running, _ = self._running(group, keys[wanted], departed)
        wanted[wanted] = ~running
        keys = keys[wanted]
        mine = self._are_mine(keys)
        self.put_back(group, keys[~mine])
        return group, keys[mine]

    def _noted(self, most: int) -> Iterator[tuple[int, Keys]]:
        """The pages with a record, up to `most` of one group at a time. Groups with few come first: a hit needs pages
        of each group, and time or room may not suffice for all.
        """
        places = np.flatnonzero(self._left_out)
        groups = self._groups[places]
        pages = np.bincount(groups)
        for group in sorted(np.flatnonzero(pages).tolist(), key=lambda group: int(pages[group])):
            noted = self._keys[places[groups == group]]
            for at in range(0, len(noted), most):
                yield group, noted[at : at + most]

    def _are_mine(self, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys this unit should copy, bool [keys]."""
        number, units = self._share.turn
        # All turns must come before the memory is dropped.
        turn = int((self._clock() - self._since_s) / min(TURN_S, DEPARTED_S / 4 / units))
        shares = first_words(keys) % np.uint64(units)
        mine: NDArray[np.bool_] = shares == (number + turn) % units
        return mine

    def put_back(self, group: int, keys: Keys) -> None:
        if len(keys):
            self._orphans.append((group, keys))

    def end_orphans(self) -> None:
        departed = self._departed
        if not self._orphans and departed == self._share.departed:
            self._share.end_departed(departed)
            self._let_go = departed
