"""Lookups of engines that cannot be asked to come back: they wait for pages behind host memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from flexkv.cache.base import MatchResult

READ_LOOK_S = 0.0005
"""Seconds between two polls of a lookup that waits for reads from the tiers behind host memory."""

Pause = Callable[[float], None]
"""Waits for a number of seconds."""


def match_and_wait(
    match: Callable[[], MatchResult],
    waits: Callable[[str], bool],
    ends_s: float,
    poll: Callable[[], None],
    pause: Pause | None = None,
) -> MatchResult:
    """Matches until the tiers behind host memory have answered, or the time to wait is over.

    Args:
        match: looks a request up (`CacheManager.match`).
        waits: see `CacheManager.waits`.
        ends_s: when the wait ends at the latest (`time.monotonic`).
        poll: drives the tiers.
        pause: called between two polls; None sleeps.
    """
    while True:
        found = match()
        if found.is_final:
            return found
        poll()
        if time.monotonic() >= ends_s:
            return found
        while waits(found.request_id) and time.monotonic() < ends_s:
            (pause or time.sleep)(READ_LOOK_S)
            poll()
