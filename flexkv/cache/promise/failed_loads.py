"""What loads did not bring to each live request, so that its next lookups do not promise the same again.

An engine whose load has failed as a whole asks again. Where pages are too slow rather than bad, nothing is forgotten in
the tiers, and the answer would be the same for as long as they stay slow. So a request has two tries: the second leaves
out what the first did not bring, and after it the request is computed.

An engine that cannot compute what a load did not bring ends the request instead, and its client asks again under
another id. There nothing is promised to anybody for a while, but where the way rests that failed.
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
"""Loads of one request that may fail before nothing more is promised to it."""

MAX_REQUESTS = 4096
"""Requests remembered at once; the oldest is dropped beyond. Those whose load fails and that live are few: a bound on
ids whose end nobody tells."""


@dataclass(slots=True)
class FailedLoad:
    """What the loads of one request did not bring.

    Attributes:
        failures: loads that failed, at most `TRIES`.
        last: number of the last of them.
        first_token: of the first page that host memory did not bring; None while that brought all.
        straight: a load failed of pages that lie in another tier than host memory: they are to be fetched there first.
    """

    failures: int = 0
    last: OpId | None = None
    first_token: int | None = None
    straight: bool = False

    def end_of_promise(self, start_tokens: int) -> int | None:
        """Up to which token a lookup after `start_tokens` may look; None for all."""
        if self.failures >= TRIES:
            return start_tokens
        return None if self.first_token is None else max(start_tokens, self.first_token)


class FailedLoads:
    """By request, from the first failed page to `end_request`.

    Args:
        rest_s: `ManagerLimits.rest_s`.
        clock: seconds, never running backwards.
    """

    def __init__(self, rest_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests: dict[str, FailedLoad] = {}
        self._rest_s = rest_s
        self._clock = clock
        self._rests_until_s = -math.inf

    def __len__(self) -> int:
        return len(self._requests)

    def of_request(self, request_id: str) -> FailedLoad | None:
        """None for a request none of whose loads failed. O(1)."""
        return self._requests.get(request_id)

    def note_failure(self, op: RankOp, block_tokens: int) -> None:
        """Pages of a load failed, of so many tokens each. To be called with each rank's report, before the request can
        be looked up again."""
        if op.abandoned:
            return
        # A way straight from a tier that failed rests by itself, and its pages come by host memory meanwhile.
        own_rest = op.straight and op.source_failed
        if self._rest_s and not own_rest and (op.failed & ~op.suspect).any():
            self._rest(op)
        known = self._requests.get(op.request_id)
        if known is None:
            if len(self._requests) >= MAX_REQUESTS:
                del self._requests[next(iter(self._requests))]
            known = self._requests[op.request_id] = FailedLoad()
        if known.last != op.load:
            # Once for all ranks and ways of one load.
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
        """Whether a load has failed lately of which the pages are still there: nothing is promised anew."""
        return self._rest_s > 0 and self._clock() < self._rests_until_s

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
