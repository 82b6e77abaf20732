"""Measures how long it takes to fetch pages from each tier, to load them, and to compute them instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import TierId

MEMORY_SAMPLES = 32
"""A sample that is this many samples old weighs about a third of the latest one. That is long enough to even out one
busy step, and short enough to follow a tier that another program has begun to use."""

MIN_SAMPLES = 4
"""A fit of fewer samples is not reliable: an engine's first steps include compilation, and the first fetches run with
cold caches."""

RELIABLE_S = 60.0
"""A fit without a new sample for this long is not reliable. The manager then fetches again, so it notices if a tier has
become faster."""


class LinearFit:
    """Fits seconds = latency + rate * units to samples whose weight decreases with age: recursive least squares with a
    forgetting factor (Ljung, System Identification, 1987). Units are pages or tokens.

    If all samples have the same size, the latency is 0.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._last_s = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def see(self, units: float, seconds: float, now_s: float) -> None:
        """Adds a sample: `units` pages or tokens took `seconds` seconds. `now_s` is the time on a clock that never runs
        backwards."""
        fade = 1.0 - 1.0 / MEMORY_SAMPLES
        self._n = self._n * fade + 1.0
        self._x = self._x * fade + units
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + units * units
        self._xy = self._xy * fade + units * seconds
        self.samples += 1
        self._last_s = now_s

    def reliable(self, now_s: float) -> bool:
        """Whether there are enough samples, and a recent one."""
        return self.samples >= MIN_SAMPLES and now_s - self._last_s <= RELIABLE_S

    def line(self) -> tuple[float, float]:
        """Returns the latency in seconds and the rate in seconds per unit. Neither is negative; both are 0 before the
        first sample."""
        if not self._x:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:
            return 0.0, self._y / self._x
        rate = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        latency = (self._y - rate * self._x) / self._n
        return (latency, rate) if latency >= 0 else (0.0, self._y / self._x)

    def seconds(self, units: int) -> float:
        """Returns the seconds that one op of `units` is expected to take."""
        latency_s, unit_s = self.line()
        return latency_s + unit_s * units


class CostModel:
    """The measurements by which one ownership unit chooses between fetching pages and computing them.

    Attributes:
        load: the fit of loads from host memory to the engine. Units are the pages in flight when a load was planned,
            including its own pages, so that the fit includes the time for which the load waits behind others.
        compute: the fit of the engine's prefill steps; units are tokens.
    """

    def __init__(self) -> None:
        self.load = LinearFit()
        self.compute = LinearFit()
        self._fetch: dict[TierId, LinearFit] = {}
        self._straight: dict[TierId, LinearFit] = {}

    def fetch(self, tier: TierId) -> LinearFit:
        """Returns the fit of fetches from a tier to host memory. Its units are pages, counted as for `load`."""
        return self._fetch.setdefault(tier, LinearFit())

    def straight(self, tier: TierId) -> LinearFit:
        """Returns the fit of straight loads from a tier to the engine. Its units are pages, counted as for `load`."""
        return self._straight.setdefault(tier, LinearFit())

    def load_s(self, pages: int) -> float:
        """Returns the seconds that `pages` pages add to a load, without the latency of the load itself."""
        return self.load.line()[1] * pages

    def compute_s(self, tokens: int) -> float:
        """Returns the seconds that `tokens` tokens add to the engine's steps, without the fixed time of a step."""
        return self.compute.line()[1] * tokens

    def straight_is_faster(
        self, tier: TierId, pages: int, queued_straight: int, queued_fetches: int, now_s: float
    ) -> bool:
        """Whether `pages` pages of a tier reach the engine sooner by a straight load than by a fetch and a load from
        host memory.

        If the measurement of one route is not reliable, that route is chosen, so that it is measured. If neither is
        reliable, the straight load is chosen.

        Args:
            queued_straight: pages in flight in straight loads from the tier, behind which a straight load would wait.
            queued_fetches: pages in flight in fetches from the tier, behind which a fetch would wait.
        """
        straight, fetch = self.straight(tier), self.fetch(tier)
        if not straight.reliable(now_s):
            return True
        if not fetch.reliable(now_s):
            return False
        through_s = fetch.seconds(queued_fetches + pages) + self.load.line()[0] + self.load_s(pages)
        return straight.seconds(queued_straight + pages) < through_s

    def straight_is_worth(
        self, tier: TierId, pages: int, tokens: int, queued_pages: int, now_s: float
    ) -> bool:
        """Whether loading `pages` pages straight from the tier is faster than computing their `tokens` tokens. True if
        either time is unknown.

        Shorter prefixes of the pages are not checked: if loading all pages is not worth it, neither is loading fewer,
        because the latency and the wait stay the same.

        Args:
            queued_pages: pages in flight in straight loads from the tier, behind which this load would wait.
        """
        line = self.straight(tier)
        if not (line.reliable(now_s) and self.compute.reliable(now_s)):
            return True
        return self.compute_s(tokens) > line.seconds(queued_pages + pages)

    def fetch_is_known(self, tiers: Iterable[TierId], now_s: float) -> bool:
        """Whether there are reliable measurements of computing and of fetching from each of `tiers`."""
        return self.compute.reliable(now_s) and all(self.fetch(tier).reliable(now_s) for tier in tiers)

    def worth(
        self,
        missing: Mapping[TierId, NDArray[np.int64]],
        queued: Mapping[TierId, int],
        waiting: NDArray[np.bool_],
        tokens: NDArray[np.int64],
    ) -> int:
        """Returns how many leading blocks should be fetched because they arrive sooner than the engine computes them.

        The time that a prefix of the blocks saves is the time to compute it, minus the time to fetch its missing pages
        behind the pages already queued, minus the time to load it. Tiers fetch in parallel, so the slowest tier counts.
        The prefix that saves the most time is chosen; if several save the same, the longest of them.

        Args:
            missing: per tier, an array whose element i is the number of pages that the first i + 1 blocks need from the
                tier, int64 [blocks], ascending.
            queued: per tier, the number of pages in flight in fetches from it.
            waiting: element i says whether one of the first i + 1 blocks must be fetched, bool [blocks].
            tokens: element i is the number of tokens in the first i + 1 blocks, int64 [blocks].

        Returns:
            A number of blocks from 0 to len(tokens).
        """
        wait_s = np.zeros(len(tokens))
        pages = np.zeros(len(tokens), np.int64)
        for tier, lacking in missing.items():
            latency_s, page_s = self.fetch(tier).line()
            begin_s = np.where(waiting, latency_s + page_s * queued[tier], 0.0)
            wait_s = np.maximum(wait_s, begin_s + page_s * lacking)
            pages = pages + lacking
        saved_s = self.compute.line()[1] * tokens - wait_s - self.load.line()[1] * pages
        best = len(saved_s) - 1 - int(np.argmax(saved_s[::-1]))
        return best + 1 if saved_s[best] > 0 else 0
