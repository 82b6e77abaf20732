"""Leaves a store alone that does not answer, and looks once in a while whether it does again."""

from __future__ import annotations

import math
import random
from collections import deque
from enum import Enum

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
"""Each rest is twice as long as the one before: a store that restarts is found soon, one that is gone costs nothing.
After a store has served for LONGEST_REST_S the next rest is the first again: what answers and dies with the next call,
over and over, rests as long as what does not answer."""

JITTER = 0.25
"""Share of a rest by which it is longer or shorter: units of one store do not all come back at once."""

WATCHED = 20
"""Of so many values that were read last, more than half have failed: the store answers and serves nothing."""


class BreakerState(Enum):
    CLOSED = "closed"
    """The store is used."""
    OPEN = "open"
    """It is not called at all."""
    HALF_OPEN = "half_open"
    """One question is under way."""


class Breaker:
    """Of one store. The caller says what it sees, and asks before it calls.

    Args:
        spread: in [-1, 1], of a rest's jitter.
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
        """The store could not be reached, or an answer took too long; whether that is news."""
        was_closed = self.closed
        if self.state is BreakerState.OPEN and now_s < self._until_s:
            return False  # what else was under way says so too: one loss makes one rest
        if was_closed and now_s - self._closed_s >= LONGEST_REST_S:
            self._rest_s = FIRST_REST_S
        spread = random.uniform(-1, 1) if self._spread is None else self._spread
        self._until_s = now_s + self._rest_s * (1 + JITTER * spread)
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        self.state, self.reason = BreakerState.OPEN, reason
        self._recent.clear()
        return was_closed

    def judge(self, good: int, failed: int) -> str:
        """So many values were read, and so many not, of a store that is there: why it is lost all the same, or
        nothing. In which order they came is not known: of more than WATCHED the same share counts."""
        read = good + failed
        watched = min(read, WATCHED)
        bad_now = math.ceil(failed * watched / read) if read else 0
        self._recent.extend([True] * (watched - bad_now) + [False] * bad_now)
        bad = self._recent.count(False)
        return f"of the last {WATCHED} values {bad} could not be read" if 2 * bad > WATCHED else ""

    def due(self, now_s: float) -> bool:
        """Whether the store is to be asked now if it is there."""
        return self.state is BreakerState.OPEN and now_s >= self._until_s

    def asked(self) -> None:
        """It was."""
        self.state = BreakerState.HALF_OPEN

    def answered(self, now_s: float) -> None:
        """It is."""
        self.state, self.reason, self._closed_s = BreakerState.CLOSED, "", now_s
