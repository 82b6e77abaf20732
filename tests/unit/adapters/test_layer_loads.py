"""In a layerwise load, the forward pass reaches a layer only after the layer's KV has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer

import pytest

from flexkv.adapters.common.layerwise import NOT_WAITED_FOR
from flexkv.adapters.vllm.worker import WorkerSide
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import STALL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D = 0
GENEROUS_S = 30.0


def stored(make_engine: Make, **options: object) -> MiniEngine:
    return stored_engine(make_engine, PROMPT[:16], **{"load.mode": "layerwise"}, **options)


def test_a_layer_is_there_while_the_next_is_still_coming(make_engine: Make) -> None:
    stalls = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, layer=1))
    engine = stored(make_engine, worker_class=stalls)
    assert engine.add(make_request(PROMPT, "two")) == 16
    first, second = engine.pools.caches[0].values()
    blocks = [block.block_id for block in engine.live["two"].blocks[:4]]
    seen: list[bool] = []

    def in_the_forward() -> None:
        engine.workers[0].wait_for_layer("layer.0")
        assert stalls.movers[0].wait_stalled(1, GENEROUS_S)
        seen.extend([bool((first[blocks] >= 0).all()), bool((second[blocks] >= 0).any())])
        Timer(0.05, stalls.movers[0].release).start()
        engine.workers[0].wait_for_layer("layer.1")
        seen.append(bool((second[blocks] >= 0).all()))

    engine.step(before_forward=in_the_forward)
    assert seen == [True, False, True], "layer 0 came before layer 1 was let go, layer 1 after"
    engine.check("two")
    assert engine.invalid == set()


class ForgetfulWorker(WorkerSide):
    """Stands for an engine whose forward pass does not wait for layer 1."""

    def wait_for_layer(self, name: str) -> None:
        if name != "layer.1":
            super().wait_for_layer(name)


class EarlyWorker(ForgetfulWorker):
    """Like `ForgetfulWorker`, but this worker also takes the results of all copies before the forward pass ends, as
    happens while another load is late.
    """

    def wait_for_layer(self, name: str) -> None:
        super().wait_for_layer(name)
        ends_s = time.monotonic() + GENEROUS_S
        while self._ops._ops and time.monotonic() < ends_s:
            self.poll(idle=True)


@pytest.mark.parametrize("worker_class", [ForgetfulWorker, EarlyWorker])
def test_a_layer_that_nobody_waited_for_makes_the_load_fail(
    make_engine: Make, caplog: pytest.LogCaptureFixture, worker_class: type[WorkerSide]
) -> None:
    engine = stored(make_engine, worker_class=worker_class)
    engine.add(make_request(PROMPT, "two"))
    engine.step()
    assert len(engine.invalid) == 4
    assert NOT_WAITED_FOR in caplog.text
    engine.drain()
    assert engine.stored_pages == 4
    engine.step()
    engine.check("two")


def test_steps_without_loads_and_layers_without_kv_wait_for_nothing(make_engine: Make) -> None:
    engine = stored(make_engine)
    engine.workers[0].wait_for_layer("layer.1")
    engine.workers[0].wait_for_layer("encoder.7")
    assert engine.run(make_request(PROMPT[:3], "short")) == 0
