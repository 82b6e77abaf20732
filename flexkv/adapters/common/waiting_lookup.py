"""Lookups that wait for the tiers behind host memory, for engines that cannot be asked to repeat a lookup later."""

from __future__ import annotations

import time
from collections.abc import Callable

from flexkv.cache.base import MatchResult

READ_LOOK_S = 0.0005
"""Seconds between two polls of a lookup that waits for reads from the tiers behind host memory."""

Pause = Callable[[float], None]
"""A function that waits for the given number of seconds."""


def match_and_wait(
    match: Callable[[], MatchResult],
    waits: Callable[[str], bool],
    ends_s: float,
    poll: Callable[[], None],
    pause: Pause | None = None,
) -> MatchResult:
    """Repeats a lookup until it is complete in the tiers behind host memory, too, or until `ends_s`.

    Args:
        match: looks up the request (`CacheManager.match`).
        waits: whether the request with this id still waits for a tier (`CacheManager.waits`).
        ends_s: when to stop waiting (`time.monotonic`).
        poll: polls the tiers.
        pause: waits between two polls; None for `time.sleep`.

    Returns:
        The result of the last lookup.
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
