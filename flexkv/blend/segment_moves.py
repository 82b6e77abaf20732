"""Transfers between staging pool and host pool: begins them, polls them, and frees their blocks and pages when they
have finished."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import Hit
from flexkv.blend.segment_unit import SegmentUnit
from flexkv.blend.staging import StagingPool
from flexkv.cache.base import OpRole
from flexkv.transfer.base import DataPlane, Ticket
from flexkv.transfer.graph import OpResult, TransferGraph


@dataclass(frozen=True, slots=True, eq=False)
class LateBlocks:
    """Staging blocks of an abandoned transfer. They stay in use until the transfer has finished.

    Attributes:
        tickets: tickets of the transfer's graphs.
        blocks: numbers of the staging blocks, int32 [blocks].
        requests: ids of the manager's requests that end when the transfer has finished.
    """

    tickets: tuple[Ticket, ...]
    blocks: NDArray[np.int32]
    requests: tuple[str, ...] = ()


class SegmentMoves:
    """The transfers of one segment cache. Only the thread that uses the cache may call it.

    Args:
        unit: the cache's unit, whose tiers read the pages that load operations wait for.
        engine: the transfer engine, which copies pages between staging pool and host pool.
    """

    def __init__(self, unit: SegmentUnit, engine: DataPlane, staging: StagingPool) -> None:
        self.staging = staging
        self.engine = engine
        self._unit = unit.live
        self._manager = unit.live.manager
        self._late: list[LateBlocks] = []
        self._why_failed: dict[str, str] = {}

    def begin_reads(self) -> None:
        """Starts the disk reads that lookups have planned."""
        self._unit.poll()

    def submit(self, graph: TransferGraph) -> Ticket | None:
        """Submits a graph. Returns None if the queue has no free entry for it. If this returns None or raises, the
        graph has been reported to the manager as cancelled.
        """
        try:
            self._unit.poll()  # starts the disk reads that the graph's load ops wait for
            ticket = self.engine.submit(graph)
        except Exception as error:
            self._cancel(graph, f"{type(error).__name__}: {error}")
            raise
        if ticket is None:
            self._cancel(graph, "no queue entry")
        return ticket

    def _cancel(self, graph: TransferGraph, reason: str) -> None:
        for op in graph.ops:
            self._manager.complete(0, OpResult.cancelled(op.op_id, op.pages, reason))

    def finish(self, hit: Hit, wait_s: float) -> bool:
        """Waits up to `wait_s` seconds for a load, then frees its staging blocks and returns True. If copies are still
        in flight then, returns False, and the blocks are freed later.
        """
        ends_s = time.monotonic() + wait_s
        if not all(self.engine.wait(t, max(0.0, ends_s - time.monotonic())) for t in hit.tickets):
            self.leave(LateBlocks(hit.tickets, hit.blocks, hit.requests))
            return False
        self.take_results()
        for request in hit.requests:
            self._manager.end_request(request)
        self.staging.give(hit.blocks)
        return True

    def why_failed(self, hit: Hit) -> str:
        """Returns why pages of a finished hit did not arrive; empty if all did. The reason is removed, so call this
        once per hit.
        """
        reasons = [self.take_reason(request) for request in hit.requests]
        return "; ".join(reason for reason in reasons if reason)

    def take_reason(self, request: str) -> str:
        """Removes and returns the reason why pages of a finished request were not copied; empty if there is none."""
        return self._why_failed.pop(request, "")

    def take_results(self) -> None:
        """Takes the results of finished ops, including those of the disks, and reports them to the manager."""
        self._unit.poll()
        while results := self.engine.poll():
            for result in results:
                done = self._manager.complete(0, result)
                if done is None or not len(done.failed_blocks):
                    continue
                # For a store, failed blocks without a reason mean only that their pages are not published.
                if done.role is OpRole.LOAD or done.reason:
                    self._why_failed[done.request_id] = done.reason or "pages failed"

    def leave(self, late: LateBlocks) -> None:
        """Abandons a transfer. `free_late` frees its blocks after it has finished."""
        self._late.append(late)

    def free_late(self) -> None:
        """Frees the blocks of abandoned transfers that have finished."""
        self._unit.poll()
        ended = [late for late in self._late if all(self.engine.wait(ticket, 0.0) for ticket in late.tickets)]
        if not ended:
            return
        self.take_results()
        self._late = [late for late in self._late if late not in ended]
        for late in ended:
            for request in late.requests:
                self._manager.end_request(request)
                self._why_failed.pop(request, None)
            self.staging.give(late.blocks)
