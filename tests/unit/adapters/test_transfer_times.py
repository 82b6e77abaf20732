"""What a transfer is said to have taken: never less than it took, or throughputs come out that no machine has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from flexkv.adapters.vllm.worker import WorkerSide
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

PROMPT = list(range(100, 123))


class LateReturn:
    """A transfer engine whose `submit` returns only after the copy has ended, as on a machine with other work."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.copied_by_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, graph: Any) -> Any:
        ticket = self._inner.submit(graph)
        assert self._inner.wait(ticket, 10.0)
        self.copied_by_s.append(time.monotonic())
        return ticket


class LateWorker(WorkerSide):
    """Remembers when each op was said to have started."""

    def attach(self, *args: Any, **kwargs: Any) -> None:
        super().attach(*args, **kwargs)
        self.late = LateReturn(self._engine)
        self._engine = self.late
        self.started_s: list[float] = []

    def _enter(self, op_id: Any, op: Any) -> None:
        self.started_s.append(op.started_s)
        super()._enter(op_id, op)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_clock_starts_before_the_copy(make_engine: Callable[..., MiniEngine], mode: str) -> None:
    engine = make_engine(worker_class=LateWorker, **{"load.mode": mode})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    [worker] = engine.workers
    assert isinstance(worker, LateWorker)
    assert len(worker.started_s) == len(worker.late.copied_by_s) >= 2
    for started_s, copied_by_s in zip(worker.started_s, worker.late.copied_by_s, strict=True):
        assert started_s < copied_by_s
