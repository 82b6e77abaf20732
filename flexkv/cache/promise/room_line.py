"""The queue of requests that wait for host slots. Requests get slots in the order of the queue. A request's fetches
begin when there are free slots for all its missing pages.
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
"""Maximum number of requests in the queue; further requests continue without the missing pages."""

MAX_TURN_S = 1.0
"""The time between two of the engine's questions about a request counts as waiting only up to this many seconds. An
engine that could run the request asks at every step. A longer pause means that the engine could not run it."""


class Turn(Enum):
    """The decision about a request that needs host slots for a fetch."""

    FETCH = "fetch"
    """The request fetches all missing pages: there are slots for them."""
    FETCH_SOME = "fetch some"
    """The request fetches as many missing pages as there are slots for, and continues without the remaining pages."""
    WAIT = "wait"
    """The request fetches nothing and waits in the queue. The engine asks again."""
    GO_ON = "go on"
    """The request fetches nothing, and continues without the missing pages."""


@dataclass(slots=True)
class Need:
    """The slots, pages and ops that a fetch of all missing pages of a request needs.

    Attributes:
        slots: number of free host slots needed, by the group that owns the slots.
        held: number of pages that the request has in host memory or in flight to it, by the group that owns their
            slots.
        pages: number of pages to fetch, by tier.
        fetches: number of fetch ops needed, by tier.
    """

    slots: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    pages: dict[TierId, int] = field(default_factory=dict)
    fetches: dict[TierId, int] = field(default_factory=dict)


@dataclass(slots=True)
class PlaceInLine:
    """One request's place in the queue.

    Attributes:
        need: the slots, pages and ops that the request needs. The slots include those of pages that are in host memory
            but that the request no longer leases.
        wait_s: maximum number of seconds that the request waits.
        before: number of the engine's second-to-last question about the request; 0 if there was none. The questions
            about all requests are numbered in one sequence.
        asked: number of the engine's last question about the request.
        asked_s: clock time of the engine's last question about the request.
        waited_s: number of seconds that the request has waited so far.
    """

    need: Need
    wait_s: float
    before: int
    asked: int
    asked_s: float
    waited_s: float = 0.0


class RoomLine:
    """Gives host slots to requests in the order in which they first asked. A request gets the slots for all its missing
    pages at once.

    A request that waits for slots holds none: it has no lease and no fetched pages. So all slots that are not free
    belong to ops, or to requests that have all they need, and become free however long other requests wait. Two
    requests never wait for each other.

    A request does not overtake an earlier one even if there are enough slots for it, because small prompts would then
    keep a large one waiting. It overtakes an earlier request only if the engine has asked about it twice since the last
    question about the earlier request. The engine then cannot run the earlier request now. One question does not
    suffice, because the engine asks about the requests of one step in any order.

    Args:
        asks_again: see `ManagerLimits.asks_again`. If False, no request waits, and each takes the slots that are free.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, asks_again: bool) -> None:
        self._tables = tables
        self._promotions = promotions
        self._asks_again = asks_again
        self._places: dict[str, PlaceInLine] = {}
        self._without: set[str] = set()
        """Requests that continued without some of their pages. Each is counted once, and does not wait in the queue
        again until `forget`."""
        self._questions = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    # --- what a fetch needs ---

    def need_of(self, wanted: Sequence[WantedPages], leased: Sequence[GroupLease]) -> Need:
        """Returns the slots, pages and ops that a fetch of `wanted` needs, for a request that also leases `leased`."""
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
                # The request does not lease pages in host memory that come after a missing page. These pages must not
                # be evicted to free slots for the request's fetch, so they count as needed.
                unleased = int(np.count_nonzero(index.pins_of(known) == 0)) if len(known) else 0
                need.slots[owner] = need.slots.get(owner, 0) + lacking + unleased
                need.pages[run.tier] = need.pages.get(run.tier, 0) + lacking
                if lacking:
                    tiers.add(run.tier)
            for tier in tiers:
                need.fetches[tier] = need.fetches.get(tier, 0) + 1
        return need

    def fits_at_once(self, wanted: Sequence[WantedPages]) -> bool:
        """Whether no request waits and there are slots for all pages of `wanted`, even if none of them is in host
        memory. Does not look the pages up.
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
        return self.has_room(need)

    def has_room(self, need: Need) -> bool:
        """Whether everything in `need` is available now."""
        index = self._tables.hub.index
        if any(slots > index.idle_slots(owner) for owner, slots in need.slots.items()):
            return False
        return all(
            self._promotions.has_room(tier, need.pages[tier], fetches)
            for tier, fetches in need.fetches.items()
        )

    def _fits(self, need: Need) -> bool:
        """Whether everything in `need` would be available if there were no other requests and ops."""
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
        """Decides whether a request that needs slots for a fetch begins the fetch, waits, or continues without pages.
        A request that must wait gets a place in the queue. Otherwise the request is removed from the queue.

        Args:
            wait_s: maximum number of seconds that the request waits.
        """
        if not self._asks_again:
            return Turn.FETCH if self.has_room(need) else Turn.FETCH_SOME
        place = self._places.get(request_id)
        if not need.fetches or (self._is_first(place) and self.has_room(need)):
            self.leave(request_id)
            return Turn.FETCH
        fits = self._fits(need)
        if fits and request_id not in self._without and self._note_question(request_id, place, need, wait_s):
            return Turn.WAIT
        self.leave(request_id)
        # If the request's missing pages can never all fit, it fetches some of them, but only if no other request waits.
        return Turn.GO_ON if fits or self._places else Turn.FETCH_SOME

    def _note_question(self, request_id: str, place: PlaceInLine | None, need: Need, wait_s: float) -> bool:
        """Records that the engine has asked about the request, which gets a place at the end of the queue if it has
        none. Returns whether the request has a place and time left to wait.
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
        """Whether the request may take slots before all others in the queue: no request is ahead of it, or the engine
        has not asked about the requests ahead since its second-to-last question about this request.
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
        """Records that the engine asks about the request again, and returns whether the request must still wait. O(1).

        Args:
            reads: whether the request waits for fetches or answers.
        """
        place = self._places.get(request_id)
        if place is None:
            return reads
        if not reads and self._may_go(place):
            return False
        self._asked(place)
        return True

    def _may_go(self, place: PlaceInLine) -> bool:
        """Whether a lookup may find enough slots, or would end the request's wait."""
        if self._is_first(place) and self.has_room(place.need):
            return True
        waited_s = place.waited_s + min(self._tables.clock() - place.asked_s, MAX_TURN_S)
        return waited_s > place.wait_s or any(self._tables.tiers[tier].down for tier in place.need.fetches)

    def note_released(
        self, request_id: str, leased: Sequence[GroupLease], wanted: Sequence[WantedPages]
    ) -> None:
        """Updates the need of a request whose leases have just ended because it waits. Those of its pages that nothing
        else has pinned may be evicted during the wait, so they need slots too.
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
        """Removes the request from the queue, if it is there."""
        if self._places:
            self._places.pop(request_id, None)

    def clear(self) -> None:
        self._places.clear()

    # --- requests that continued without pages ---

    def note_without(self, request_id: str, pages: Mapping[TierId, int]) -> None:
        """Counts a request that continues without pages for which there were no slots. Counts each request once.

        Args:
            pages: number of pages for which there were no slots, by tier.
        """
        if request_id in self._without or not any(pages.values()):
            return
        self._without.add(request_id)
        for tier, count in pages.items():
            self._tables.tiers[tier].counts.no_room += 1
            self._tables.tiers[tier].counts.no_room_pages += count

    def forget(self, request_id: str) -> None:
        """Allows the request to be counted and to wait again. Called when the request loads or ends; for engines that
        do not ask again, when it is released."""
        self._without.discard(request_id)
