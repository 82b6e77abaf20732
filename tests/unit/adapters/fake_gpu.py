"""An engine whose KV memory lies on a FAKE GPU: plain memory behind the product's CUDA lane over the fake driver. What
the engine gives to its stream is done by that stream's thread, and stands still while a test holds a forward."""

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
"""For what must not happen; the controls show that it is enough. Longer than `REUSE_WAIT_S`."""


def _run(may_run: list[threading.Event], work: Callable[[], None]) -> None:
    for event in may_run:
        event.wait(LONG_S)
    work()


class GpuWorker(WorkerSide):
    """A worker on the fake GPU. The fake needs no pinned host memory: slots that are up can be used."""

    gpu: ClassVar[Any] = None

    def attach(self, *args: Any, **options: Any) -> None:
        super().attach(*args, **options)
        self.device, self._current_stream = 0, lambda device: int(self.gpu.stream)

    @property
    def usable_slots(self) -> int:
        return int(self._pool.ready_slots)


class FakeGpuWorld:
    """The GPU of one engine.

    Attributes:
        worker_class: of the engine's worker.
        held: what is given to the stream stands still.
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
        """Work for the engine's stream; it waits while forwards are held."""
        may_run = list(self._may_run[-1:]) if self.held else []
        self.gpu.enqueue(partial(_run, may_run, work))

    def hold(self) -> None:
        """What is given from now on stands still until `let_go`: a forward that runs."""
        self._may_run.append(threading.Event())
        self.held = True

    def let_go(self) -> None:
        self.held = False
        for event in self._may_run:
            event.set()

    def close(self) -> None:
        """Of an engine that was closed: no rule of the driver was broken. Its GPU goes, and with it the streams."""
        broken = self.gpu.violations()
        self.gpu = self.worker_class.gpu = None
        assert not broken, broken
