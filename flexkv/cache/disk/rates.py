"""How long it takes to bring pages up from disk, to load them, and to compute them instead, as measured lately."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MEMORY_SAMPLES = 32
"""What was seen so many samples ago counts a third of the latest: long enough to even out one busy step, short enough
to follow a disk that another program has begun to use."""

MIN_SAMPLES = 4
"""Fewer say nothing: the first steps of an engine compile, the first reads fill caches."""

BELIEVED_S = 60.0
"""A measurement without news for so long is not believed any more. Who never reads never learns that the disk has
become faster, so once in a while a read is made to look."""


class MovingLine:
    """seconds = latency + rate * units, by least squares over samples that fade (recursive least squares with a
    forgetting factor; Ljung, System Identification, 1987). Units are pages or tokens.

    Where all samples have the same size the line goes through the origin.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._last_s = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def see(self, units: float, seconds: float, now_s: float) -> None:
        """`units` took `seconds`; `now_s` is a clock that never runs backwards."""
        fade = 1.0 - 1.0 / MEMORY_SAMPLES
        self._n = self._n * fade + 1.0
        self._x = self._x * fade + units
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + units * units
        self._xy = self._xy * fade + units * seconds
        self.samples += 1
        self._last_s = now_s

    def believed(self, now_s: float) -> bool:
        """Whether enough was seen, and lately."""
        return self.samples >= MIN_SAMPLES and now_s - self._last_s <= BELIEVED_S

    def line(self) -> tuple[float, float]:
        """Latency in seconds and rate in seconds a unit, neither negative; zeros before the first sample."""
        if not self._x:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:
            return 0.0, self._y / self._x
        rate = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        latency = (self._y - rate * self._x) / self._n
        return (latency, rate) if latency >= 0 else (0.0, self._y / self._x)


class DiskRates:
    """What one unit's choice between reading and computing rests on.

    Attributes:
        read: of reads from disk; units are the pages in flight when a read was planned, its own among them, so that
            the wait behind others is part of it.
        load: of loads from host memory to the engine, likewise.
        gds: of loads from disk to the engine without a page of host memory, likewise.
        compute: of the engine's prefill steps, in tokens.
    """

    def __init__(self) -> None:
        self.read = MovingLine()
        self.load = MovingLine()
        self.gds = MovingLine()
        self.compute = MovingLine()

    def believed(self, now_s: float) -> bool:
        """Whether reading and computing are both known well enough to choose. Without a load none is counted."""
        return self.read.believed(now_s) and self.compute.believed(now_s)

    def all_worth(self, pages: int, tokens: int, queued_pages: int) -> bool:
        """Whether bringing up `pages`, all of them missing, is quicker than computing the `tokens` that they hold."""
        # Where a block saves more than its read costs, a longer prefix is always worth more than a shorter one; what
        # the wait takes away is the same for both.
        saved_s = self.compute_s(tokens) - self.load_s(pages)
        return saved_s > self.read_s(pages, queued_pages)

    def worth(
        self,
        missing: NDArray[np.int64],
        waiting: NDArray[np.bool_],
        tokens: NDArray[np.int64],
        queued_pages: int,
    ) -> int:
        """How many of the offered blocks are brought up sooner than computed.

        Each prefix of the blocks is weighed: the time to compute it, less the time to read what of it is missing behind
        `queued_pages` others and to load it. The longest prefix that saves the most is taken; the rest is left to the
        engine.

        Args:
            missing: pages that a prefix of i + 1 blocks lacks in host memory, int64 [blocks], ascending.
            waiting: whether such a prefix has to wait for a read, bool [blocks].
            tokens: that such a prefix saves the engine, int64 [blocks].

        Returns:
            0 to len(missing).
        """
        latency_s, page_s = self.read.line()
        _, load_s = self.load.line()
        _, token_s = self.compute.line()
        wait_s = np.where(waiting, latency_s + page_s * queued_pages, 0.0)
        saved_s = token_s * tokens - wait_s - (page_s + load_s) * missing
        best = len(saved_s) - 1 - int(np.argmax(saved_s[::-1]))
        return best + 1 if saved_s[best] > 0 else 0

    def gds_is_faster(self, pages: int, queued_gds: int, queued_reads: int, now_s: float) -> bool:
        """Whether `pages` on disk reach the engine sooner from where they lie, behind `queued_gds` others, than by a
        read behind `queued_reads` others and a load. Whichever way is not known, or not any more, is tried."""
        if not self.gds.believed(now_s):
            return True
        if not self.read.believed(now_s):
            return False
        load_latency_s, _ = self.load.line()
        through_s = self.read_s(pages, queued_reads) + load_latency_s + self.load_s(pages)
        return self.gds_s(pages, queued_gds) < through_s

    def gds_is_worth(self, pages: int, tokens: int, queued_pages: int, now_s: float) -> bool:
        """Whether loading `pages` from where they lie is quicker than computing their `tokens`, where both are known.

        A prefix of them saves and costs its share of the same, so it is all of them or none.
        """
        if not (self.gds.believed(now_s) and self.compute.believed(now_s)):
            return True
        return self.compute_s(tokens) > self.gds_s(pages, queued_pages)

    def gds_s(self, pages: int, queued_pages: int) -> float:
        """Seconds to load `pages` from where they lie behind `queued_pages` others."""
        return _seconds(self.gds, queued_pages + pages)

    def read_s(self, pages: int, queued_pages: int) -> float:
        """Seconds to bring up `pages` behind `queued_pages` others."""
        return _seconds(self.read, queued_pages + pages)

    def load_s(self, pages: int) -> float:
        """Seconds that `pages` add to a load."""
        return self.load.line()[1] * pages

    def compute_s(self, tokens: int) -> float:
        """Seconds that `tokens` add to the engine's steps."""
        return self.compute.line()[1] * tokens


def _seconds(line: MovingLine, units: int) -> float:
    """What `units` at once take."""
    latency_s, unit_s = line.line()
    return latency_s + unit_s * units
