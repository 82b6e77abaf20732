"""Requests of steps that broke off: nobody knows what their blocks hold."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SPOILED = 4096
"""Ids that are known one by one. A request that ends with nothing to store is never heard of again, so they add up."""


class SpoiledRequests:
    """Remembers what must not be stored, in bounded memory.

    The ids of the latest `MAX_SPOILED` are exact. Of older ones only the highest is kept, and every id up to it counts
    as spoiled: engines number requests upwards, so that is old requests, whose stores are then dropped. A dropped store
    is a later miss.
    """

    def __init__(self) -> None:
        self._latest: dict[int, None] = {}
        self._all_up_to = -1

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, requests: Iterable[int]) -> None:
        for request_id in requests:
            self._latest.pop(request_id, None)
            self._latest[request_id] = None
        while len(self._latest) > MAX_SPOILED:
            oldest = next(iter(self._latest))
            del self._latest[oldest]
            self._all_up_to = max(self._all_up_to, oldest)

    def take(self, request_id: int) -> bool:
        """Whether the request is one of them. It has ended, and its id is not asked for again."""
        exact = request_id in self._latest
        self._latest.pop(request_id, None)
        return exact or request_id <= self._all_up_to
