"""How long it recently took to fetch pages from each tier, to load them, and to compute them instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import TierId

MEMORY_SAMPLES = 32
"""A sample this many samples old counts a third of the latest one: long enough to even out one busy step, short enough
to follow a tier that another program has begun to use."""

MIN_SAMPLES = 4
"""Fewer samples are not relied on: the first steps of an engine compile, the first fetches fill caches."""

RELIABLE_S = 60.0
"""A fit without a new sample for this long is not relied on. A manager that never fetches never learns that a tier has
become faster, so once in a while it fetches to measure."""


class LinearFit:
    """seconds = latency + rate * units, by least squares over samples that fade (recursive least squares with a
    forgetting factor; Ljung, System Identification, 1987). Units are pages or tokens.

    If all samples have the same size, the line goes through the origin.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._last_s = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def see(self, units: float, seconds: float, now_s: float) -> None:
        """Adds a sample: `units` took `seconds`. `now_s` is a clock that never runs backwards."""
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
        """Latency in seconds and rate in seconds per unit, neither negative; zeros before the first sample."""
        if not self._x:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:
            return 0.0, self._y / self._x
        rate = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        latency = (self._y - rate * self._x) / self._n
        return (latency, rate) if latency >= 0 else (0.0, self._y / self._x)

    def seconds(self, units: int) -> float:
        """Seconds that `units` take if they are moved together."""
        latency_s, unit_s = self.line()
        return latency_s + unit_s * units


class CostModel:
    """The measurements by which one ownership unit chooses between fetching and computing.

    Attributes:
        load: loads from host memory to the engine. Units are the pages in flight when a load was planned, its own
            included, so that its time behind other loads is part of the fit.
        compute: the engine's prefill steps; units are tokens.
    """

    def __init__(self) -> None:
        self.load = LinearFit()
        self.compute = LinearFit()
        self._fetch: dict[TierId, LinearFit] = {}
        self._straight: dict[TierId, LinearFit] = {}

    def fetch(self, tier: TierId) -> LinearFit:
        """The fit of fetches from a tier to host memory; units as for `load`."""
        return self._fetch.setdefault(tier, LinearFit())

    def straight(self, tier: TierId) -> LinearFit:
        """The fit of straight loads from a tier to the engine; units as for `load`."""
        return self._straight.setdefault(tier, LinearFit())

    def load_s(self, pages: int) -> float:
        """Seconds that `pages` add to a load."""
        return self.load.line()[1] * pages

    def compute_s(self, tokens: int) -> float:
        """Seconds that `tokens` add to the engine's steps."""
        return self.compute.line()[1] * tokens

    def straight_is_faster(
        self, tier: TierId, pages: int, queued_straight: int, queued_fetches: int, now_s: float
    ) -> bool:
        """Whether `pages` of a tier reach the engine sooner by a straight load, behind `queued_straight` pages, than by
        a fetch, behind `queued_fetches` pages, and a load. A way without a reliable measurement is preferred, so that
        it is measured; straight loads first."""
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
        """Whether loading `pages` straight from the tier is quicker than computing their `tokens`; True unless both are
        known.

        A prefix of the pages saves and costs in proportion, so the answer holds for all of them.
        """
        line = self.straight(tier)
        if not (line.reliable(now_s) and self.compute.reliable(now_s)):
            return True
        return self.compute_s(tokens) > line.seconds(queued_pages + pages)

    def fetch_is_known(self, tiers: Iterable[TierId], now_s: float) -> bool:
        """Whether the times to compute and to fetch from every one of `tiers` are reliable."""
        return self.compute.reliable(now_s) and all(self.fetch(tier).reliable(now_s) for tier in tiers)

    def worth(
        self,
        missing: Mapping[TierId, NDArray[np.int64]],
        queued: Mapping[TierId, int],
        waiting: NDArray[np.bool_],
        tokens: NDArray[np.int64],
    ) -> int:
        """How many of the leading blocks arrive sooner than the engine computes them.

        Weighs each prefix of the blocks: the time to compute it, less the time to fetch its missing pages behind those
        queued and to load it. Tiers fetch in parallel, so the slowest one counts. Chooses the prefix that saves the
        most time, the longest of several; the engine computes the rest.

        Args:
            missing: per tier, the pages that a prefix of i + 1 blocks needs from it, int64 [blocks], ascending.
            queued: per tier, the pages that fetches in flight bring from it.
            waiting: whether a prefix of i + 1 blocks must wait for a fetch, bool [blocks].
            tokens: tokens that the engine need not compute with that prefix, int64 [blocks].

        Returns:
            0 to len(tokens).
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
