"""The reported time of a transfer is never shorter than the real time. A shorter time would give impossible
throughputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from flexkv.adapters.vllm.worker import WorkerSide
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

PROMPT = list(range(100, 123))


SUBMIT_S = 0.05


class LateReturn:
    """A transfer engine whose `submit` returns only after the copy has ended, as on a busy machine."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, graph: Any, **how: Any) -> Any:
        time.sleep(SUBMIT_S)
        ticket = self._inner.submit(graph, **how)
        assert self._inner.wait(ticket, 10.0)
        return ticket


class LateWorker(WorkerSide):
    def attach(self, *args: Any, **kwargs: Any) -> None:
        super().attach(*args, **kwargs)
        self._ops.engine = LateReturn(self._ops.engine)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_clock_starts_before_the_copy(make_engine: Callable[..., MiniEngine], mode: str) -> None:
    engine = make_engine(worker_class=LateWorker, **{"load.mode": mode})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    [worker] = engine.workers
    seconds = worker.counters.data["flexkv_transfer_seconds"]
    assert len(seconds) == 2, "one series a direction"
    assert min(value for series in seconds.values() for value in series) >= SUBMIT_S
