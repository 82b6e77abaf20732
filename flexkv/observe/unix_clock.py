"""The wall-clock time that is recorded in pages: whole seconds or milliseconds since 1970, never negative.

A machine's clock may be set to any time, even before 1970 or too far ahead for a page's fields. The nearest time that
fits is then used. Ages and expiries are wrong in that case, but nothing fails.
"""

from __future__ import annotations

import time

MOST_S = (1 << 53) - 1
"""Largest number of seconds up to which a float represents all whole numbers exactly. In milliseconds, it fits into a
u64."""


def unix_now_s() -> int:
    """Returns the time in Unix seconds, in [0, MOST_S]."""
    return int(_clamped())


def unix_now_ms() -> int:
    """Returns the time in Unix milliseconds, in [0, 1000 * MOST_S]."""
    return int(_clamped() * 1000)


def _clamped() -> float:
    now = time.time()
    # Returns 0 for NaN, which does not equal itself.
    return min(max(0.0, now), float(MOST_S)) if now == now else 0.0
