"""An engine whose KV memory is on a FAKE GPU: plain memory that flexkv's CUDA lane accesses through a fake driver. One
thread per stream runs the work that the engine enqueues. A test can hold a forward pass; then all later work on the
stream waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from flexkv.adapters.common import rank_worker
from flexkv.adapters.common.rank_lanes import attach_views
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.transfer.engine import TransferEngine
from tests import testing_ext

LONG_S = 60.0
A_WHILE_S = 0.3
"""Seconds for which a test waits to confirm that something does not happen. The time is longer than `REUSE_WAIT_S`, and
control tests show that it is long enough.
"""


def _run(may_run: list[threading.Event], work: Callable[[], None]) -> None:
    for event in may_run:
        event.wait(LONG_S)
    work()


class GpuWorker(WorkerSide):
    """A worker on the fake GPU. The fake GPU copies to and from unpinned host memory, so a slot of host memory can be
    used without waiting until it is pinned.
    """

    gpu: ClassVar[Any] = None

    def attach(self, *args: Any, **options: Any) -> None:
        super().attach(*args, **options)
        self.device, self._current_stream = 0, lambda device: int(self.gpu.stream)

    @property
    def usable_slots(self) -> int:
        return int(self._pool.ready_slots)


class FakeGpuWorld:
    """The fake GPU of one engine.

    Attributes:
        worker_class: class of the engine's worker.
        held: whether work that is enqueued on the engine's stream waits until `let_go`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: Any = testing_ext.FakeGpu()
        self.worker_class: type[GpuWorker] = type("OnFakeGpu", (GpuWorker,), {"gpu": self.gpu})
        self._may_run: list[threading.Event] = []
        self.held = False
        monkeypatch.setattr(rank_worker, "open_lanes", self._open_lanes)

    def _open_lanes(
        self,
        config: Any,
        views: Sequence[Any],
        tensors: Sequence[Any],
        pool: Any,
        places: Sequence[Any],
        **_: Any,
    ) -> TransferEngine:
        transfer = config.transfer
        engine = TransferEngine(
            lanes=[self.gpu.lane],
            current_stream=lambda: int(self.gpu.stream),
            queue_ops=transfer.queue_ops,
            op_stuck_s=transfer.stuck_s,
        )
        attach_views(engine, views, pool, places, tensors)
        return engine

    def give(self, work: Callable[[], None]) -> None:
        """Enqueues work on the engine's stream. If forward passes are held, the work waits until `let_go`."""
        may_run = list(self._may_run[-1:]) if self.held else []
        self.gpu.enqueue(partial(_run, may_run, work))

    def hold(self) -> None:
        """Makes all work that is enqueued after this call wait until `let_go`, as if it were queued behind a long
        forward pass.
        """
        self._may_run.append(threading.Event())
        self.held = True

    def let_go(self) -> None:
        self.held = False
        for event in self._may_run:
            event.set()

    def close(self) -> None:
        """Checks that flexkv has broken no rule of the driver, and releases the GPU with its streams. Close the engine
        first.
        """
        broken = self.gpu.violations()
        self.gpu = self.worker_class.gpu = None
        assert not broken, broken
