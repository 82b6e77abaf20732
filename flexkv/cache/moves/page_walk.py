"""Finds which tier has each page of a request. The result is a list of runs: consecutive pages in one tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import Found, FoundLengths
from flexkv.cache.base import HUB, NO_ENTRIES, NO_ENTRY, EntryIds, TierId
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import NO_PLACES, SlotIds


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one group in one tier, each leased in that tier once.

    Attributes:
        tier: number of the tier.
        entries: the pages' entries in the tier's index, uint32 [pages].
        slots: the pages' slots in the tier, int32 [pages].
        coming: whether the pages are being fetched to host memory; `tier` is then HUB.
    """

    tier: TierId
    entries: EntryIds
    slots: SlotIds
    coming: bool = False

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def ready(self) -> bool:
        """Whether the pages can be loaded from host memory now."""
        return self.tier == HUB and not self.coming

    def at(self, positions: NDArray[np.bool_]) -> PageRun:
        return PageRun(self.tier, self.entries[positions], self.slots[positions], self.coming)

    def part(self, first: int, end: int) -> PageRun:
        return PageRun(self.tier, self.entries[first:end], self.slots[first:end], self.coming)


NO_PAGES = PageRun(HUB, NO_ENTRIES, NO_PLACES)


COMING = 1
"""In `Found` and `FoundLengths`: the state of a run whose pages are being fetched."""


def runs_of(found: Found | FoundLengths, group: int) -> list[PageRun]:
    """Returns, as runs, the pages of one group that a lookup has found."""
    entries, slots = found.entries(group), found.slots(group)
    before = found.first_page(group) if isinstance(found, FoundLengths) else 0
    runs = []
    for tier, state, first, count in found.runs(group).tolist():
        part = slice(first - before, first - before + count)
        runs.append(PageRun(TierId(tier), entries[part], slots[part], state == COMING))
    return runs


def split_runs(runs: list[PageRun], pages: int) -> tuple[PageRun, list[PageRun]]:
    """Splits runs after the first `pages` pages. Returns one run of the first pages, and the runs of the other pages.
    Precondition: the first `pages` pages are all in the first run."""
    if not runs:
        return NO_PAGES, []
    first = runs[0]
    if pages == len(first):
        return first, runs[1:]
    return first.part(0, pages), [first.part(pages, len(first)), *runs[1:]] if pages else runs


def leading(flags: NDArray[np.bool_]) -> int:
    """Returns the number of leading flags that are True."""
    return len(flags) if flags.all() else int(np.argmin(flags))


class PageWalk:
    """Finds and leases pages, each in host memory or, if it is not there, in the first tier that has it.

    Used for pages that do not form a prefix of the request, such as tails. `c_ext.TierLookup` looks prefixes up.
    """

    def __init__(self, tables: CacheTables) -> None:
        self._tables = tables

    def _next(self, group: int, keys: Keys, usable: Sequence[TierId]) -> PageRun | None:
        """Finds the first tier that has the first page, and leases the leading pages of `keys` in that tier. Returns
        None if no tier has the first page, or if a store is filling it."""
        index = self._tables.hub.index
        entries, slots = index.match_and_pin(group, keys)
        if len(entries):
            return PageRun(HUB, entries, slots)
        if index.find(group, keys[:1], ready_only=False)[0] != NO_ENTRY:
            return self._coming(group, keys)
        for number in usable:
            tier = self._tables.tiers[number]
            found = tier.leading(group, keys)
            if len(found):
                return PageRun(number, found, tier.presence.pin(found))
        return None

    def _coming(self, group: int, keys: Keys) -> PageRun | None:
        """Leases the leading pages of `keys` that are being fetched. Returns None if the first page is not being
        fetched but stored."""
        index = self._tables.hub.index
        known = index.find(group, keys, ready_only=False)
        known = known[: leading(known != NO_ENTRY)]
        coming = known[: leading(index.fillers(known) != 0)]
        if not len(coming):
            return None
        return PageRun(HUB, coming, index.pin_coming(coming), coming=True)

    def locate(self, group: int, keys: Keys, usable: Sequence[TierId]) -> list[PageRun]:
        """Finds the leading pages of `keys`, and leases each in its tier. The runs end before the first page that
        neither host memory nor a usable tier has, or that a store is filling."""
        runs: list[PageRun] = []
        at = 0
        while at < len(keys):
            run = self._next(group, keys[at:], usable)
            if run is None:
                break
            runs.append(run)
            at += len(run)
        return runs

    def present(self, group: int, keys: Keys, usable: Sequence[TierId]) -> NDArray[np.bool_]:
        """Returns which of the keys are in host memory or in one of the `usable` tiers, bool [keys]."""
        present = self._tables.hub.there(group, keys)
        for number in usable:
            present = present | self._tables.tiers[number].present(group, keys)
        return present

    def release(self, runs: Sequence[PageRun]) -> None:
        """Ends the leases of all pages in `runs`."""
        for run in runs:
            self._tables.tiers[run.tier].presence.unpin(run.entries)

    def cut(self, runs: Sequence[PageRun], pages: int) -> list[PageRun]:
        """Returns the runs of the first `pages` pages, and ends the leases of all later pages."""
        kept: list[PageRun] = []
        left = pages
        for run in runs:
            kept_pages = min(left, len(run))
            if kept_pages:
                kept.append(run if kept_pages == len(run) else run.part(0, kept_pages))
            if kept_pages < len(run):
                self.release([run.part(kept_pages, len(run))])
            left -= kept_pages
        return kept
