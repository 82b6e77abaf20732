"""The pages that this unit leaves to its peers, and those that it must copy after a peer has ended (`peers.store:
once`)."""

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
"""Seconds for which each share of the orphans (see `PeerKeeper`) is left to one unit. In this time, the other units
read that unit's list of pages (its board) about a dozen times (`FOLLOW_S`)."""


class DepartedPeers(Protocol):
    """The part of `flexkv.peers.share.PeerShare` that says which peers have ended.

    Attributes:
        departed: numbers that identify ended peers whose memory can still be read.
    """

    departed: tuple[int, ...]

    def end_departed(self, peers: Collection[int]) -> None: ...
    @property
    def turn(self) -> tuple[int, int]: ...


class PeerKeeper(Keeper):
    """Records for each slot of the tier's index whether this unit left out the page in the slot. So only pages that a
    peer has are recorded.

    Orphans are pages that this unit left out and that only ended peers have. They are divided among the running units,
    so that not every unit that left out a page copies it. The units are numbered, and the bits of a key assign it to
    one of them. Each unit begins with its own keys, and every `TURN_S` seconds goes on to the keys of the next unit.
    By then the next unit has copied most of those pages, so they are no longer orphans.

    Args:
        presence: the tier's index.
        places: number of slots of the index.
        present: returns which keys of a group the tier has and may serve.
        usable: returns whether the tier may be used now.
        directory: the pages that peers have.
        share: says which peers have ended.
        counts: totals of pages that were left out, promoted and lost.
        clock: returns seconds and never runs backwards.
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
        """For each slot whose page was left out, the page's key."""
        self._groups = np.zeros(places, np.int32)
        """For each slot whose page was left out, the page's KV group."""
        self._departed: tuple[int, ...] = ()
        """The ended peers for which `_orphans` was collected."""
        self._since_s = 0.0
        """Clock time at which the last of the peers in `_departed` was found to have ended."""
        self._let_go: tuple[int, ...] = ()
        """Ended peers whose pages are not needed any more. Each stays in `share.departed` until another thread has
        unmapped its memory."""
        self._orphans: deque[tuple[int, Keys]] = deque()
        """Pages that may be orphans, as pairs of a group and keys."""

    # --- notifications of the tier ---

    def entered(self, places: SlotIds) -> None:
        """Called when new pages were put into these slots of the index."""
        self._left_out[places] = False

    def leaving(self, entries: EntryIds) -> None:
        """Called when the tier is about to remove these pages because no peer has an intact copy any more. Pages that
        this unit left out are counted as lost."""
        places = self._presence.slots_of(entries)
        self.counts.lost += int(np.count_nonzero(self._left_out[places]))
        self._left_out[places] = False

    def clear(self) -> None:
        """Called when the tier has removed all its pages."""
        self._left_out[:] = False
        self._orphans.clear()

    # --- pages that the unit leaves out ---

    def kept(self, group: int, keys: Keys, expiry: int | None = None) -> NDArray[np.bool_]:
        if not self._usable():
            return np.zeros(len(keys), np.bool_)
        there = self._present(group, keys)
        if there.any():
            # The index may not be up to date, and an expiry time in it may come from a peer that has evicted the page
            # since.
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
        """Returns which of the keys a running peer has, bool [keys], and the Unix time in seconds at which the peer's
        page of each key expires, uint64 [keys]."""
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

    # --- pages that the unit copies from ended peers ---

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
        """Yields the pages that were left out: a group and up to `most` keys at a time. Groups with few pages come
        first, because a hit needs pages of every group, and there may not be time or slots for all pages.
        """
        places = np.flatnonzero(self._left_out)
        groups = self._groups[places]
        pages = np.bincount(groups)
        for group in sorted(np.flatnonzero(pages).tolist(), key=lambda group: int(pages[group])):
            noted = self._keys[places[groups == group]]
            for at in range(0, len(noted), most):
                yield group, noted[at : at + most]

    def _are_mine(self, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys this unit should copy in the current turn, bool [keys]."""
        number, units = self._share.turn
        # `TURN_S` is shortened if necessary, so that every unit has its turn before the ended peer's memory is
        # released.
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
