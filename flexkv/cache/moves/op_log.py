"""Log lines and trace spans of lookups and ops. Failures are logged as warnings, everything else at debug level."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from flexkv.cache.base import MatchResult, OpRole
from flexkv.cache.ledger.ops import Op, RankOp
from flexkv.cache.tiers.tables import CacheTables
from flexkv.observe import FailedOps, OpSpans, get_logger
from flexkv.observe.spans import REQUEST_ID, AttributeValue
from flexkv.transfer.graph import OpResult, OpStatus

logger = get_logger(__name__)

WORDS = {
    OpRole.LOAD: "load from {}",
    OpRole.STORE: "store to {}",
    OpRole.FETCH: "read from {} to host memory",
    OpRole.WRITE: "write from host memory to {}",
    OpRole.PROBE: "question to {}",
    OpRole.SEAL: "seal on {}",
}

REQUEST_IDS = f"{REQUEST_ID}s"
MOST_REQUESTS = 3
"""Maximum number of waiting requests that a warning about a failed read lists."""


class OpLog:
    """The log of one manager."""

    def __init__(self, tables: CacheTables) -> None:
        self._tables = tables
        self._failed = FailedOps(logger, tables.clock)
        self._spans = OpSpans()

    def looked_up(self, result: MatchResult, asked: int) -> None:
        """Logs the answer to a lookup of `asked` tokens after `result.start_tokens`."""
        if logger.isEnabledFor(logging.DEBUG):
            in_host = sum(len(group.slots) for group in result.groups)
            logger.debug(
                "request %s: %d tokens looked up from %d on, %d promised (%d pages in host memory), tail %d, "
                "%d reads waited for%s",
                result.request_id,
                asked,
                result.start_tokens,
                result.tokens,
                in_host,
                result.tail_tokens,
                result.reads,
                "" if result.miss is None else f"; no more: {result.miss.words}",
            )

    def _words(self, op: Op) -> str:
        return WORDS[op.role].format(self._tables.tiers[op.tier].facts.name)

    def load_begun(self, ops: Sequence[RankOp]) -> None:
        """Logs the ops of a load that has just been planned."""
        if logger.isEnabledFor(logging.DEBUG):
            for op in ops:
                logger.debug(
                    "request %s: op %d (%s), %d pages", op.request_id, op.op_id, self._words(op), op.pages
                )

    def ended(self, op: RankOp, expected: bool) -> None:
        """Logs an op that has ended on all ranks.

        Args:
            expected: whether failures were to be expected, because the op was abandoned or the cache was reset
                meanwhile. Expected failures are not logged as warnings.
        """
        failed = int(np.count_nonzero(op.failed))
        if self._spans.wanted:
            self._span(op, failed, "; ".join(op.reasons), {REQUEST_ID: op.request_id})
        if failed and not expected:
            name = f"op {op.op_id} of request {op.request_id}"
            self._failed.warn(self._words(op), name, failed, len(op.entries), "; ".join(op.reasons))
        elif logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: op %d (%s) has ended, %d of %d pages arrived%s",
                op.request_id,
                op.op_id,
                self._words(op),
                len(op.entries) - failed,
                len(op.entries),
                "".join(f"; {reason}" for reason in op.reasons),
            )

    def tier_op_ended(self, op: Op, failed: int, result: OpResult, waiters: Collection[str] = ()) -> None:
        """Logs the end of a tier's own op.

        Args:
            failed: number of pages that failed.
            waiters: requests that wait for the op.
        """
        if self._spans.wanted:
            self._span(op, failed, result.reason, {REQUEST_IDS: sorted(waiters)})
        if result.status is OpStatus.OK:
            return
        named = ", ".join(sorted(waiters)[:MOST_REQUESTS])
        more = f" and {len(waiters) - MOST_REQUESTS} more" if len(waiters) > MOST_REQUESTS else ""
        name = f"op {op.op_id}" + (f" for request {named}{more}" if named else "")
        self._failed.warn(self._words(op), name, failed, op.pages, result.reason)

    def _span(self, op: Op, failed: int, reason: str, requests: Mapping[str, AttributeValue]) -> None:
        attributes = {
            "flexkv.op_id": op.op_id,
            "flexkv.group": op.group,
            "flexkv.pages": op.pages,
            "flexkv.failed_pages": failed,
            **requests,
        }
        failure = (reason or "no reason was given") if failed else ""
        self._spans.ended(self._words(op), self._tables.clock() - op.begun_s, attributes, failure)

    def flush(self, at_end: bool = False) -> None:
        """Logs how many failures had no line of their own; see `FailedOps.flush`."""
        self._failed.flush(at_end)
