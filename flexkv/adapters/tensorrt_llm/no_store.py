"""Requests of steps that broke off: nobody knows what their blocks hold."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.observe import get_logger

logger = get_logger(__name__)

MAX_NO_STORE = 4096
"""Ids that are known one by one. A request that ends with nothing to store is never named again, so they add up."""

FIRST_DUMMY = 1 << 63
"""The engine's dummies, which pad its batches, have ids next to 2**64; its requests count up from the bottom."""


class NoStoreRequests:
    """Remembers what must not be stored, in bounded memory.

    The ids of the latest `MAX_NO_STORE` are exact. Of older ones only the highest is kept, and every id up to it counts
    as not to be stored: engines number requests upwards, so these are old requests; their stores are dropped. A drop
    is a later miss. Ids from `FIRST_DUMMY` on have a bound of their own, which concerns no request below.
    """

    def __init__(self) -> None:
        self._latest: dict[int, None] = {}
        self._requests_up_to = -1
        self._dummies_up_to = -1
        self._said = False

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, requests: Iterable[int]) -> None:
        for request_id in requests:
            self._latest.pop(request_id, None)
            self._latest[request_id] = None
        while len(self._latest) > MAX_NO_STORE:
            oldest = next(iter(self._latest))
            del self._latest[oldest]
            if oldest < FIRST_DUMMY:
                self._requests_up_to = max(self._requests_up_to, oldest)
            else:
                self._dummies_up_to = max(self._dummies_up_to, oldest)

    def take(self, request_id: int) -> bool:
        """Whether the request is one of them. It has ended, and its id is not asked for again."""
        exact = request_id in self._latest
        self._latest.pop(request_id, None)
        return exact or self._counts_as_old(request_id)

    def _counts_as_old(self, request_id: int) -> bool:
        up_to = self._requests_up_to if request_id < FIRST_DUMMY else self._dummies_up_to
        if request_id > up_to:
            return False
        if not self._said:
            self._said = True
            logger.warning(
                "request %d and all up to %d are not stored, whether or not a step of theirs broke off: of requests of "
                "broken steps only the latest %d are known one by one (said once)",
                request_id,
                up_to,
                MAX_NO_STORE,
            )
        return True
