"""A circuit breaker: stops calls to a store that does not answer, and from time to time probes whether it is back."""

from __future__ import annotations

import math
import random
from collections import deque
from enum import Enum

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
"""Rests double up to this length, so a store that restarts is found soon, and one that is gone costs little. The next
rest is short again only after the store has served for LONGEST_REST_S: a store that answers and then fails the next
call, over and over, rests as long as one that does not answer.
"""

JITTER = 0.25
"""By which fraction a rest is randomly longer or shorter, so that a store's units do not all return at once."""

WATCHED = 20
"""How many of the last reads count. If more than half of these failed, the store answers but serves no values."""


class BreakerState(Enum):
    CLOSED = "closed"
    """The store is used."""
    OPEN = "open"
    """It is not called at all."""
    HALF_OPEN = "half_open"
    """One question is under way."""


class Breaker:
    """The breaker of one store. The caller reports what it sees, and asks the breaker before it calls the store.

    Args:
        spread: fraction of the jitter that each rest gets, in [-1, 1]; None for random fractions.
    """

    def __init__(self, now_s: float, reason: str, spread: float | None = None) -> None:
        self._spread = spread
        self._rest_s = FIRST_REST_S
        self._recent: deque[bool] = deque(maxlen=WATCHED)
        self.state = BreakerState.OPEN
        self.reason = reason
        """Why the store is not used; empty while it is."""
        self._until_s = now_s
        self._closed_s = now_s

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def lost(self, reason: str, now_s: float) -> bool:
        """Records that the store could not be reached, or took too long to answer; returns whether it was in use."""
        was_closed = self.closed
        if self.state is BreakerState.OPEN and now_s < self._until_s:
            return False  # other calls that were under way report the same loss, which counts once
        if was_closed and now_s - self._closed_s >= LONGEST_REST_S:
            self._rest_s = FIRST_REST_S
        spread = random.uniform(-1, 1) if self._spread is None else self._spread
        self._until_s = now_s + self._rest_s * (1 + JITTER * spread)
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        self.state, self.reason = BreakerState.OPEN, reason
        self._recent.clear()
        return was_closed

    def judge(self, good: int, failed: int) -> str:
        """Records that a store that answers delivered `good` values and failed to deliver `failed`; returns why it
        counts as lost nevertheless, or an empty string. Their order is unknown, so if there are more than WATCHED, both
        numbers are scaled down.
        """
        read = good + failed
        watched = min(read, WATCHED)
        bad_now = math.ceil(failed * watched / read) if read else 0
        self._recent.extend([True] * (watched - bad_now) + [False] * bad_now)
        bad = self._recent.count(False)
        return f"of the last {WATCHED} values {bad} could not be read" if 2 * bad > WATCHED else ""

    def due(self, now_s: float) -> bool:
        """Whether it is time to probe whether the store is alive."""
        return self.state is BreakerState.OPEN and now_s >= self._until_s

    def asked(self) -> None:
        """Records that the store was asked."""
        self.state = BreakerState.HALF_OPEN

    def answered(self, now_s: float) -> None:
        """Records that the store has answered."""
        self.state, self.reason, self._closed_s = BreakerState.CLOSED, "", now_s
