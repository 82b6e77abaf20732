"""Remembers the requests of steps that broke off: the content of their blocks is unknown, so it must not be stored."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.observe import get_logger

logger = get_logger(__name__)

MAX_NO_STORE = 4096
"""Most ids that are kept one by one. The bound is needed because no order names a request that ends with nothing to
store, so its id is never taken out."""

FIRST_DUMMY = 1 << 63
"""First id that counts as a dummy's. The engine's dummies, which pad batches, have ids close to 2**64, while requests
count up from small ids."""


class NoStoreRequests:
    """Remembers in bounded memory which requests must not be stored.

    The latest `MAX_NO_STORE` ids are kept exactly. For older ids only the highest is kept, and every request up to it
    is not stored: engines number requests upwards, so these are old requests, and a dropped store costs only a later
    miss. Ids from `FIRST_DUMMY` on have a highest id of their own, which affects no request below `FIRST_DUMMY`.
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
        """Removes a request that has ended; returns whether it must not be stored."""
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
