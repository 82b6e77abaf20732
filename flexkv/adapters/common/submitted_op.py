"""One op of one rank from its submission to its report: which result is reported, and how the op is counted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from flexkv.adapters.common.load_job import LoadJob
from flexkv.observe import Counters, PageLoss, get_logger
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpResult, OpStatus

logger = get_logger(__name__)

PAST_DEADLINE = "past load.deadline_s"

LOSSES = {
    OpStatus.OK: PageLoss.MOVE_FAILED,
    OpStatus.FAILED: PageLoss.MOVE_FAILED,
    OpStatus.SKIPPED: PageLoss.MOVE_SKIPPED,
    OpStatus.LANE_DOWN: PageLoss.LANE_DOWN,
    # A cancelled op is not an error: a client may have disconnected.
    OpStatus.CANCELLED: PageLoss.CANCELLED,
}
"""The reason for which an op's failed pages are counted, by the op's status. An op with status OK has failed pages only
if pages were torn: the engine may have written their blocks while the copy read them."""


@dataclass(slots=True)
class SubmittedOp:
    """An op that was submitted on this rank and is not yet reported.

    Attributes:
        ticket: the ticket of the op's graph.
        pages: number of pages in the op.
        group: number of the KV group.
        started_s: when the op was submitted (`time.monotonic`).
        step: number of the last forward pass that had been ordered when the op was submitted.
        load: the job that the op belongs to; None for a store op.
        deadline_s: when the op is given up (`time.monotonic`); infinite for a store op, and after the op was given up.
        torn: positions in the op whose blocks the engine may have written while the copy read them; None if there are
            none.
        given_up: why the op's bytes must not be used, however the op ends; empty while they may be used.
    """

    ticket: Ticket
    pages: int
    group: int
    started_s: float
    step: int
    load: LoadJob | None = None
    deadline_s: float = float("inf")
    torn: set[int] | None = None
    given_up: str = ""

    def outcome(self, result: OpResult) -> OpResult:
        """The result to report for an op that finished with `result`."""
        if self.given_up:
            # The result is not FAILED, because FAILED would mean that the stored pages are bad.
            return OpResult.cancelled(result.op_id, self.pages, self.given_up)
        if not self.torn:
            return result
        torn = np.fromiter(self.torn, dtype=np.int32)
        failed = np.union1d(result.failed, torn).astype(np.int32)
        status = OpStatus.FAILED if result.status is OpStatus.OK else result.status
        reason = result.reason or "the engine reused the block too soon"
        return OpResult(result.op_id, status, failed, reason, result.digests)

    def count(self, result: OpResult, stripe_bytes: int, counters: Counters) -> None:
        """Adds a finished op to the metrics.

        Args:
            result: the op's result as reported.
            stripe_bytes: bytes per page that this rank moves.
        """
        direction = "load" if self.load is not None else "store"
        failed = len(result.failed)
        counters.add("flexkv_moved_pages_total", self.pages - failed, direction=direction)
        counters.add("flexkv_moved_bytes_total", (self.pages - failed) * stripe_bytes, direction=direction)
        counters.observe("flexkv_transfer_seconds", time.monotonic() - self.started_s, direction=direction)
        loss = PageLoss.DEADLINE if self.given_up == PAST_DEADLINE else LOSSES[result.status]
        loss.count(counters, failed, direction=direction)
        if failed:
            logger.debug("op %d: %d pages failed: %s", result.op_id, failed, result.reason)
