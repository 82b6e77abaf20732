"""A circuit breaker. It stops calls to a store that does not answer, and says when to probe whether the store is
back.
"""

from __future__ import annotations

import math
import random
from collections import deque
from enum import Enum

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
"""The longest rest in seconds. A rest is the time between two probes of a lost store. The first rest is FIRST_REST_S,
and each further one is twice as long, up to this length. So a store that restarts is found soon, and one that is gone
costs little. The next rest is short again only if the store has been used for LONGEST_REST_S seconds. So a store that
answers every probe, but then fails calls, rests as long as one that does not answer.
"""

JITTER = 0.25
"""A rest is randomly longer or shorter by up to this fraction, so that the units that share a store do not all probe it
at the same moment.
"""

WATCHED = 20
"""The number of most recent reads that the breaker looks at. If more than half of WATCHED reads failed, the store
counts as lost, although it answers.
"""


class BreakerState(Enum):
    CLOSED = "closed"
    """The store is used."""
    OPEN = "open"
    """The store is not called at all."""
    HALF_OPEN = "half_open"
    """A probe is in flight, which decides whether the store is used again."""


class Breaker:
    """The breaker of one store. The caller reports how calls end, and asks the breaker before it calls the store. The
    breaker starts OPEN, and a probe is due at once.

    Args:
        now_s: the time now, in seconds of the caller's monotonic clock, as for all methods.
        reason: why the store is not used at first.
        spread: factor in [-1, 1] by which JITTER is multiplied for each rest; None for random factors.
    """

    def __init__(self, now_s: float, reason: str, spread: float | None = None) -> None:
        self._spread = spread
        self._rest_s = FIRST_REST_S
        self._recent: deque[bool] = deque(maxlen=WATCHED)
        self.state = BreakerState.OPEN
        self.reason = reason
        """Why the store is not used; empty while it is used."""
        self._until_s = now_s
        self._closed_s = now_s

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def lost(self, reason: str, now_s: float) -> bool:
        """Records that the store could not be reached, or took too long to answer. Returns whether the store was in use
        before this call.
        """
        was_closed = self.closed
        if self.state is BreakerState.OPEN and now_s < self._until_s:
            return False  # another call that was in flight reports the same loss, which counts once
        if was_closed and now_s - self._closed_s >= LONGEST_REST_S:
            self._rest_s = FIRST_REST_S
        spread = random.uniform(-1, 1) if self._spread is None else self._spread
        self._until_s = now_s + self._rest_s * (1 + JITTER * spread)
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        self.state, self.reason = BreakerState.OPEN, reason
        self._recent.clear()
        return was_closed

    def judge(self, good: int, failed: int) -> str:
        """Records that the store answered, and how many values it delivered (`good`) and failed to deliver (`failed`).
        Returns why the store should count as lost although it answers; empty if it should not. If there are more than
        WATCHED values, both numbers are scaled down, because the order of the values is unknown.
        """
        read = good + failed
        watched = min(read, WATCHED)
        bad_now = math.ceil(failed * watched / read) if read else 0
        self._recent.extend([True] * (watched - bad_now) + [False] * bad_now)
        bad = self._recent.count(False)
        return f"of the last {WATCHED} values {bad} could not be read" if 2 * bad > WATCHED else ""

    def due(self, now_s: float) -> bool:
        """Whether the store is not used and it is time to probe it."""
        return self.state is BreakerState.OPEN and now_s >= self._until_s

    def asked(self) -> None:
        """Records that a probe of the store was sent."""
        self.state = BreakerState.HALF_OPEN

    def answered(self, now_s: float) -> None:
        """Records that the store has answered the probe, so that it is used."""
        self.state, self.reason, self._closed_s = BreakerState.CLOSED, "", now_s
