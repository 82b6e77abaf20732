"""The worker's side: runs one rank's device lanes and reports every op exactly once."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform

from flexkv.adapters.vllm.geometry import build_view
from flexkv.adapters.vllm.metadata import (
    ConnectorMetadata,
    Handshake,
    LoadJob,
    PoolGrant,
    RankPlace,
    WorkerMetadata,
)
from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError, FlexKVError
from flexkv.observe import Counters, get_logger
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, Priority, TransferGraph
from flexkv.transfer.host_pool import HostPool

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)

REUSE_WAIT_S = 0.25
"""How long a forward waits for the copy out of a block it is about to write. Beyond it the page counts as failed: a
lost page costs a recompute later, a waiting forward costs every running request now."""

IDLE_WAIT_S = 0.002
"""How long a step without a forward waits for a copy to end. Without it the engine spins through empty steps and takes
the time from the threads that copy; a new request waits at most this long."""

PAST_DEADLINE = "past load.deadline_s"


@dataclass(slots=True)
class _Op:
    """An op submitted here and not yet reported.

    Attributes:
        torn: positions whose block was written while the copy read it.
        given_up: why its bytes are not to be used however it ends; empty while they are.
    """

    ticket: int
    kind: OpKind
    pages: int
    started_s: float
    load: LoadJob | None = None
    deadline_s: float = float("inf")
    torn: set[int] | None = None
    given_up: str = ""


class WorkerSide:
    """One rank. All methods are called by the engine's worker thread."""

    def __init__(self, config: FlexKVConfig, rank: int, ranks: int) -> None:
        self.rank = rank
        self._config = config
        self._ranks = ranks
        self._view: Any = None
        self._caches: tuple[torch.Tensor, ...] = ()
        self.kv_config: KVCacheConfig | None = None
        self._pool: Any = None
        self._engine: Any = None
        self._ops: dict[OpId, _Op] = {}
        self._waiting: list[LoadJob] = []
        self._results: list[OpResult] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._unheard: set[OpId] = set()
        self._ready_said = -1
        self._handshake_said = False
        self._error = ""
        self._error_said = False
        self.counters = Counters()

    # --- set up ---

    def make_mover(self) -> Any:
        """The mover of the device lanes; None takes the engine's own. For subclasses that decorate it."""
        return None

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> None:
        """Takes the engine's pool.

        Raises:
            GeometryError: the tensors are not what the configuration says.
        """
        self._view, self.format_id = build_view(caches, config, self._ranks)
        self._caches = tuple(caches.values())
        self.kv_config = config

    def handshake(self) -> Handshake | None:
        """What the scheduler needs to size the host pool; None before the KV caches are registered."""
        if self.kv_config is None:
            return None
        view = self._view
        return Handshake(self.rank, os.getpid(), view.stripe_bytes, len(view.runs), self.kv_config.num_blocks)

    def attach(self, pool: HostPool, place: RankPlace) -> None:
        """Starts the lanes between the engine's pool and the unit's host pool."""
        transfer = self._config.transfer
        engine = TransferEngine(
            mover=self.make_mover(),
            queue_ops=transfer.queue_ops,
            copy_threads=transfer.copy_thread_count(),
            op_stuck_s=transfer.stuck_s,
        )
        engine.attach_view(0, self._view, pool, place.stripe, place.digests, self._caches)
        self._engine, self._pool = engine, pool

    def _take_grant(self, grant: PoolGrant) -> None:
        if self._engine is not None or self._error:
            return
        try:
            self.attach(HostPool.attach(grant.descriptor), grant.places[self.rank])
        except FlexKVError as error:
            # The engine can live without a cache; the scheduler's side is told and promises nothing.
            self._error = f"{type(error).__name__}: {error}"
            logger.error("rank %d cannot use the host pool: %s", self.rank, self._error)

    # --- one step, in the order in which the engine calls ---

    def before_forward(self, orders: ConnectorMetadata) -> None:
        """Takes the pool, submits early stores, and ends copies out of blocks that this step may write."""
        if orders.grant is not None:
            self._take_grant(orders.grant)
        for graph in orders.early:
            # A forward is waiting for this copy, so it goes before the other stores.
            self._submit_store(graph, urgent=any(op.op_id in orders.reused for op in graph.ops))
        # After the early stores, because one of those may be void from the start.
        for op_id in orders.void:
            self._give_up(op_id, "the cache was reset")
        for op_id in orders.cancel:
            self._give_up(op_id, "the request ended")
        if orders.reused:
            self._end_before_reuse(orders.reused)

    def start_loads(self, orders: ConnectorMetadata) -> None:
        """Submits the step's loads, and waits for those that its forward reads."""
        for job in orders.loads:
            self._submit_load(job)
        for job in orders.loads:
            if job.sync:
                self._finish_sync(job)

    def submit_stores(self, orders: ConnectorMetadata) -> None:
        """Submits the stores of blocks that the step's forward completed."""
        for graph in orders.stores:
            self._submit_store(graph)

    def finish_stores(self, orders: ConnectorMetadata) -> None:
        """`submit_stores`, and returns when the copies have ended (or are counted as failed)."""
        self.submit_stores(orders)
        ends_s = time.monotonic() + self._config.transfer.stuck_s
        for graph in orders.stores:
            for op in graph.ops:
                if (mine := self._ops.get(op.op_id)) and not self._wait(mine, ends_s):
                    mine.torn = set(range(mine.pages))

    def poll(self, idle: bool = False) -> None:
        """Collects ended ops. With `idle`, waits a moment for one if any is under way."""
        if self._engine is None:
            return
        for job in self._take_waiting():
            self._submit_load(job)
        if idle and self._ops:
            # Not select(), which takes no descriptor above 1023.
            ended = select.poll()
            ended.register(self._engine.event_fd, select.POLLIN)
            ended.poll(IDLE_WAIT_S * 1000)
        while results := self._engine.poll():
            for result in results:
                self._end(result)
        now_s = time.monotonic()
        for op_id, op in self._ops.items():
            if op.deadline_s < now_s:
                self._give_up(op_id, PAST_DEADLINE)

    # --- reports ---

    def take_finished(self) -> set[str]:
        """Requests whose async load has ended on this rank, each exactly once."""
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Engine blocks that a load should have filled and did not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_metadata(self) -> WorkerMetadata | None:
        """The step's report to the scheduler's side; None when there is nothing to say."""
        report = WorkerMetadata()
        report.results = [(self.rank, result) for result in self._take_results()]
        if self._pool is not None and (ready := self._pool.ready_slots) != self._ready_said:
            report.ready[self.rank] = self._ready_said = ready
        if self._engine is None and not self._handshake_said and (handshake := self.handshake()) is not None:
            report.handshakes[self.rank] = handshake
            self._handshake_said = True
        if self._error and not self._error_said:
            report.errors[self.rank] = self._error
            self._error_said = True
        return report if report else None

    def take_results_early(self) -> list[OpResult]:
        """Results for a scheduler in this process, ahead of the step's report.

        None while the scheduler has not heard of a failed load: what any request computed from it may be among the
        stores, and they must not be published before the engine has gone back. With two batches in flight a report
        is heard a step after it was made.
        """
        self.poll()
        return [] if self._unheard else self._take_results()

    def heard(self, op_ids: Iterable[OpId]) -> None:
        """A scheduler in this process has taken these results, after it learned of the failed blocks."""
        self._unheard.difference_update(op_ids)

    @property
    def busy(self) -> bool:
        """Whether an op is under way or unreported."""
        return bool(self._ops or self._results or self._waiting)

    def close(self) -> None:
        """Ends the lanes; waits for copies in flight up to `transfer.close_s`."""
        if self._engine is not None:
            self._engine.close(self._config.transfer.close_s)
            self._engine = None

    # --- internals ---

    def _take_results(self) -> list[OpResult]:
        results, self._results = self._results, []
        return results

    def _take_waiting(self) -> list[LoadJob]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _submit_load(self, job: LoadJob) -> None:
        if job.graph is None:
            self._failed_blocks.update(job.lost)
            if not job.sync:
                self._finished.add(job.request_id)
            return
        # Before submit: the copy may have ended by the time that returns, and would seem to have taken no time.
        started_s = time.monotonic()
        ticket = self._engine.submit(job.graph) if self._engine is not None else None
        if ticket is None and self._engine is not None:
            # The lane's queue is full for a moment. The promise stands, so it is tried again at every poll.
            self._waiting.append(job)
            return
        if ticket is None:
            self._refuse(job, self._error or "no host pool")
            return
        for op in job.ops:
            deadline_s = started_s + self._config.load.deadline_s
            self._enter(op.op_id, _Op(ticket, op.kind, op.pages, started_s, job, deadline_s))

    def _refuse(self, job: LoadJob, reason: str) -> None:
        for op in job.ops:
            self._enter(op.op_id, _Op(-1, op.kind, op.pages, time.monotonic(), job))
        for op in job.ops:
            self._end(_refused(op.op_id, op.pages, reason))

    def _submit_store(self, graph: TransferGraph, urgent: bool = False) -> None:
        if urgent:
            ops = tuple(_with_priority(op, Priority.LOAD) for op in graph.ops)
            graph = TransferGraph(ops, graph.edges)
        started_s = time.monotonic()
        ticket = self._engine.submit(graph) if self._engine is not None else None
        for op in graph.ops:
            if ticket is None:
                self.counters.add("flexkv_dropped_store_pages_total", op.pages, reason="busy")
                self._results.append(
                    _refused(op.op_id, op.pages, self._error or "the store lane's queue is full")
                )
            else:
                self._enter(op.op_id, _Op(ticket, op.kind, op.pages, started_s))

    def _give_up(self, op_id: OpId, reason: str) -> None:
        """Only what was not issued can be recalled; the report waits for the terminal result all the same."""
        for job in self._waiting:
            if any(op.op_id == op_id for op in job.ops):
                self._waiting.remove(job)
                self._refuse(job, reason)
                return
        op = self._ops.get(op_id)
        if op is not None and not op.given_up:
            op.given_up = reason
            op.deadline_s = float("inf")
            self._engine.cancel(op.ticket)

    def _enter(self, op_id: OpId, op: _Op) -> None:
        self._ops[op_id] = op

    def _finish_sync(self, job: LoadJob) -> None:
        """Waits for a load that the forward reads. Blocks that did not arrive are reported in this step.

        Raises:
            ClosedError: the copy neither ended nor could be recalled. Its blocks may still be written at any time, so
                the engine can neither use them nor compute into them.
        """
        ends_s = time.monotonic() + self._config.load.deadline_s
        while job in self._waiting and time.monotonic() < ends_s:
            self.poll(idle=True)
        if job in self._waiting:
            self._waiting.remove(job)
            self._refuse(job, "found no place in the queue before the deadline")
        for mine in [self._ops[op.op_id] for op in job.ops if op.op_id in self._ops]:
            if self._wait(mine, ends_s):
                continue
            mine.given_up = PAST_DEADLINE
            self._engine.cancel(mine.ticket)
            if not self._wait(mine, time.monotonic() + 2 * self._config.transfer.stuck_s):
                raise ClosedError(
                    f"rank {self.rank}: a load of {mine.pages} pages is stuck since "
                    f"{time.monotonic() - mine.started_s:.1f} s (load.deadline_s and transfer.stuck_s have passed)"
                )
        self.poll()

    def _wait(self, op: _Op, ends_s: float) -> bool:
        return bool(self._engine.wait(op.ticket, max(0.0, ends_s - time.monotonic())))

    def _end_before_reuse(self, reused: Mapping[OpId, list[int]]) -> None:
        self.poll()
        ends_s = time.monotonic() + REUSE_WAIT_S
        for op_id, positions in reused.items():
            op = self._ops.get(op_id)
            if op is not None and not self._wait(op, ends_s):
                op.torn = (op.torn or set()) | set(positions)

    def _end(self, result: OpResult) -> None:
        op = self._ops.pop(result.op_id)
        if op.given_up:
            # Not FAILED: that would say that the stored pages are bad.
            everything = np.arange(op.pages, dtype=np.int32)
            result = OpResult(result.op_id, OpStatus.CANCELLED, everything, op.given_up)
        elif op.torn:
            torn = np.fromiter(op.torn, dtype=np.int32)
            failed = np.union1d(result.failed, torn).astype(np.int32)
            status = OpStatus.FAILED if result.status is OpStatus.OK else result.status
            result = OpResult(
                result.op_id, status, failed, result.reason or "the engine reused the block too soon"
            )
        self._results.append(result)
        self._count(op, result)
        if op.load is not None:
            self._end_load(op.load, result)

    def _end_load(self, job: LoadJob, result: OpResult) -> None:
        if len(result.failed):
            blocks = next(op.blocks for op in job.ops if op.op_id == result.op_id)
            self._failed_blocks.update(blocks[result.failed].tolist())
            self._unheard.add(result.op_id)
        if not job.sync and not any(op.op_id in self._ops for op in job.ops):
            self._finished.add(job.request_id)

    def _count(self, op: _Op, result: OpResult) -> None:
        direction = "load" if op.load is not None else "store"
        moved = op.pages - len(result.failed)
        self.counters.add("flexkv_moved_pages_total", moved, direction=direction)
        self.counters.add("flexkv_moved_bytes_total", moved * self._view.stripe_bytes, direction=direction)
        self.counters.observe("flexkv_transfer_seconds", time.monotonic() - op.started_s, direction=direction)
        if len(result.failed):
            reason = "deadline" if op.given_up == PAST_DEADLINE else _FAILURE_LABELS[result.status]
            self.counters.add(
                "flexkv_failed_pages_total", len(result.failed), direction=direction, reason=reason
            )
            logger.debug("op %d: %d pages failed: %s", result.op_id, len(result.failed), result.reason)


_FAILURE_LABELS = {
    OpStatus.OK: "failed",
    OpStatus.FAILED: "failed",
    OpStatus.CANCELLED: "cancelled",
    OpStatus.SKIPPED: "skipped",
    OpStatus.LANE_DOWN: "lane_down",
}


def _refused(op_id: OpId, pages: int, reason: str) -> OpResult:
    """The result of an op that was never submitted."""
    return OpResult(op_id, OpStatus.CANCELLED, np.arange(pages, dtype=np.int32), reason)


def _with_priority(op: Any, priority: Priority) -> Any:
    return type(op)(op.op_id, op.kind, op.group, priority, op.blocks, op.slots, op.layerwise)


def current_device_is_host() -> bool:
    """Whether the engine's pool is plain memory."""
    return bool(current_platform.is_cpu())
