"""The wall-clock time that pages record: whole seconds or milliseconds since 1970, never negative.

A machine's clock may be set to any time, even before 1970 or too far ahead for the fields. The nearest time that fits
is then used: ages and expiries are wrong, but nothing fails.
"""

from __future__ import annotations

import time

MOST_S = (1 << 53) - 1
"""The most seconds that a float represents exactly; in milliseconds they still fit into a u64."""


def unix_now_s() -> int:
    """Unix seconds in [0, MOST_S]."""
    return int(_clamped())


def unix_now_ms() -> int:
    """Unix milliseconds in [0, 1000 * MOST_S]."""
    return int(_clamped() * 1000)


def _clamped() -> float:
    now = time.time()
    # Also handles NaN, which compares false with everything.
    return min(max(0.0, now), float(MOST_S)) if now == now else 0.0
