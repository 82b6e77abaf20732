"""Pages that a live request's loads failed to bring, so that its next lookups do not promise them again.

Why a load failed is logged by `flexkv/cache/moves/op_log.py`.

An engine whose load has failed as a whole asks again. If pages are slow rather than bad, the tiers do not forget them,
and every lookup would find them again while they stay slow. So a request has two tries: the second leaves out what the
first did not bring, and after the second the engine computes the request.

An engine that cannot compute the pages that a load did not bring ends the request instead, and its client asks again
under another id. With such an engine nothing new is promised to any request for a while, unless the failed route itself
pauses.
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
"""Requests remembered at once; beyond it the oldest is dropped. Few live requests have a failed load: this bounds the
ids whose end is never reported."""


@dataclass(slots=True)
class RequestTries:
    """The failed loads of one request.

    Attributes:
        failures: loads that failed, at most `TRIES`.
        last: number of the last failed load.
        first_token: first token of the first page that a load from host memory did not bring; None while such loads
            brought all.
        straight: a straight load from another tier failed, so its pages must be fetched to host memory first.
    """

    failures: int = 0
    last: OpId | None = None
    first_token: int | None = None
    straight: bool = False

    def end_of_promise(self, start_tokens: int) -> int | None:
        """The token at which a lookup after `start_tokens` has to end; None for no bound."""
        if self.failures >= TRIES:
            return start_tokens
        return None if self.first_token is None else max(start_tokens, self.first_token)


class LoadTries:
    """The failed loads by request, from a request's first failed page to `end_request`.

    Args:
        rest_s: `ManagerLimits.rest_s`.
        clock: seconds, never running backwards.
    """

    def __init__(self, rest_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests: dict[str, RequestTries] = {}
        self._rest_s = rest_s
        self._clock = clock
        self._rests_until_s = -math.inf

    def __len__(self) -> int:
        return len(self._requests)

    def of_request(self, request_id: str) -> RequestTries | None:
        """The request's failed loads; None if none failed. O(1)."""
        return self._requests.get(request_id)

    def note_failure(self, op: RankOp, block_tokens: int) -> None:
        """Records that pages of a load failed, of `block_tokens` tokens each.

        Call order:
            With each rank's report of a failure, before the request can be looked up again.
        """
        if op.abandoned:
            return
        # A straight route that failed pauses by itself, and its pages come through host memory meanwhile.
        own_rest = op.straight and op.source_failed
        if self._rest_s and not own_rest and (op.failed & ~op.suspect).any():
            self._rest(op)
        known = self._requests.get(op.request_id)
        if known is None:
            if len(self._requests) >= MAX_REQUESTS:
                del self._requests[next(iter(self._requests))]
            known = self._requests[op.request_id] = RequestTries()
        if known.last != op.load:
            # Counts once for all ranks and routes of one load.
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
        """Whether nothing new is promised for now, because a load failed recently whose pages are still in their
        tier.
        """
        return self._rest_s > 0 and self._clock() < self._rests_until_s

    def end_request(self, request_id: str) -> None:
        """Forgets the failed loads of a request that has ended."""
        self._requests.pop(request_id, None)
