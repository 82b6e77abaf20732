"""Lookups of engines that cannot be asked to come back: they wait for pages behind host memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from flexkv.cache.base import CacheManager, MatchResult
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings

READ_LOOK_S = 0.0005
"""Seconds between two polls of a lookup that waits for reads from the tiers behind host memory."""

Pause = Callable[[float], None]
"""Waits for a number of seconds."""


def match_and_wait(
    manager: CacheManager,
    request_id: str,
    keys: Keys,
    start_tokens: int,
    ends_s: float,
    poll: Callable[[], None],
    pause: Pause | None = None,
    settings: RequestSettings = NO_SETTINGS,
) -> MatchResult:
    """Matches until the tiers behind host memory have answered, or the time to wait is over.

    Args:
        ends_s: when the wait ends at the latest (`time.monotonic`).
        poll: drives the tiers.
        pause: called between two polls; None sleeps.
    """
    while True:
        match = manager.match(request_id, [keys], start_tokens, None, settings)
        if match.is_final:
            return match
        poll()
        if time.monotonic() >= ends_s:
            return match
        while manager.waits(request_id) and time.monotonic() < ends_s:
            (pause or time.sleep)(READ_LOOK_S)
            poll()
