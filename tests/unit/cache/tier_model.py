"""A model of lookups in several tiers. It computes page by page which pages a lookup finds and leases, with
dictionaries instead of indexes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Literal

State = Literal["absent", "ready", "filling", "storing", "expired"]
HOST = 0
READY, COMING = 0, 1
SHORT_RUNS, SHORT_PAGES, WINDOW = 8, 32, 512


@dataclass(slots=True)
class Page:
    """A block in a tier. `filler` is the id of the op that fills a pending block, or 0 if a store fills it. An `expiry`
    of 0 means never.
    """

    tier: int
    group: int
    key: bytes
    entry: int
    slot: int
    ready: bool
    filler: int = 0
    expiry: int = 0
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """The arguments of a lookup. `room_pages` is the largest number of pages to find, over all groups. `coming` says
    whether pages that ops are still filling count too.
    """

    keys: Sequence[Sequence[bytes]]
    start: int
    room_pages: int
    tiers: frozenset[int]
    now: int
    coming: bool


@dataclass(slots=True)
class Answer:
    """The expected result of a lookup: the pages of each group, and for each page whether it is READY or COMING."""

    blocks: int = 0
    ready_blocks: int = 0
    cut: bool = False
    pages: list[list[tuple[Page, int]]] = field(default_factory=list)
    expired: set[tuple[int, int, int]] = field(default_factory=set)

    def runs(self, group: int) -> list[tuple[int, int, int, int]]:
        """Returns the runs of pages with the same tier and state, each as (tier, state, first page, count)."""
        rows, first = [], 0
        for (tier, state), alike in groupby((page.tier, state) for page, state in self.pages[group]):
            count = len(list(alike))
            rows.append((tier, state, first, count))
            first += count
        return rows


def count_runs(pages: Sequence[tuple[Page, int]]) -> int:
    return len(list(groupby((page.tier, state) for page, state in pages)))


class TierModel:
    """The pages of all tiers, with their leases. Each rule of a lookup is a method, so that a control test can break
    the rule.
    """

    def __init__(self, tiers: int, groups: int) -> None:
        self.tiers, self.groups = tiers, groups
        self.pages: dict[tuple[int, int, bytes], Page] = {}
        self.leases: list[Counter[int]] = [Counter() for _ in range(tiers)]

    # --- rules ---

    def order(self, ask: Ask) -> list[int]:
        return sorted(ask.tiers)

    def room_blocks(self, ask: Ask) -> int:
        return max(0, ask.room_pages) // self.groups

    def ends_prefix(self, state: State) -> bool:
        return state == "storing"

    def is_short(self, run: Sequence[object]) -> bool:
        return len(run) < SHORT_PAGES

    def stays_in_windows(self, runs: int, pages: int) -> bool:
        return runs * SHORT_PAGES > pages

    def state(self, tier: int, group: int, key: bytes, now: int) -> State:
        page = self.pages.get((tier, group, key))
        if page is None:
            return "absent"
        if not page.ready:
            return "filling" if page.filler else "storing"
        return "expired" if 0 < page.expiry <= now else "ready"

    # --- lookups ---

    def look(self, ask: Ask) -> Answer:
        offered = [list(keys[ask.start :]) for keys in ask.keys]
        most = min(map(len, offered))
        room = min(most, self.room_blocks(ask))
        answer = Answer(blocks=room, pages=[[] for _ in range(self.groups)])
        for group, keys in enumerate(offered):
            answer.pages[group] = self._search(ask, group, keys[: answer.blocks], answer.expired)
            answer.blocks = len(answer.pages[group])
        answer.cut = answer.blocks == room < most and all(
            self._first(ask, group, keys[room], set()) is not None for group, keys in enumerate(offered)
        )
        answer.pages = [pages[: answer.blocks] for pages in answer.pages]
        answer.ready_blocks = min(
            sum(1 for _ in takewhile(lambda p: (p[0].tier, p[1]) == (HOST, READY), pages))
            for pages in answer.pages
        )
        return answer

    def _search(
        self, ask: Ask, group: int, keys: Sequence[bytes], expired: set[tuple[int, int, int]]
    ) -> list[tuple[Page, int]]:
        found: list[tuple[Page, int]] = []
        short = 0
        while len(found) < len(keys):
            left = keys[len(found) :]
            if short == SHORT_RUNS:
                one_by_one = (self._first(ask, group, key, expired) for key in left[:WINDOW])
                window = [hit for hit in takewhile(lambda hit: hit is not None, one_by_one) if hit]
                before = count_runs(found)
                found += window
                if len(window) < min(WINDOW, len(left)):
                    break
                if not self.stays_in_windows(count_runs(found) - before, len(window)):
                    short = 0
                continue
            run = self._run(ask, group, left, expired)
            if not run:
                break
            found += run
            short = short + 1 if self.is_short(run) else 0
        return found

    def _run(
        self, ask: Ask, group: int, keys: Sequence[bytes], expired: set[tuple[int, int, int]]
    ) -> list[tuple[Page, int]]:
        """Returns the run of `keys` in the first tier that contains the first key. The run ends before the first key
        that the tier lacks.
        """
        for tier, wanted, how in self._ways(ask, group, keys[0]):
            run = []
            for key in keys:
                state = self.state(tier, group, key, ask.now)
                if state == "expired" and wanted == "ready":
                    expired.add((tier, group, self.pages[tier, group, key].entry))
                if state != wanted:
                    break
                run.append((self.pages[tier, group, key], how))
            if run:
                return run
        return []

    def _ways(self, ask: Ask, group: int, key: bytes) -> Iterator[tuple[int, State, int]]:
        """Yields the tiers in which a lookup may find `key`, in order of preference. With each tier it yields the state
        that the page must have, and whether the page then counts as READY or COMING.
        """
        for tier in self.order(ask):
            yield tier, "ready", READY
            if tier != HOST:
                continue
            if self.ends_prefix(self.state(HOST, group, key, ask.now)):
                return
            if ask.coming:
                yield HOST, "filling", COMING

    def _first(
        self, ask: Ask, group: int, key: bytes, expired: set[tuple[int, int, int]]
    ) -> tuple[Page, int] | None:
        run = self._run(ask, group, [key], expired)
        return run[0] if run else None

    def present(self, ask: Ask, group: int) -> list[int]:
        def first(key: bytes) -> int:
            states = ((tier, self.state(tier, group, key, ask.now)) for tier in self.order(ask))
            return next((tier + 1 for tier, state in states if state == "ready"), 0)

        return [first(key) for key in ask.keys[group]]

    # --- leases ---

    def lease(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.leases[page.tier][page.entry] += 1

    def end_lease(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.leases[page.tier][page.entry] -= 1
            assert self.leases[page.tier][page.entry] >= 0

    def leased(self, tier: int) -> list[int]:
        return list(self.leases[tier].elements())

    def remove(self, page: Page) -> None:
        page.gone = True
        del self.pages[page.tier, page.group, page.key]
