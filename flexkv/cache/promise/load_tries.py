"""Records which pages a live request's loads failed to bring, so that its next lookups do not promise them again.

`flexkv/cache/moves/op_log.py` logs why a load failed.

After a failed load, some engines look the request up again. If the failed pages are slow rather than bad, the tiers do
not forget them, and every lookup would find them again. So a request has two tries. The second try does not include the
pages that the first try failed to bring. If the second try fails too, the engine computes the request.

Other engines cannot compute the pages that a load did not bring. They end the request, and the client sends it again
with a new id. With such an engine, no request gets a new promise for a while after a failed load, unless it was a load
straight from a tier and its route failed. Such a route pauses by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexkv.cache.ledger.ops import RankOp
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId

logger = get_logger(__name__)

TRIES = 2
"""Number of failed loads of one request after which nothing more is promised to it."""

MAX_REQUESTS = 4096
"""Maximum number of recorded requests; if it is exceeded, the oldest is dropped. Few live requests have a failed load.
The limit bounds the memory for requests whose end is never reported."""


@dataclass(slots=True)
class RequestTries:
    """The failed loads of one request.

    Attributes:
        failures: number of loads that failed, at most `TRIES`.
        last: op number of the first op of the last failed load; None before the first failure.
        first_token: position of the first token of the first page that a load from host memory did not bring; None if
            no such load has failed.
        straight: whether a straight load from another tier has failed, so that pages must be fetched to host memory
            first.
    """

    failures: int = 0
    last: OpId | None = None
    first_token: int | None = None
    straight: bool = False

    def end_of_promise(self, start_tokens: int) -> int | None:
        """Returns the token position at which a promise after `start_tokens` has to end; None for no limit."""
        if self.failures >= TRIES:
            return start_tokens
        return None if self.first_token is None else max(start_tokens, self.first_token)


class LoadTries:
    """The failed loads of each live request, until `end_request`.

    Args:
        rest_s: seconds without new promises after a failed load; see `ManagerLimits.rest_s`.
        clock: returns seconds and never runs backwards.
    """

    def __init__(self, rest_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests: dict[str, RequestTries] = {}
        self._rest_s = rest_s
        self._clock = clock
        self._rests_until_s = -math.inf

    def __len__(self) -> int:
        return len(self._requests)

    def of_request(self, request_id: str) -> RequestTries | None:
        """Returns the record of the request's failed loads; None if none has failed. O(1)."""
        return self._requests.get(request_id)

    def note_failure(self, op: RankOp, block_tokens: int) -> None:
        """Records that pages of a load failed.

        Call order:
            After each rank's report of failed pages, before the request can be looked up again.
        """
        if op.abandoned:
            return
        # A straight route that failed pauses by itself, and pages are loaded through host memory until it resumes.
        own_rest = op.straight and op.source_failed
        if self._rest_s and not own_rest and (op.failed & ~op.suspect).any():
            self._rest(op)
        known = self._requests.get(op.request_id)
        if known is None:
            if len(self._requests) >= MAX_REQUESTS:
                del self._requests[next(iter(self._requests))]
            known = self._requests[op.request_id] = RequestTries()
        if known.last != op.load:
            # Failures on several ranks or in several ops of one load count as one failure.
            known.failures, known.last = min(TRIES, known.failures + 1), op.load
        if op.straight:
            known.straight = True
            return
        first = int(op.block_numbers[np.argmax(op.failed)]) * block_tokens
        known.first_token = first if known.first_token is None else min(first, known.first_token)

    def _rest(self, op: RankOp) -> None:
        now_s = self._clock()
        if now_s >= self._rests_until_s:
            logger.warning(
                "nothing is promised for the next %.0f s, because this engine ends requests whose load fails: %s",
                self._rest_s,
                "; ".join(op.reasons),
            )
        self._rests_until_s = now_s + self._rest_s

    @property
    def rests(self) -> bool:
        """Whether requests get no new promises for now, because within the last `rest_s` seconds a load failed whose
        pages are still in their tier.
        """
        return self._rest_s > 0 and self._clock() < self._rests_until_s

    def end_request(self, request_id: str) -> None:
        """Forgets the failed loads of a request that has ended."""
        self._requests.pop(request_id, None)
