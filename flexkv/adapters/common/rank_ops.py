"""Tracks one rank's ops from their submission to their report. An op waits for a queue entry, is in flight, is given
up, or has finished."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv.adapters.common.cancel import cancel_and_drain, wait_all
from flexkv.adapters.common.load_job import LoadJob
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
"""The ticket of a refused op."""

FULL_WAIT_S = 0.002
"""Seconds between two tries to submit a load that a forward pass waits for, while the lane's queue is full."""


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """A load that could not be submitted yet, because its lane's queue was full.

    Attributes:
        job: the load.
        deadline_s: when the load is given up, whether or not it has entered the queue by then (`time.monotonic`).
        after: see `RankOps.submit_load`.
    """

    job: LoadJob
    deadline_s: float
    after: StreamPoint | None = None


class RankOps:
    """The ops of one rank. Every op that is submitted ends with exactly one result.

    Attributes:
        engine: the rank's `TransferEngine`; None before the host pool is attached and after `close`. While it is None,
            every op is refused.
        refusal: why this rank will never have a transfer engine, or may no longer use it; empty otherwise.
        released: why no op may touch the inference engine's pool at present; empty while ops may touch it.
        gds_refusal: why the transfer engine has no lane between the disks and the pool, although loads may have ops for
            it; empty otherwise.
        stripe_bytes: bytes per page that this rank moves, for each KV group; empty before the pool is registered.
        stores: whether this rank stores pages. If False, another rank stores the same bytes, and this rank's store ops
            end at once with status OK.
        step: number of the last forward pass that the scheduler's side ordered.
        reports: collects the results of finished ops until they are reported.
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
        self._kernels_counted = 0
        self.step = 0
        self.reports = RankReports()

    # --- submit ---

    def point(self, stream: int | None = None) -> StreamPoint | None:
        """A point in a stream after all work that is enqueued on the stream so far, for `submit_load` and
        `submit_store`. None if the pool is plain memory, or has been released, so that no op may touch it.

        Args:
            stream: the stream; None for the one on which this thread enqueues the inference engine's work.
        """
        return None if self.engine is None or self.released else self.engine.record(stream)

    def submit_load(self, job: LoadJob, after: StreamPoint | None = None) -> None:
        """Submits a load. If the lane's queue is full, keeps the load and tries again in every `poll`.

        Args:
            job: the load. If its graph has no ops, its lost blocks are reported as failed.
            after: the point in a device's stream after which the load starts; None to start after all work enqueued so
                far.
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
        # The time is taken before `submit`, because the copy may have finished when `submit` returns, and would then
        # seem to have taken no time.
        started_s = time.monotonic()
        if started_s > load.deadline_s:
            self._refuse(job, PAST_DEADLINE)
            return
        graph, ops = job.graph, job.graph.ops
        without_lane: list[TransferOp] = []
        if self.gds_refusal:
            # The scheduler's side planned the load before it received this rank's report that the lane is missing. The
            # ops of a load do not depend on each other, so the ops for other lanes can still be submitted.
            without_lane = [op for op in ops if op.kind is OpKind.GDS_READ]
            graph = TransferGraph(tuple(op for op in ops if op.kind is not OpKind.GDS_READ))
        only_those = len(without_lane) == len(ops)
        ticket = NO_TICKET if only_those else self.engine.submit(graph, after=load.after)
        if ticket is None:
            # The lane's queue is full. The load was promised to the engine, so every poll tries again.
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
        """Submits a store operation. If the lane's queue is full, the operation is dropped and reported as cancelled.

        Args:
            urgent: whether a forward pass waits for the operation to finish.
            gated: whether a forward pass has yet to write the blocks. If so, no layer is copied before `open_layers`
                opens it.
            after: see `submit_load`.
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
        """The result of a refused store op. The scheduler's side counts the lost pages, once for all ranks."""
        if self.released:
            return OpResult.cancelled(op.op_id, op.pages, self.released, PageLoss.RELEASED)
        if self.refusal:
            return OpResult.cancelled(op.op_id, op.pages, self.refusal)
        return OpResult.cancelled(op.op_id, op.pages, "the store lane's queue is full", PageLoss.BUSY)

    def open_layers(self, op_ids: Collection[OpId], layers: int) -> None:
        """Lets gated store ops copy layers 0 to `layers` - 1, which the forward pass has written. Ops that have already
        finished are skipped."""
        tickets = {self._ops[op_id].ticket for op_id in op_ids if op_id in self._ops}
        if tickets:
            self.engine.open_layers(sorted(tickets), layers)

    def give_up(self, op_id: OpId, reason: str) -> None:
        """Cancels all ops of the op's graph. They will be reported as cancelled when they have finished.

        Copies that were already issued cannot be cancelled, so the report still waits for each op's terminal result.

        Args:
            reason: why the op is given up, for its result.
        """
        for load in self._waiting:
            if any(op.op_id == op_id for op in load.job.graph.ops):
                self._waiting.remove(load)
                self._refuse(load.job, reason)
                return
        op = self._ops.get(op_id)
        if op is None or op.given_up:
            return
        # A ticket can only be cancelled as a whole. The other ops of its graph then fail because of the cancellation,
        # not because their pages are bad, so they are reported as cancelled too.
        for other in self._ops.values():
            if other.ticket == op.ticket and not other.given_up:
                other.given_up, other.deadline_s = reason, float("inf")
        self.engine.cancel(op.ticket)

    def invalidate(self, job: LoadJob, reason: str) -> None:
        """Makes all blocks of a load count as failed, even those that have arrived, and even if the load's results were
        already taken."""
        for op in job.graph.ops:
            self.give_up(op.op_id, reason)
            if op.op_id not in self._ops:
                self.reports.invalidate(job, op, reason)

    # --- wait ---

    def finish_load(self, *jobs: LoadJob) -> None:
        """Waits until loads that the forward pass reads have finished, or have been cancelled after `load.deadline_s`.
        Blocks that did not arrive are reported as failed in this step.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled. Its blocks may still be written at any time, so
                the engine can neither use them nor compute into them.
        """
        ends_s = time.monotonic() + self._config.load.deadline_s
        for job in jobs:
            self._wait_for_entry(job)
        self._finish([job.graph for job in jobs], ends_s, "a load")

    def finish_store(self, graph: TransferGraph) -> None:
        """Waits until a store operation has finished, or has been cancelled after `load.deadline_s`. When this returns,
        the operation no longer reads the engine's blocks, so the engine may overwrite them.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled, so its blocks may still be read at any time.
        """
        self._finish([graph], time.monotonic() + self._config.load.deadline_s, "a store")

    def _finish(self, graphs: Sequence[TransferGraph], ends_s: float, what: str) -> None:
        ops = [self._ops[op.op_id] for graph in graphs for op in graph.ops if op.op_id in self._ops]
        tickets = {op.ticket for op in ops}
        if not wait_all(self.engine, tickets, max(0.0, ends_s - time.monotonic())):
            for op in ops:
                op.given_up = op.given_up or PAST_DEADLINE
            pages = sum(op.pages for op in ops)
            cancel_and_drain(
                self.engine, tickets, self._config, f"rank {self._rank}: {what} of {pages} pages"
            )
        self.poll()

    def wait_layer(self, job: LoadJob, layer: int, ends_s: float, stream: int | None = None) -> bool:
        """Waits until a layer of a layerwise load is in place, or some of its pages are known to have failed.

        Args:
            ends_s: the deadline (`time.monotonic`).
            stream: the engine's stream, if the pool is on a device. Work enqueued on the stream after this call starts
                after the layer's copies.

        Returns:
            True if the layer is in place or pages of it have failed. False if `ends_s` passed first or the load was
            given up before; the complete load then counts as failed.
        """
        self._wait_for_entry(job)
        for mine in [self._ops[op.op_id] for op in job.graph.ops if op.op_id in self._ops]:
            if mine.given_up:
                return False
            found = self.engine.wait_layer(mine.ticket, layer, max(0.0, ends_s - time.monotonic()), stream)
            # If pages of the layer have failed, `engine.wait_layer` does not make the stream wait for the layer. The
            # layer's other pages may still be used, so this thread waits for the complete op instead.
            in_time = found.in_time if not found.failed or stream is None else self._wait(mine, ends_s)
            if not in_time:
                mine.given_up = PAST_DEADLINE
                self.engine.cancel(mine.ticket)
                return False
        return True

    def finish_stores(self, graphs: list[TransferGraph]) -> None:
        """Waits up to `transfer.stuck_s` for store operations to finish. If an op has not finished by then, all its
        pages count as torn, because the engine may write their blocks while the copy reads them."""
        ends_s = time.monotonic() + self._config.transfer.stuck_s
        for graph in graphs:
            for op in graph.ops:
                if (mine := self._ops.get(op.op_id)) and not self._wait(mine, ends_s):
                    mine.torn = set(range(mine.pages))

    def keep_before_reuse(self, reused: Mapping[OpId, list[int]], wait_s: float) -> None:
        """Protects store operations whose blocks a forward pass is about to write. If the pool is plain memory, waits
        until their copies have finished; on a device, makes the engine's stream wait for the copies. Pages for which
        this does not succeed within `wait_s` seconds count as torn: the copy may have read what the forward pass wrote.

        Args:
            reused: op -> positions in the op of the blocks that will be written.
            wait_s: largest number of seconds to wait, for all ops together.
        """
        self.poll()
        ends_s = time.monotonic() + wait_s
        # Each op is first checked without waiting, because one slow op may use up the time.
        behind = [
            (op, positions)
            for op_id, positions in reused.items()
            if (op := self._ops.get(op_id)) and not self.engine.order_after(op.ticket, 0.0)
        ]
        for op, positions in behind:
            if not self.engine.order_after(op.ticket, max(0.0, ends_s - time.monotonic())):
                op.torn = (op.torn or set()) | set(positions)

    def release(self, reason: str) -> None:
        """Waits until every op has finished, and cancels those that are late, because the engine is about to release
        its pool's memory. Later ops are refused with `reason` until the caller empties `released`.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled, so the memory must not be released. Ops are
                accepted again.
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
        """Collects finished ops, tries again to submit waiting loads, and gives up loads past their deadline. If any op
        is in flight, waits up to `wait_s` seconds for one to finish."""
        if self.engine is None or not (self._ops or self._waiting):
            return
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            self._try_load(load)
        if wait_s and self._ops:
            # poll() is used because select() refuses file descriptors above 1023.
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
        """Whether an op is waiting, in flight, or finished but not reported."""
        return bool(self._ops or self.reports.ended or self._waiting)

    def close(self) -> None:
        """Closes the lanes, and waits up to `transfer.close_s` for copies in flight. The results of ops that finish
        meanwhile are added to `reports`."""
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
            given_up = self.engine.kernels_given_up
            self._counters.add("flexkv_failed_kernel_launches_total", given_up - self._kernels_counted)
            self._kernels_counted = given_up

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
