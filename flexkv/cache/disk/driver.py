"""Carries ops between a manager's disk traffic and the data plane of its process, without ever waiting for a disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from flexkv.cache.disk.base import Plane, SiblingPlane
from flexkv.cache.disk.flow import DiskFlow
from flexkv.errors import FlexKVError
from flexkv.observe import get_logger
from flexkv.storage.base import DiskTier
from flexkv.transfer.graph import OpKind, OpResult, SlotIds, TransferGraph

logger = get_logger(__name__)

WATCH_EVERY_S = 0.25
"""How often the disks are asked for news while nothing moves."""

SAY_LEFT_EVERY_S = 60.0
"""How often at most the log says that pages are computed although they are on disk."""

FLUSH_SHARE = 0.7
"""Of a close's time, how much is for beginning writes; the rest is for ending them, fdatasync and the index."""

CLOSE_LOOK_S = 0.002
"""How often a close looks whether the writes have ended."""


class DiskDriver:
    """Called by the thread that drives the manager, whenever it has a moment.

    Args:
        plane: runs DISK_READ, DISK_WRITE and DISK_SEAL; it is closed with the driver.
        tier: is closed with the driver.
        fail_read: tells loads that wait for a read (host slots and number) that it will never be made. Of reads that
            were submitted, the plane or the reader says itself how they end.
        reader: carries out the reads of siblings' pages, and is closed with the driver; None where there are none.
    """

    def __init__(
        self,
        flow: DiskFlow,
        plane: Plane,
        tier: DiskTier,
        clock: Callable[[], float] = time.monotonic,
        fail_read: Callable[[SlotIds, int], None] = lambda slots, read: None,
        reader: SiblingPlane | None = None,
    ) -> None:
        self._flow = flow
        self._plane = plane
        self._reader = reader
        self._tier = tier
        self._clock = clock
        self._fail_read = fail_read
        self._watch_at_s = 0.0
        self._say_left_at_s = 0.0
        self._siblings_down = False
        self._given_up_pages = 0
        self._closed: bool | None = None
        """What the close said; None before it."""
        self.durable_pages = 0

    @property
    def busy(self) -> bool:
        """Whether there is something to submit or to wait for, or to be made durable by further calls of `pump`."""
        return self._closed is None and (self._flow.busy or self._tier.owes)

    def pump(self) -> None:
        """Takes results, plans writes, submits what was planned. Costs about a microsecond when there is nothing."""
        if self._closed is not None:
            return
        if self._flow.moving:
            self._take_results()
        self._flow.pump()
        for graph in self._flow.take_orders():
            self._submit(graph)
        if self._reader is not None:
            for graph in self._flow.take_sibling_orders():
                if self._reader.submit(graph) is None:
                    self._cancel(graph, "the queue of siblings' pages is full")
        now_s = self._clock()
        if now_s >= self._watch_at_s:
            self._watch_at_s = now_s + WATCH_EVERY_S
            self._watch()

    def look_durable(self) -> bool:
        """Whether all that was written until now would survive a crash; asks the disks for news first."""
        stats = self._tier.stats()
        # In this order: a journal that has failed lags behind nothing, and its disk is found lost here. What journals
        # had no room for is given to them here, too, and lags from then on.
        self._watch()
        return not (stats.journal_lag_s > 0 or stats.owed_pages)

    def _submit(self, graph: TransferGraph) -> None:
        reason = "the disk lane's queue is full"
        try:
            if self._plane.submit(graph) is not None:
                return
        except FlexKVError as error:
            # The engine can live without its disks: what they hold is a miss from now on.
            reason = f"{type(error).__name__}: {error}"
            self._go_down(reason)
        self._cancel(graph, reason)

    def _cancel(self, graph: TransferGraph, reason: str) -> None:
        for op in graph.ops:
            if op.kind is OpKind.DISK_READ:
                self._fail_read(op.slots, op.op_id)
            self._flow.complete(OpResult.cancelled(op.op_id, op.pages, reason))

    def _take_results(self) -> None:
        planes: tuple[Plane | None, ...] = (self._plane, self._reader)
        for plane in planes:
            while plane is not None and (results := plane.poll()):
                for result in results:
                    self._flow.complete(result)

    def _watch(self) -> None:
        events = self._tier.poll()
        self.durable_pages += sum(len(pages.places) for pages in events.durable)
        for lost in events.lost:
            logger.error(
                "disk %s is out of use, what it held is computed again: %s", lost.folder, lost.reason
            )
            self._flow.index.lose(lost.disk)
        if events.lost and not any(self._tier.alive):
            self._go_down("no disk is left")
        self._watch_siblings()
        self._say_left()

    def _watch_siblings(self) -> None:
        siblings = self._flow.siblings
        if self._reader is None or siblings is None or self._siblings_down:
            return
        if reason := self._reader.down_reason:
            self._siblings_down = True
            logger.error("pages of other units' folders are out of use: %s", reason)
            for disk in range(siblings.tier.disks):
                siblings.lose(disk)

    def _say_left(self) -> None:
        left, now_s = self._flow.lookup.last_left, self._clock()
        if left is None or now_s < self._say_left_at_s:
            return
        self._flow.lookup.last_left, self._say_left_at_s = None, now_s + SAY_LEFT_EVERY_S
        logger.info(
            "pages on disk are left to the engine, which computes them sooner: of the last lookup %d, in about %.3f s "
            "instead of %.3f s (disk.compute_if_faster)",
            left.pages,
            left.compute_s,
            left.read_s,
        )

    def _go_down(self, reason: str) -> None:
        if not self._flow.down:
            logger.error("the disk tier is off: %s", reason)
        self._flow.go_down(reason)

    def close(self, deadline_s: float) -> bool:
        """Writes what waits and what only host memory has, ends the lane, and makes all of it durable.

        False: after `deadline_s` seconds something still moved, or was not written, or not durable. What was not
        written is lost, and nothing else. New writes begin within `FLUSH_SHARE` of the time only, so that those under
        way can end and become durable. Further calls say the same again.
        """
        if self._closed is not None:
            return self._closed
        ends_s = time.monotonic() + deadline_s
        flush_ends_s = time.monotonic() + FLUSH_SHARE * deadline_s
        self._flow.offer_all()
        self._flow.writes.flush()
        self.pump()
        while self._flow.busy and time.monotonic() < ends_s:
            if time.monotonic() < flush_ends_s:
                self._flow.writes.flush()
            else:
                self._give_up_writes(deadline_s)
            time.sleep(CLOSE_LOOK_S)
            self.pump()
        self._give_up_writes(deadline_s)  # one look may have lasted to the end
        ended = self._plane.close(max(0.0, ends_s - time.monotonic()))
        if self._reader is not None:
            ended &= self._reader.close(max(0.0, ends_s - time.monotonic()))
        self._take_results()
        durable = self._tier.close(max(0.0, ends_s - time.monotonic()))
        self._closed = ended and durable and not self._given_up_pages
        if not (ended and durable):
            logger.warning(
                "the disk tier did not end within %.1f s: what was not durable is computed again",
                deadline_s,
            )
        return self._closed

    def _give_up_writes(self, deadline_s: float) -> None:
        if left := self._flow.writes.give_up_waiting():
            self._given_up_pages += left
            logger.warning("the disk tier did not write %d pages within %.1f s", left, deadline_s)
