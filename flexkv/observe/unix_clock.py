"""The time of day as pages carry it: whole seconds or milliseconds since 1970, never negative.

A machine's clock may be set to anything, even before 1970 or so far ahead that no field holds it. Then the nearest time
that the fields hold is used: ages and expiries are wrong, and nothing fails.
"""

from __future__ import annotations

import time

MOST_S = (1 << 53) - 1
"""Seconds that a float holds exactly; also in milliseconds they fit a u64 with room to spare."""


def unix_now_s() -> int:
    """Unix seconds in [0, MOST_S]."""
    return int(_clamped())


def unix_now_ms() -> int:
    """Unix milliseconds in [0, 1000 * MOST_S]."""
    return int(_clamped() * 1000)


def _clamped() -> float:
    now = time.time()
    # Also for NaN, which compares with nothing.
    return min(max(0.0, now), float(MOST_S)) if now == now else 0.0
