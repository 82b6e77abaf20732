"""Decides which pages are fetched, and which are left to the engine because it computes them before they would
arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexkv.cache.base import HUB, NO_ENTRY, OpRole, TierId
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.moves.page_walk import PageRun
from flexkv.cache.tiers.routes import StraightLoads
from flexkv.cache.tiers.tables import CacheTables
from flexkv.facts.keys import Keys


@dataclass(frozen=True, slots=True)
class LeftToEngine:
    """One decision to let the engine compute pages, to be shown to operators.

    Attributes:
        tier: number of the tier that has the pages.
        pages: number of pages that the engine computes.
        fetch_s: expected seconds to fetch and load the pages.
        compute_s: expected seconds to compute the pages' tokens.
    """

    tier: TierId
    pages: int
    fetch_s: float
    compute_s: float


class FetchChoice:
    """Decides whether pages are fetched, from the measured times of the tiers and of the engine's steps. Without
    reliable measurements, pages are fetched.

    Args:
        enabled: whether to compare times; if False, all pages are fetched.

    Attributes:
        last_left: the last decision to compute pages instead of fetching them; None before the first.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, enabled: bool) -> None:
        self._tables = tables
        self._promotions = promotions
        self._block_tokens = tables.specs[0].block_tokens
        self._enabled = enabled
        self.last_left: LeftToEngine | None = None

    def tiers_of(self, rest: Sequence[Sequence[PageRun]]) -> set[TierId]:
        """Returns the tiers that have the pages, or from which the pages are being fetched to host memory."""
        tiers: set[TierId] = set()
        for runs in rest:
            for run in runs:
                if run.tier != HUB:
                    tiers.add(run.tier)
                elif run.coming:
                    tiers |= self._promotions.tiers_of(self._tables.hub.index.fillers(run.entries))
        return tiers

    def cut_to_worth(
        self, rest: list[list[PageRun]], keys: Sequence[Keys], first: int, counted: bool = True
    ) -> tuple[list[list[PageRun]], bool]:
        """Cuts `rest` to the leading blocks that arrive sooner than the engine computes them, and ends the leases of
        the other blocks. Cuts nothing without reliable measurements.

        Args:
            rest: per group, the leased runs of the same blocks, which begin with block `first` of the request.
            keys: per group, the keys of the request's blocks from block 0 on.
            counted: whether to count the blocks that are cut off as left to the engine.

        Returns:
            The remaining runs per group, and whether any blocks were cut off.
        """
        tiers = self.tiers_of(rest)
        if not self._enabled or not self._tables.cost.fetch_is_known(tiers, self._tables.clock()):
            return rest, False
        blocks = min(sum(map(len, runs)) for runs in rest)
        tokens = self._block_tokens * np.arange(1, blocks + 1)
        queued = {tier: self._tables.ops.pages(OpRole.FETCH, tier) for tier in tiers}
        most = {tier: np.array([blocks * len(rest)]) for tier in tiers}
        if self._tables.cost.worth(most, queued, np.array([True]), tokens[-1:]):
            # Fetching all pages would be faster than computing them even if host memory had none of them. The wait for
            # the first page is the same for every prefix, so each further block saves time, and the longest prefix is
            # best.
            return rest, False
        missing = {tier: np.zeros(blocks, np.int64) for tier in tiers}
        waiting = np.zeros(blocks, np.bool_)
        for group, runs in enumerate(rest):
            at = 0
            for run in runs:
                part = slice(at, at + len(run))
                at += len(run)
                if run.tier == HUB:
                    waiting[part] |= run.coming
                    continue
                # A run extends as far as its tier has pages, so host memory may have some of these pages too.
                in_host = self._tables.hub.index.find(
                    group, keys[group][first + part.start : first + part.stop], ready_only=False
                )
                missing[run.tier][part] += in_host == NO_ENTRY
                waiting[part] |= ~self._tables.hub.ready(in_host)
        counts = {tier: np.cumsum(pages) for tier, pages in missing.items()}
        kept = self._tables.cost.worth(counts, queued, np.logical_or.accumulate(waiting), tokens)
        if kept == blocks:
            return rest, False
        left_tokens = int(tokens[-1] - (tokens[kept - 1] if kept else 0))
        for tier, pages in counts.items():
            if counted and (left := int(pages[-1] - (pages[kept - 1] if kept else 0))):
                self._leave(tier, left, self._fetch_s(tier, left), left_tokens)
        return [self._promotions.walk.cut(runs, kept) for runs in rest], True

    def choose_fetch(self, rest: Sequence[Sequence[PageRun]], tokens: int) -> bool:
        """Decides whether to fetch pages that are useful only together. Returns True if they arrive sooner than the
        engine computes their `tokens` tokens, or if that is not known. Otherwise counts them as left to the engine.
        """
        tiers = self.tiers_of(rest)
        if not self._enabled or not self._tables.cost.fetch_is_known(tiers, self._tables.clock()):
            return True
        pages = {tier: sum(len(run) for runs in rest for run in runs if run.tier == tier) for tier in tiers}
        queued = {tier: self._tables.ops.pages(OpRole.FETCH, tier) for tier in tiers}
        missing = {tier: np.array([count]) for tier, count in pages.items()}
        waiting = np.array([any(not run.ready for runs in rest for run in runs)])
        if self._tables.cost.worth(missing, queued, waiting, np.array([tokens])):
            return True
        for tier, count in pages.items():
            self._leave(tier, count, self._fetch_s(tier, count), tokens)
        return False

    def ask_worth(self, tier: TierId, pages: int, tokens: int) -> bool:
        """Whether `pages` pages would arrive from a tier sooner than the engine computes their `tokens` tokens. True if
        that is not known."""
        if not self._enabled or not self._tables.cost.fetch_is_known((tier,), self._tables.clock()):
            return True
        queued = {tier: self._tables.ops.pages(OpRole.FETCH, tier)}
        # If the tier turns out to have fewer of these pages, the lookup that follows its answer decides again.
        return (
            self._tables.cost.worth({tier: np.array([pages])}, queued, np.array([True]), np.array([tokens]))
            > 0
        )

    def room_wait_s(self, tier: TierId, tokens: int) -> float:
        """Returns the maximum number of seconds for which a request waits for host slots in order to fetch `tokens`
        tokens from a tier. If it is known how long computing the tokens takes, the wait is no longer than that, so that
        waiting in vain costs at most as much as computing.
        """
        wait_s = self._tables.tiers[tier].facts.wait_s
        if not self._enabled or not self._tables.cost.compute.reliable(self._tables.clock()):
            return wait_s
        return min(wait_s, self._tables.cost.compute_s(tokens))

    def _fetch_s(self, tier: TierId, pages: int) -> float:
        queued = self._tables.ops.pages(OpRole.FETCH, tier)
        return self._tables.cost.fetch(tier).seconds(queued + pages) + self._tables.cost.load_s(pages)

    def _leave(self, tier: TierId, pages: int, fetch_s: float, tokens: int) -> None:
        """Counts and records a decision to let the engine compute the `tokens` tokens of `pages` pages rather than
        fetch them in `fetch_s` seconds."""
        self._tables.tiers[tier].counts.left += 1
        self._tables.tiers[tier].counts.left_pages += pages
        self.last_left = LeftToEngine(tier, pages, fetch_s, self._tables.cost.compute_s(tokens))

    def choose_straight_load(self, tier: TierId, route: StraightLoads, pages: int, tokens: int) -> bool:
        """Decides whether to load `pages` pages straight from their tier. Returns True if that takes less time than
        computing their `tokens` tokens, or if these times are not known. Otherwise returns False, and counts the pages
        as left to the engine.
        """
        if not self._enabled or self._tables.cost.straight_is_worth(
            tier, pages, tokens, route.pages, self._tables.clock()
        ):
            return True
        self._leave(tier, pages, self._tables.cost.straight(tier).seconds(route.pages + pages), tokens)
        return False
