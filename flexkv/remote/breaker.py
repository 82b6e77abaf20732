"""A circuit breaker: a store that does not answer is left alone, and asked once in a while whether it is back."""

from __future__ import annotations

import math
import random
from collections import deque
from enum import Enum

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
"""Each rest is twice as long as the one before, so a store that restarts is found soon, and one that is gone costs
little. Only after a store has served for LONGEST_REST_S is the next rest the first again, so a store that answers and
then dies with the next call, over and over, rests as long as one that does not answer."""

JITTER = 0.25
"""Share of a rest by which it is longer or shorter, so that units of one store do not all come back at once."""

WATCHED = 20
"""How many of the last reads count. If more than half of these failed, the store answers but serves nothing."""


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
        spread: share of the jitter that each rest gets, in [-1, 1]; None for random shares.
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
        """Notes that the store could not be reached, or took too long to answer; returns whether it was in use."""
        was_closed = self.closed
        if self.state is BreakerState.OPEN and now_s < self._until_s:
            return False  # other calls that were under way report the same loss: it makes one rest
        if was_closed and now_s - self._closed_s >= LONGEST_REST_S:
            self._rest_s = FIRST_REST_S
        spread = random.uniform(-1, 1) if self._spread is None else self._spread
        self._until_s = now_s + self._rest_s * (1 + JITTER * spread)
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        self.state, self.reason = BreakerState.OPEN, reason
        self._recent.clear()
        return was_closed

    def judge(self, good: int, failed: int) -> str:
        """Notes that `good` values were read and `failed` were not, of a store that is there; returns why it is lost
        all the same, or an empty string. Their order is unknown, so more than WATCHED of them count by their share."""
        read = good + failed
        watched = min(read, WATCHED)
        bad_now = math.ceil(failed * watched / read) if read else 0
        self._recent.extend([True] * (watched - bad_now) + [False] * bad_now)
        bad = self._recent.count(False)
        return f"of the last {WATCHED} values {bad} could not be read" if 2 * bad > WATCHED else ""

    def due(self, now_s: float) -> bool:
        """Whether it is time to ask the store if it is there."""
        return self.state is BreakerState.OPEN and now_s >= self._until_s

    def asked(self) -> None:
        """Notes that the store was asked."""
        self.state = BreakerState.HALF_OPEN

    def answered(self, now_s: float) -> None:
        """Notes that the store has answered."""
        self.state, self.reason, self._closed_s = BreakerState.CLOSED, "", now_s
