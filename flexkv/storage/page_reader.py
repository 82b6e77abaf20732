"""A thread that copies pages of other units to host slots, op by op."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import ContractError
from flexkv.observe import NamedThread
from flexkv.storage.base import DiskGroup
from flexkv.storage.group_tables import codec_of
from flexkv.transfer.graph import OpKind, OpResult, OpStatus, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool

DIGEST = np.dtype("<u8")

WRITE_S = 1.0
"""Maximum number of seconds that a close waits for a page that is being copied to its host slot. A copy takes
milliseconds."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlight:
    """The op in flight.

    Attributes:
        since_s: when reading `page` began, in seconds of the monotonic clock.
        page: index of the page that is being read, among the op's pages.
        failed: indices of the op's earlier pages that failed.
    """

    op: TransferOp
    since_s: float
    page: int = 0
    failed: list[int] = field(default_factory=list)


class PageReader(ABC):
    """Carries out DISK_READ ops in the order of submission. A page is copied to its host slot only after it has been
    verified. If a page does not match its tag (the identity that the op expects) or cannot be read, only that page of
    the op fails.

    Args:
        groups: this unit's KV groups; ops refer to them by number.
        pool: the host pool whose slots get the pages.
        queue_ops: maximum number of waiting ops; `submit` returns None if there would be more.
        stuck_s: if reading a page takes more seconds than this, the reader stops for good, and all its ops fail.
    """

    def __init__(
        self, name: str, groups: Sequence[DiskGroup], pool: HostPool, queue_ops: int, stuck_s: float
    ) -> None:
        self._groups = list(groups)
        self._codecs = [codec_of(group, number) for number, group in enumerate(groups)]
        self._pool = pool
        self._queue_ops = queue_ops
        self._stuck_s = stuck_s
        self._lock = threading.Condition()
        self._writing = threading.Lock()
        """Held while a host slot is written. An op is abandoned only when this lock is free."""
        self._in_flight: InFlight | None = None
        self._down = ""
        self._waiting: deque[TransferOp] = deque()
        self._ended: deque[OpResult] = deque()
        self._tickets = 0
        self._closed = False
        self._thread = NamedThread(name, self._run)

    @abstractmethod
    def _bring(self, op: TransferOp, page: int) -> str:
        """Reads one page of an op into the page's host slot. Returns the reason if that fails; empty if it succeeds.
        Implementations hold `_writing` while they write the slot, and write nothing if the reader is down.
        """

    def submit(self, graph: TransferGraph) -> int | None:
        """Queues the ops of `graph`, and returns a ticket number. If the queue is full or the reader has stopped,
        queues none of them and returns None.

        Raises:
            ContractError: an op's kind is not DISK_READ.
        """
        if any(op.kind is not OpKind.DISK_READ for op in graph.ops):
            raise ContractError("pages of other units are only read")
        with self._lock:
            if self._closed or self._down or len(self._waiting) + len(graph.ops) > self._queue_ops:
                return None
            if not self._thread.is_alive():
                self._thread.start()
            self._waiting.extend(graph.ops)
            self._tickets += 1
            self._lock.notify()
            return self._tickets

    def poll(self) -> list[OpResult]:
        """Returns the results of the ops that have finished since the last call. Never waits."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
            return ended

    @property
    def down_reason(self) -> str:
        """Why the reader has stopped; empty while it works. Read this property regularly, because only this detects a
        disk that hangs.
        """
        with self._lock:
            moving = self._in_flight
            if not self._down and moving is not None and time.monotonic() - moving.since_s >= self._stuck_s:
                self._give_up(moving, f"a page was not read within {self._stuck_s:.0f} s")
            return self._down

    def _give_up(self, moving: InFlight, reason: str, wait_s: float = 0.0) -> None:
        """Stops the reader for good, and fails the op in flight and all waiting ops. Does nothing if a page of the op
        is still being copied to its host slot after `wait_s` seconds. The caller holds the lock.
        """
        if not self._writing.acquire(timeout=wait_s):
            return
        self._down = reason
        self._writing.release()
        left = np.arange(moving.page, moving.op.pages, dtype=np.int32)
        self._pool.fail_read(moving.op.slots[moving.page :], moving.op.op_id)
        failed = np.concatenate((np.array(moving.failed, np.int32), left))
        self._ended.append(OpResult(moving.op.op_id, OpStatus.FAILED, failed, reason))
        self._drop_waiting(reason)

    def _drop_waiting(self, reason: str) -> None:
        while self._waiting:
            op = self._waiting.popleft()
            self._pool.fail_read(op.slots, op.op_id)
            self._ended.append(OpResult.cancelled(op.op_id, op.pages, reason))

    def close(self, deadline_s: float) -> bool:
        """Cancels the waiting ops and ends the thread. Idempotent.

        Returns False if a read has not finished within `deadline_s` seconds. The read is then abandoned, and no host
        slot is written any more. There is one exception: a page whose copy to its slot has begun and takes longer than
        `WRITE_S`.
        """
        with self._lock:
            self._closed = True
            self._drop_waiting("closed")
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        with self._lock:
            if not self._thread.is_alive():
                return True
            if not self._down and self._in_flight is not None:
                self._give_up(
                    self._in_flight, f"closed, and a page was not read within {deadline_s:.1f} s", WRITE_S
                )
            return False

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._lock.wait()
                if not self._waiting:
                    return
                op = self._waiting.popleft()
                moving = self._in_flight = InFlight(op, time.monotonic())
            try:
                result = self._read(moving)
            except Exception as error:  # an op without a result would keep its slots pinned forever
                logger.exception("reading pages of other units")
                result = self._broken(moving, error)
            with self._lock:
                self._in_flight = None
                if self._down:
                    return  # `_give_up` has put a result for the op into `_ended`
                self._ended.append(result)

    def _read(self, moving: InFlight) -> OpResult:
        op, reason = moving.op, ""
        for page in range(op.pages):
            with self._lock:
                moving.page, moving.since_s = page, time.monotonic()
            why = self._bring(op, page)
            with self._lock:
                if self._down:
                    break
                self._settle(op, page, not why)
                if why:
                    moving.failed.append(page)
                    reason = reason or why
        status = OpStatus.FAILED if moving.failed else OpStatus.OK
        return OpResult(op.op_id, status, np.array(moving.failed, np.int32), reason)

    def _broken(self, moving: InFlight, error: Exception) -> OpResult:
        op = moving.op
        with self._lock:
            if not self._down:
                self._pool.fail_read(op.slots, op.op_id)
        every = np.arange(op.pages, dtype=np.int32)
        return OpResult(op.op_id, OpStatus.FAILED, every, f"{type(error).__name__}: {error}")

    def _settle(self, op: TransferOp, page: int, verified: bool) -> None:
        """Ends the wait of loads that need this page: they continue if the page is verified, and fail otherwise."""
        self._pool.native.settle(np.ascontiguousarray(op.slots[page : page + 1]), op.op_id, verified)

    def _put_stripes(
        self,
        group: int,
        image: NDArray[np.uint8],
        stripes: Sequence[tuple[int, int]],
        rewrites: Sequence[c_ext.PageConversion | None],
        slot: NDArray[np.uint8],
    ) -> None:
        """Copies a page of another unit to a host slot, converted to this unit's encoding.

        Args:
            image: the page as the other unit encodes it.
            stripes: offset and bytes of each rank's stripe in `image`.
            rewrites: for each rank, the conversion of its stripe; None if the encodings are equal.
        """
        for rank, ((offset, size), rewrite) in enumerate(zip(stripes, rewrites, strict=True)):
            source = image[offset : offset + size]
            start = self._codecs[group].stripe_offset(rank)
            target = slot[start : start + self._groups[group].stripe_bytes[rank]]
            if rewrite is None:
                target[:] = source
            else:
                rewrite.convert(source, target)
            if self._groups[group].host_digests:
                self._digest(group, rank, target, slot)

    def _digest(self, group: int, rank: int, stripe: np.ndarray, slot: np.ndarray) -> None:
        """Writes the digests of a stripe's runs to the slot, for loads that verify pages in host memory
        (`host.verify`).
        """
        runs = self._groups[group].runs[rank]
        digests = np.array(
            [c_ext.run_digest(stripe[at : at + size]) for at, size, _ in runs.tolist()], DIGEST
        )
        start = self._codecs[group].digest_offset(rank)
        slot[start : start + digests.nbytes] = digests.view(np.uint8)
