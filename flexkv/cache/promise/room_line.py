"""Who waits for room in host memory: a fetch begins when all of its pages find a slot, and requests take turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from flexkv.cache.base import HUB, NO_ENTRY, TierId
from flexkv.cache.ledger.leases import GroupLease
from flexkv.cache.moves.fetches import Promotions, WantedPages
from flexkv.cache.tiers.tables import CacheTables

MAX_IN_LINE = 4096
"""Requests in line at most; further ones go on without room."""

MAX_TURN_S = 1.0
"""At most this much of the time between two questions counts as waited. An engine that has room for the request asks at
every step; a longer pause means that it has none."""


class Turn(Enum):
    """What a request may do now."""

    FETCH = "fetch"
    """Everything that it lacks finds room."""
    FETCH_SOME = "fetch some"
    """It takes the room that there is, and goes on without the rest."""
    WAIT = "wait"
    """Room will come: its engine asks again."""
    GO_ON = "go on"
    """It takes no room, and goes on without what it lacks."""


@dataclass(slots=True)
class Need:
    """What a fetch of all that a request lacks would take.

    Attributes:
        slots: of host memory, by group with slots of its own.
        held: the request's own pages in host memory, or on their way there, likewise.
        pages: by the tier that they come from.
        fetches: ops, likewise.
    """

    slots: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    pages: dict[TierId, int] = field(default_factory=dict)
    fetches: dict[TierId, int] = field(default_factory=dict)


@dataclass(slots=True)
class Place:
    """One request's place in the line.

    Attributes:
        need: what it lacks; of slots also those of what it had in host memory and leases no more.
        wait_s: it waits so long at most.
        waited_s: so far.
        before: number of the engine's last question but one about it; questions are numbered over all requests.
        asked: number of the last question about it.
        asked_s: the clock then.
    """

    need: Need
    wait_s: float
    before: int
    asked: int
    asked_s: float
    waited_s: float = 0.0


class RoomLine:
    """Gives room for fetches to whole prompts, in the order in which their requests first asked for it.

    Who waits for room holds none: no lease, nothing fetched. So whatever keeps slots from the request whose turn it is
    belongs to requests that have all they need, or to ops, and ends by itself; two requests never wait for each other.

    A request that finds room for itself does not pass one before it: else small prompts would keep a large one waiting.
    It passes only those that were not asked about since its own last question but one, whatever the order in which the
    engine asks in each step: the engine has no use for them now.

    Args:
        asks_again: the engine asks again for a request whose lookup says so. Else nobody waits, and each takes what
            room there is.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, asks_again: bool) -> None:
        self._tables = tables
        self._promotions = promotions
        self._asks_again = asks_again
        self._places: dict[str, Place] = {}
        self._without: set[str] = set()
        """Requests that went on without some of their pages: counted once, and in line no more."""
        self._questions = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    # --- what a fetch takes ---

    def need_of(self, wanted: Sequence[WantedPages], leased: Sequence[GroupLease]) -> Need:
        """What a fetch of `wanted` takes, for a request that leases `leased` besides."""
        need, index = Need(), self._tables.hub.index
        for group, share in enumerate(leased):
            owner = self._tables.hub.owner(group)
            need.held[owner] = need.held.get(owner, 0) + len(share.entries)
        for part in wanted:
            owner, at = self._tables.hub.owner(part.group), 0
            tiers = set()
            for run in part.runs:
                keys = part.keys[at : at + len(run)]
                at += len(run)
                if run.tier == HUB:
                    need.held[owner] = need.held.get(owner, 0) + len(run)
                    continue
                found = index.find(part.group, keys, ready_only=False)
                known = found[found != NO_ENTRY]
                lacking = len(keys) - len(known)
                # The request has no lease on pages behind a gap, which must not be evicted for it.
                unleased = int(np.count_nonzero(index.pins_of(known) == 0)) if len(known) else 0
                need.slots[owner] = need.slots.get(owner, 0) + lacking + unleased
                need.pages[run.tier] = need.pages.get(run.tier, 0) + lacking
                if lacking:
                    tiers.add(run.tier)
            for tier in tiers:
                need.fetches[tier] = need.fetches.get(tier, 0) + 1
        return need

    def fits_at_once(self, wanted: Sequence[WantedPages]) -> bool:
        """Whether nobody waits, and there is room for all of `wanted` even if host memory has none of it. Says so
        without a look at the pages."""
        if self._places:
            return False
        need = Need()
        for part in wanted:
            owner = self._tables.hub.owner(part.group)
            for run in part.runs:
                if run.tier != HUB:
                    need.slots[owner] = need.slots.get(owner, 0) + len(run)
                    need.pages[run.tier] = need.pages.get(run.tier, 0) + len(run)
                    need.fetches[run.tier] = need.fetches.get(run.tier, 0) + 1
        return self._has_room(need)

    def _has_room(self, need: Need) -> bool:
        """Whether all of it finds room now."""
        index = self._tables.hub.index
        if any(slots > index.idle_slots(owner) for owner, slots in need.slots.items()):
            return False
        return all(
            self._promotions.has_room(tier, need.pages[tier], fetches)
            for tier, fetches in need.fetches.items()
        )

    def _fits(self, need: Need) -> bool:
        """Whether all of it would find room if nothing else took any."""
        for owner, slots in need.slots.items():
            if need.held.get(owner, 0) + slots > self._tables.specs[owner].slots:
                return False
        for tier, fetches in need.fetches.items():
            facts = self._tables.tiers[tier].facts
            if need.pages[tier] > facts.fetch_pages or fetches > facts.fetch_ops:
                return False
        return True

    # --- the line ---

    def take_turn(self, request_id: str, need: Need, wait_s: float) -> Turn:
        """A lookup asks for room. If its request must wait it gets a place in line, otherwise it leaves the line.

        Args:
            wait_s: seconds that it waits at most.
        """
        if not self._asks_again:
            return Turn.FETCH if self._has_room(need) else Turn.FETCH_SOME
        place = self._places.get(request_id)
        if not need.fetches or (self._is_first(place) and self._has_room(need)):
            self.leave(request_id)
            return Turn.FETCH
        fits = self._fits(need)
        if fits and request_id not in self._without and self._note_question(request_id, place, need, wait_s):
            return Turn.WAIT
        self.leave(request_id)
        # What never fits whole leaves the room to those who wait for it.
        return Turn.GO_ON if fits or self._places else Turn.FETCH_SOME

    def _note_question(self, request_id: str, place: Place | None, need: Need, wait_s: float) -> bool:
        """Whether the request has a place in the line, and time left."""
        if place is None:
            if len(self._places) >= MAX_IN_LINE:
                return False
            place = Place(need, wait_s, 0, 0, self._tables.clock())
            self._places[request_id] = place
        place.need = need
        self._asked(place)
        return place.waited_s <= place.wait_s

    def _asked(self, place: Place) -> None:
        now_s = self._tables.clock()
        place.waited_s += min(now_s - place.asked_s, MAX_TURN_S)
        self._questions += 1
        place.before, place.asked, place.asked_s = place.asked, self._questions, now_s

    def _is_first(self, place: Place | None) -> bool:
        """Whether the engine has asked about no request ahead of this one since its last question but one about it."""
        if place is None:
            return not self._places
        for other in self._places.values():
            if other is place:
                break
            if other.asked > place.before:
                return False
        return True

    def still_waits(self, request_id: str, reads: bool) -> bool:
        """Notes that the engine asks for the request again; whether a lookup would find that it has to wait. O(1).

        Args:
            reads: it waits for reads or answers in any case.
        """
        place = self._places.get(request_id)
        if place is None:
            return reads
        if not reads and self._may_go(place):
            return False
        self._asked(place)
        return True

    def _may_go(self, place: Place) -> bool:
        """Whether a lookup may find room, or that the request waits no more."""
        if self._is_first(place) and self._has_room(place.need):
            return True
        waited_s = place.waited_s + min(self._tables.clock() - place.asked_s, MAX_TURN_S)
        return waited_s > place.wait_s or any(self._tables.tiers[tier].down for tier in place.need.fetches)

    def note_released(
        self, request_id: str, leased: Sequence[GroupLease], wanted: Sequence[WantedPages]
    ) -> None:
        """A request that was just told to wait has ended its leases: what nobody else holds of it needs slots too."""
        index, slots = self._tables.hub.index, dict.fromkeys(self._tables.hub.owners, 0)
        for group, share in enumerate(leased):
            slots[self._tables.hub.owner(group)] += int(np.count_nonzero(index.pins_of(share.entries) == 0))
        for part in wanted:
            found = index.find(part.group, part.keys, ready_only=False)
            known = found[found != NO_ENTRY]
            unleased = int(np.count_nonzero(index.pins_of(known) == 0))
            slots[self._tables.hub.owner(part.group)] += len(found) - len(known) + unleased
        self._places[request_id].need.slots = slots

    def leave(self, request_id: str) -> None:
        """The request waits for no room any more."""
        if self._places:
            self._places.pop(request_id, None)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._places.clear()

    # --- those that went on ---

    def note_without(self, request_id: str, pages: Mapping[TierId, int]) -> None:
        """The request goes on without these pages, for which there was no room. Counted once in its life."""
        if request_id in self._without or not any(pages.values()):
            return
        self._without.add(request_id)
        for tier, count in pages.items():
            self._tables.tiers[tier].counts.no_room += 1
            self._tables.tiers[tier].counts.no_room_pages += count

    def forget(self, request_id: str) -> None:
        """Forgets the request at its end; for engines that do not ask again, at the end of its lookup."""
        self._without.discard(request_id)
