"""Remembers the requests of steps that failed midway: the content of their blocks is unknown, so it must not be
stored.
"""

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
    """Remembers, in bounded memory, which requests must not be stored.

    The latest `MAX_NO_STORE` ids are kept exactly. For older ids only the highest is kept, and every request up to it
    is not stored: engines number requests upwards, so these are old requests, and a dropped store costs only a later
    miss. Ids from `FIRST_DUMMY` on have a separate highest id, which affects no request below `FIRST_DUMMY`.
    """

    def __init__(self) -> None:
        self._latest: dict[int, None] = {}
        self._up_to = {False: -1, True: -1}
        """The highest of the older ids; by whether they count as a dummy's."""
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
            is_dummy = oldest >= FIRST_DUMMY
            self._up_to[is_dummy] = max(self._up_to[is_dummy], oldest)

    def take(self, request_id: int) -> bool:
        """Removes a request that has ended; returns whether it must not be stored."""
        if request_id in self._latest:
            del self._latest[request_id]
            return True
        up_to = self._up_to[request_id >= FIRST_DUMMY]
        if request_id <= up_to and not self._said:
            self._said = True
            logger.warning(
                "request %d and all up to %d are not stored, whether or not a step of theirs broke off: of requests of "
                "broken steps only the latest %d are known one by one (said once)",
                request_id,
                up_to,
                MAX_NO_STORE,
            )
        return request_id <= up_to
