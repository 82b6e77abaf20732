"""What is fetched, and what is left to the engine, because it computes that sooner."""

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
    """A choice to compute, for the operator: `pages` of a tier take `fetch_s` to bring, and `compute_s` to compute."""

    tier: TierId
    pages: int
    fetch_s: float
    compute_s: float


class FetchChoice:
    """Chooses by what was measured of the tiers and of the engine's steps; where that is not known, to fetch.

    Args:
        enabled: False to fetch whatever it takes.

    Attributes:
        last_left: the last choice to leave pages where they are and compute them.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, enabled: bool) -> None:
        self._tables = tables
        self._promotions = promotions
        self._block_tokens = tables.specs[0].block_tokens
        self._enabled = enabled
        self.last_left: LeftToEngine | None = None

    def tiers_of(self, rest: Sequence[Sequence[PageRun]]) -> set[TierId]:
        """The tiers that the pages come from; those on their way too."""
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
        """Cuts the rest to the leading whole blocks that are brought sooner than computed: to all of them, as long as
        nothing is known. Also says whether some is left to the engine. The leases of what is left end.

        Args:
            keys, first: the rest is of the blocks from `first` on.
            counted: as a lookup of which a part is left to the engine.
        """
        tiers = self.tiers_of(rest)
        if not self._enabled or not self._tables.cost.fetch_is_known(tiers, self._tables.clock()):
            return rest, False
        blocks = min(sum(map(len, runs)) for runs in rest)
        tokens = self._block_tokens * np.arange(1, blocks + 1)
        queued = {tier: self._tables.ops.pages(OpRole.FETCH, tier) for tier in tiers}
        most = {tier: np.array([blocks * len(rest)]) for tier in tiers}
        if self._tables.cost.worth(most, queued, np.array([True]), tokens[-1:]):
            # Where a block saves more than its fetch costs, a longer prefix is always worth more than a shorter one;
            # what the wait takes away is the same for both.
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
                # A run goes on as far as its tier does: some of it may be in host memory too.
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

    def all_worth(self, rest: Sequence[Sequence[PageRun]], tokens: int) -> bool:
        """The same of pages that are of use together or not at all."""
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
        """Whether `pages` that a tier may have would be there sooner than their `tokens` computed."""
        if not self._enabled or not self._tables.cost.fetch_is_known((tier,), self._tables.clock()):
            return True
        queued = {tier: self._tables.ops.pages(OpRole.FETCH, tier)}
        # Of what is there it may be less; that is weighed when it is known.
        return (
            self._tables.cost.worth({tier: np.array([pages])}, queued, np.array([True]), np.array([tokens]))
            > 0
        )

    def room_wait_s(self, tier: TierId, tokens: int) -> float:
        """Seconds that a request waits for room at most, to have `tokens` of a tier fetched: no longer than computing
        them takes, where that is known. Then it loses no more than as much again by having waited in vain."""
        wait_s = self._tables.tiers[tier].facts.wait_s
        if not self._enabled or not self._tables.cost.compute.reliable(self._tables.clock()):
            return wait_s
        return min(wait_s, self._tables.cost.compute_s(tokens))

    def _fetch_s(self, tier: TierId, pages: int) -> float:
        queued = self._tables.ops.pages(OpRole.FETCH, tier)
        return self._tables.cost.fetch(tier).seconds(queued + pages) + self._tables.cost.load_s(pages)

    def _leave(self, tier: TierId, pages: int, fetch_s: float, tokens: int) -> None:
        """The engine computes the `tokens` of `pages` rather than have them in `fetch_s` seconds."""
        self._tables.tiers[tier].counts.left += 1
        self._tables.tiers[tier].counts.left_pages += pages
        self.last_left = LeftToEngine(tier, pages, fetch_s, self._tables.cost.compute_s(tokens))

    def straight_worth(self, tier: TierId, route: StraightLoads, pages: int, tokens: int) -> bool:
        """Whether pages that hold so many tokens are loaded from where they lie sooner than computed."""
        if not self._enabled or self._tables.cost.straight_is_worth(
            tier, pages, tokens, route.pages, self._tables.clock()
        ):
            return True
        self._leave(tier, pages, self._tables.cost.straight(tier).seconds(route.pages + pages), tokens)
        return False
