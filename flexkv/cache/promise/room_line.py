"""The queue of requests that wait for room in host memory: a fetch begins when there are slots for all of its pages,
and requests take turns.
"""

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
"""Most requests in line; further ones go on without room."""

MAX_TURN_S = 1.0
"""Most seconds between two questions that count as waited. An engine that has room for the request asks at every step;
a longer pause means that it has none."""


class Turn(Enum):
    """Whether a request may fetch now."""

    FETCH = "fetch"
    """Fetch: all missing pages find room."""
    FETCH_SOME = "fetch some"
    """Fetch as much as there is room for, and go on without the rest."""
    WAIT = "wait"
    """Fetch nothing: room will come, and the engine asks again."""
    GO_ON = "go on"
    """Fetch nothing, and go on without the missing pages."""


@dataclass(slots=True)
class Need:
    """The room that a fetch of all missing pages of a request would take.

    Attributes:
        slots: host slots, by the group that owns them.
        held: the request's own pages in host memory or under way to it, by the group that
            owns their slots.
        pages: pages to fetch, by the tier from which they come.
        fetches: fetch ops, by the tier from which they read.
    """

    slots: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    pages: dict[TierId, int] = field(default_factory=dict)
    fetches: dict[TierId, int] = field(default_factory=dict)


@dataclass(slots=True)
class PlaceInLine:
    """One request's place in the queue.

    Attributes:
        need: what the request lacks; its slots include those of pages in host memory that the request no longer leases.
        wait_s: most seconds that it waits.
        waited_s: seconds that it has waited so far.
        before: number of the engine's last question but one about the request; questions are numbered over all
            requests.
        asked: number of the last question about the request.
        asked_s: the clock at that question.
    """

    need: Need
    wait_s: float
    before: int
    asked: int
    asked_s: float
    waited_s: float = 0.0


class RoomLine:
    """Gives room for fetches to whole prompts, in the order in which their requests first asked for it.

    A request that waits for room holds none: it has no lease and no fetched pages. So all slots that are not available
    to the request whose turn it is belong to ops, or to requests that have all they need, and become free by
    themselves. Two requests never wait for each other.

    A request for which there is room does not overtake an earlier one, because small prompts would then keep a large
    one waiting. It overtakes only requests about which the engine has not asked since the last question but one about
    this request: the engine has no use for them now. The order in which the engine asks within a step does not matter.

    Args:
        asks_again: see `ManagerLimits.asks_again`. If False, no request waits, and each takes the room that there is.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, asks_again: bool) -> None:
        self._tables = tables
        self._promotions = promotions
        self._asks_again = asks_again
        self._places: dict[str, PlaceInLine] = {}
        self._without: set[str] = set()
        """Requests that went on without some of their pages. They are counted once and never wait in line again."""
        self._questions = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    # --- what a fetch takes ---

    def need_of(self, wanted: Sequence[WantedPages], leased: Sequence[GroupLease]) -> Need:
        """The room that a fetch of `wanted` takes, for a request that also leases `leased`."""
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
                # The request has no lease on pages after a gap, which must not be evicted to make room for it.
                unleased = int(np.count_nonzero(index.pins_of(known) == 0)) if len(known) else 0
                need.slots[owner] = need.slots.get(owner, 0) + lacking + unleased
                need.pages[run.tier] = need.pages.get(run.tier, 0) + lacking
                if lacking:
                    tiers.add(run.tier)
            for tier in tiers:
                need.fetches[tier] = need.fetches.get(tier, 0) + 1
        return need

    def fits_at_once(self, wanted: Sequence[WantedPages]) -> bool:
        """Whether no request waits and there is room for all of `wanted` even if host memory has none of it. Does not
        look the pages up.
        """
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
        """Whether there is room for the whole need now."""
        index = self._tables.hub.index
        if any(slots > index.idle_slots(owner) for owner, slots in need.slots.items()):
            return False
        return all(
            self._promotions.has_room(tier, need.pages[tier], fetches)
            for tier, fetches in need.fetches.items()
        )

    def _fits(self, need: Need) -> bool:
        """Whether there would be room for the whole need if no other request took any."""
        for owner, slots in need.slots.items():
            if need.held.get(owner, 0) + slots > self._tables.specs[owner].slots:
                return False
        for tier, fetches in need.fetches.items():
            facts = self._tables.tiers[tier].facts
            if need.pages[tier] > facts.fetch_pages or fetches > facts.fetch_ops:
                return False
        return True

    # --- the queue ---

    def take_turn(self, request_id: str, need: Need, wait_s: float) -> Turn:
        """Decides what a request whose lookup asks for room does now. Gives it a place in the queue if it must wait,
        and removes it from the queue otherwise.

        Args:
            wait_s: most seconds that it waits.
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
        # A prompt that never fits completely leaves the room to requests that wait for it.
        return Turn.GO_ON if fits or self._places else Turn.FETCH_SOME

    def _note_question(self, request_id: str, place: PlaceInLine | None, need: Need, wait_s: float) -> bool:
        """Records a question about the request, in a new place if there is one, and returns whether the request has a
        place and time left.
        """
        if place is None:
            if len(self._places) >= MAX_IN_LINE:
                return False
            place = PlaceInLine(need, wait_s, 0, 0, self._tables.clock())
            self._places[request_id] = place
        place.need = need
        self._asked(place)
        return place.waited_s <= place.wait_s

    def _asked(self, place: PlaceInLine) -> None:
        now_s = self._tables.clock()
        place.waited_s += min(now_s - place.asked_s, MAX_TURN_S)
        self._questions += 1
        place.before, place.asked, place.asked_s = place.asked, self._questions, now_s

    def _is_first(self, place: PlaceInLine | None) -> bool:
        """Whether the engine has not asked about any request ahead of this one since its last question but one about
        this one.
        """
        if place is None:
            return not self._places
        for other in self._places.values():
            if other is place:
                break
            if other.asked > place.before:
                return False
        return True

    def still_waits(self, request_id: str, reads: bool) -> bool:
        """Records that the engine asks for the request again, and returns whether a lookup would find that it must
        wait. O(1).

        Args:
            reads: the request waits for reads or answers in any case.
        """
        place = self._places.get(request_id)
        if place is None:
            return reads
        if not reads and self._may_go(place):
            return False
        self._asked(place)
        return True

    def _may_go(self, place: PlaceInLine) -> bool:
        """Whether a lookup may find room, or would end the request's wait."""
        if self._is_first(place) and self._has_room(place.need):
            return True
        waited_s = place.waited_s + min(self._tables.clock() - place.asked_s, MAX_TURN_S)
        return waited_s > place.wait_s or any(self._tables.tiers[tier].down for tier in place.need.fetches)

    def note_released(
        self, request_id: str, leased: Sequence[GroupLease], wanted: Sequence[WantedPages]
    ) -> None:
        """Updates the need of a request that has just ended its leases in order to wait: its pages that no other
        request holds also need slots.
        """
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
        """Removes the request from the queue, if it is in it."""
        if self._places:
            self._places.pop(request_id, None)

    def clear(self) -> None:
        """Removes all requests from the queue."""
        self._places.clear()

    # --- requests that stopped waiting ---

    def note_without(self, request_id: str, pages: Mapping[TierId, int]) -> None:
        """Counts, once per request, that it continues without these pages, for which there was no room."""
        if request_id in self._without or not any(pages.values()):
            return
        self._without.add(request_id)
        for tier, count in pages.items():
            self._tables.tiers[tier].counts.no_room += 1
            self._tables.tiers[tier].counts.no_room_pages += count

    def forget(self, request_id: str) -> None:
        """Forgets the request at its end; for engines that do not ask again, at the end of its lookup."""
        self._without.discard(request_id)
