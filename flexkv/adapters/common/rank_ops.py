"""One rank's ops between submit and report: waiting for a queue entry, under way, given up, ended."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv.adapters.common.base import LoadJob
from flexkv.adapters.common.cancel import cancel_and_drain, wait_all
from flexkv.adapters.common.rank_reports import RankReports
from flexkv.adapters.common.submitted_op import PAST_DEADLINE, SubmittedOp
from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError
from flexkv.observe import Counters, PageLoss
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, Priority, TransferGraph, TransferOp

if TYPE_CHECKING:
    from flexkv.c_ext import StreamPoint

NO_TICKET = Ticket(-1)
"""Ticket of an op that was refused."""

FULL_WAIT_S = 0.002
"""How often a load that a forward waits for is tried again while its lane's queue is full."""


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """A load that found its lane's queue full.

    Attributes:
        deadline_s: when it is given up, whether it has entered the queue or not.
        after: see `RankOps.submit_load`.
    """

    job: LoadJob
    deadline_s: float
    after: StreamPoint | None = None


class RankOps:
    """The ops of one rank; every one of them ends in exactly one result.

    Attributes:
        engine: the rank's `TransferEngine`; None before the host pool is attached, and then every op is refused.
        refusal: why there is none and never will be.
        released: why no op may touch the engine's pool now; empty while they may.
        gds_refusal: why this rank's engine has no lane to the disks though loads may name it.
        stripe_bytes: what one page of each KV group moves on this rank.
        stores: False where another rank stores the same bytes: a store then ends here at once.
        step: the last forward that was ordered.
        reports: what is to be said of ops that have ended.
    """

    def __init__(self, config: FlexKVConfig, rank: int, counters: Counters) -> None:
        self._rank = rank
        self._config = config
        self._counters = counters
        self.engine: Any = None
        self.refusal = ""
        self.released = ""
        self.gds_refusal = ""
        self.stripe_bytes: tuple[int, ...] = ()
        self.stores = True
        self._ops: dict[OpId, SubmittedOp] = {}
        self._waiting: list[WaitingLoad] = []
        self._kernel_counted = False
        self.step = 0
        self.reports = RankReports()

    # --- submit ---

    def point(self) -> StreamPoint | None:
        """After what the engine's stream was given until now, for `submit_load` and `submit_store`; None of plain
        memory."""
        return None if self.engine is None or self.released else self.engine.record()

    def submit_load(self, job: LoadJob, after: StreamPoint | None = None) -> None:
        """Starts a load, or keeps it for the next poll while the lane's queue is full.

        Args:
            after: what it waits for on a device; None for all that the engine's stream was given until now.
        """
        if not job.graph.ops:
            self.reports.add_failed(job, job.lost)
            if not job.sync:
                self.reports.add_finished(job.request_id)
            return
        self._try_load(WaitingLoad(job, time.monotonic() + self._config.load.deadline_s, after))

    def _try_load(self, load: WaitingLoad) -> None:
        job = load.job
        if self.engine is None or self.released:
            self._refuse(job, self.released or self.refusal or "no host pool")
            return
        # Before submit: the copy may have ended by the time that returns, and would seem to have taken no time.
        started_s = time.monotonic()
        if started_s > load.deadline_s:
            self._refuse(job, PAST_DEADLINE)
            return
        graph, ops = job.graph, job.graph.ops
        without_lane: list[TransferOp] = []
        if self.gds_refusal:
            # Planned before it was reported to the scheduler's side. The ops of a load wait for no other.
            without_lane = [op for op in ops if op.kind is OpKind.GDS_READ]
            graph = TransferGraph(tuple(op for op in ops if op.kind is not OpKind.GDS_READ))
        only_those = len(without_lane) == len(ops)
        ticket = NO_TICKET if only_those else self.engine.submit(graph, after=load.after)
        if ticket is None:
            # The lane's queue is full for a moment. The promise stands, so it is tried again at every poll.
            self._waiting.append(load)
            return
        for op in ops:
            self._ops[op.op_id] = SubmittedOp(
                ticket, op.pages, op.group, started_s, self.step, job, load.deadline_s
            )
        for op in without_lane:
            every = np.arange(op.pages, dtype=np.int32)
            self._end(OpResult(op.op_id, OpStatus.LANE_DOWN, every, self.gds_refusal))

    def submit_store(
        self,
        graph: TransferGraph,
        urgent: bool = False,
        gated: bool = False,
        after: StreamPoint | None = None,
    ) -> None:
        """Starts a store; one that finds the queue full is dropped and reported so.

        Args:
            urgent: a forward waits for its end.
            gated: of blocks that a forward is yet to write: no layer is copied before `open_layers` has named it.
            after: as in `submit_load`.
        """
        if not self.stores:
            nothing = np.empty(0, dtype=np.int32)
            for op in graph.ops:
                self.reports.add(OpResult(op.op_id, OpStatus.OK, nothing), self.step)
            return
        if urgent:
            ops = tuple(replace(op, priority=Priority.LOAD) for op in graph.ops)
            graph = TransferGraph(ops, graph.edges)
        started_s = time.monotonic()
        refused = self.engine is None or self.released
        ticket = None if refused else self.engine.submit(graph, gated=gated, after=after)
        for op in graph.ops:
            if ticket is None:
                self.reports.add(self._refused_store(op), self.step)
            else:
                self._ops[op.op_id] = SubmittedOp(ticket, op.pages, op.group, started_s, self.step)

    def _refused_store(self, op: TransferOp) -> OpResult:
        """The manager's side counts it, once for all ranks."""
        if self.released:
            return OpResult.cancelled(op.op_id, op.pages, self.released, PageLoss.RELEASED)
        if self.refusal:
            return OpResult.cancelled(op.op_id, op.pages, self.refusal)
        return OpResult.cancelled(op.op_id, op.pages, "the store lane's queue is full", PageLoss.BUSY)

    def open_layers(self, op_ids: Collection[OpId], layers: int) -> None:
        """Layers 0 to `layers` - 1 of these gated stores have been written; those that have ended are left out."""
        tickets = {self._ops[op_id].ticket for op_id in op_ids if op_id in self._ops}
        if tickets:
            self.engine.open_layers(sorted(tickets), layers)

    def give_up(self, op_id: OpId, reason: str) -> None:
        """Only what was not issued can be recalled; the report waits for the terminal result all the same."""
        for load in self._waiting:
            if any(op.op_id == op_id for op in load.job.graph.ops):
                self._waiting.remove(load)
                self._refuse(load.job, reason)
                return
        op = self._ops.get(op_id)
        if op is None or op.given_up:
            return
        # A ticket is cancelled as a whole: what that does to its other ops says nothing about their pages.
        for other in self._ops.values():
            if other.ticket == op.ticket and not other.given_up:
                other.given_up, other.deadline_s = reason, float("inf")
        self.engine.cancel(op.ticket)

    def invalidate(self, job: LoadJob, reason: str) -> None:
        """Whatever a load brings or has brought, all its blocks count as failed; also when its results were taken."""
        for op in job.graph.ops:
            self.give_up(op.op_id, reason)
            if op.op_id not in self._ops:
                self.reports.invalidate(job, op, reason)

    # --- wait ---

    def finish_load(self, job: LoadJob) -> None:
        """Waits for a load that the forward reads. Blocks that did not arrive are reported in this step.

        Raises:
            ClosedError: the copy neither ended nor could be recalled. Its blocks may still be written at any time, so
                the engine can neither use them nor compute into them.
        """
        ends_s = time.monotonic() + self._config.load.deadline_s
        self._wait_for_entry(job)
        ops = [self._ops[op.op_id] for op in job.graph.ops if op.op_id in self._ops]
        tickets = {op.ticket for op in ops}
        if not wait_all(self.engine, tickets, max(0.0, ends_s - time.monotonic())):
            for op in ops:
                op.given_up = PAST_DEADLINE
            pages = sum(op.pages for op in ops)
            cancel_and_drain(
                self.engine, tickets, self._config, f"rank {self._rank}: a load of {pages} pages"
            )
        self.poll()

    def wait_layer(self, job: LoadJob, layer: int, ends_s: float, stream: int | None = None) -> bool:
        """Waits until a layer of a layerwise load is in place, or pages of it are known to have failed.

        Args:
            stream: the engine's, on a device: what it is given next comes after the layer's copies.

        Returns:
            False when that was not so by `ends_s`: the whole load then counts as failed.
        """
        self._wait_for_entry(job)
        for mine in [self._ops[op.op_id] for op in job.graph.ops if op.op_id in self._ops]:
            if mine.given_up:
                return False
            found = self.engine.wait_layer(mine.ticket, layer, max(0.0, ends_s - time.monotonic()), stream)
            # A stream is not made to wait for a layer with failed pages, and others may share those that are whole.
            in_time = found.in_time if not found.failed or stream is None else self._wait(mine, ends_s)
            if not in_time:
                mine.given_up = PAST_DEADLINE
                self.engine.cancel(mine.ticket)
                return False
        return True

    def finish_stores(self, graphs: list[TransferGraph]) -> None:
        """Waits for stores up to `transfer.stuck_s`; what has not ended by then counts as failed."""
        ends_s = time.monotonic() + self._config.transfer.stuck_s
        for graph in graphs:
            for op in graph.ops:
                if (mine := self._ops.get(op.op_id)) and not self._wait(mine, ends_s):
                    mine.torn = set(range(mine.pages))

    def keep_before_reuse(self, reused: Mapping[OpId, list[int]], wait_s: float) -> None:
        """Blocks that stores read are about to be written: by plain memory's next forward, so that the copies must have
        ended; or by a forward on a device, whose stream is ordered behind the copies. Pages of which neither could be
        had in time are torn.

        Args:
            reused: op -> positions in the op.
        """
        self.poll()
        ends_s = time.monotonic() + wait_s
        # All are asked for before any is waited for: one that is slow may use up the time.
        behind = [
            (op, positions)
            for op_id, positions in reused.items()
            if (op := self._ops.get(op_id)) and not self.engine.order_after(op.ticket, 0.0)
        ]
        for op, positions in behind:
            if not self.engine.order_after(op.ticket, max(0.0, ends_s - time.monotonic())):
                op.torn = (op.torn or set()) | set(positions)

    def release(self, reason: str) -> None:
        """Ends every op, because the engine is about to take its pool away. Ops that come later end refused with the
        reason, until `released` is empty again.

        Raises:
            ClosedError: a copy neither ended nor could be recalled: the pool must stay. Nothing is released then.
        """
        self.released = reason
        if self.engine is None:
            return
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            self._refuse(load.job, reason)
        in_time = wait_all(
            self.engine, {op.ticket for op in self._ops.values()}, self._config.transfer.close_s
        )
        self._collect()
        if not in_time:
            self._recall_all(reason)

    def _recall_all(self, reason: str) -> None:
        for op in self._ops.values():
            op.given_up, op.deadline_s = op.given_up or reason, float("inf")
        tickets = {op.ticket for op in self._ops.values()}
        what = f"rank {self._rank}: {len(self._ops)} copies"
        try:
            cancel_and_drain(self.engine, tickets, self._config, what, limit="transfer.close_s")
        except ClosedError:
            self.released = ""
            raise
        self._collect()

    def poll(self, wait_s: float = 0.0) -> None:
        """Collects ended ops; waits for one up to `wait_s` if any is under way. Ends the wait for late loads."""
        if self.engine is None or not (self._ops or self._waiting):
            return
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            self._try_load(load)
        if wait_s and self._ops:
            # Not select(), which takes no descriptor above 1023.
            ended = select.poll()
            ended.register(self.engine.event_fd, select.POLLIN)
            ended.poll(wait_s * 1000)
        self._collect()
        now_s = time.monotonic()
        for op_id, op in self._ops.items():
            if op.deadline_s < now_s:
                self.give_up(op_id, PAST_DEADLINE)

    @property
    def busy(self) -> bool:
        """Whether an op is under way or unreported."""
        return bool(self._ops or self.reports.ended or self._waiting)

    def close(self) -> None:
        """Ends the lanes, and waits for copies in flight up to `transfer.close_s`. What ends meanwhile is reported."""
        if self.engine is None:
            return
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            self._refuse(load.job, "the lanes were closed")
        self.engine.close(self._config.transfer.close_s)
        self._collect()
        self.engine = None

    # --- internals ---

    def _wait_for_entry(self, job: LoadJob) -> None:
        while any(load.job is job for load in self._waiting):
            self.poll(FULL_WAIT_S)

    def _refuse(self, job: LoadJob, reason: str) -> None:
        for op in job.graph.ops:
            started_s = time.monotonic()
            self._ops[op.op_id] = SubmittedOp(
                NO_TICKET, op.pages, op.group, started_s, self.step, job, given_up=reason
            )
        for op in job.graph.ops:
            self._end(OpResult.cancelled(op.op_id, op.pages, reason))

    def _collect(self) -> None:
        while self._ops and (results := self.engine.poll()):
            for result in results:
                self._end(result)
            if self.engine.kernel_given_up and not self._kernel_counted:
                self._kernel_counted = True
                self._counters.add("flexkv_failed_kernel_launches_total")

    def _wait(self, op: SubmittedOp, ends_s: float) -> bool:
        return bool(self.engine.wait(op.ticket, max(0.0, ends_s - time.monotonic())))

    def _end(self, result: OpResult) -> None:
        op = self._ops.pop(result.op_id)
        if op.given_up or op.torn:
            result = op.outcome(result)
        self.reports.add(result, op.step, op.load)
        op.count(result, self.stripe_bytes[op.group] if self.stripe_bytes else 0, self._counters)
        job = op.load
        if job is not None and not job.sync and not any(op.op_id in self._ops for op in job.graph.ops):
            self.reports.add_finished(job.request_id)
