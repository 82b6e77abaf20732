"""Loads within the forward: each layer when the forward comes to it, failures named, nothing of them published."""

from __future__ import annotations

from collections.abc import Callable
from threading import Timer

import pytest

from flexkv import c_ext
from flexkv.adapters.common.layer_loads import NOT_WAITED_FOR
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.errors import ClosedError, GeometryError
from tests.unit.adapters.faulty_worker import FAIL, STALL, faulty_worker, release_when_given_up
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D = 0
LAYERWISE = {"load.mode": "layerwise"}
GENEROUS_S = 30.0


def stored(make_engine: Make, **options: object) -> MiniEngine:
    """An engine that has stored PROMPT's first 16 tokens and forgotten them."""
    engine = make_engine(**(LAYERWISE | options))
    engine.run(make_request(PROMPT[:16], "one"))
    engine.forget()
    return engine


def test_a_layer_is_there_while_the_next_is_still_coming(make_engine: Make) -> None:
    stalls = faulty_worker(c_ext.FaultRule(STALL, kind=H2D, layer=1))
    engine = stored(make_engine, worker_class=stalls)
    assert engine.add(make_request(PROMPT, "two")) == 16
    first, second = engine.caches[0].values()
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


@pytest.mark.parametrize("layer", [0, 1])
def test_nothing_computed_from_a_layer_that_failed_is_published(make_engine: Make, layer: int) -> None:
    fails = faulty_worker(c_ext.FaultRule(FAIL, kind=H2D, page=2, layer=layer, times=1))
    engine = stored(make_engine, worker_class=fails)
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 16
    failed = engine.live["two"].blocks[2].block_id
    engine.step()
    assert engine.invalid == {failed}
    assert engine.wrong("two", 23) != []
    engine.drain()
    # The step computed block 4 from the block that never came whole.
    assert engine.stored_pages == 4
    assert request.num_computed_tokens == 8
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_requests_that_share_the_failed_block_are_affected_too(make_engine: Make) -> None:
    fails = faulty_worker(c_ext.FaultRule(FAIL, kind=H2D, page=1, layer=1, times=1))
    engine = stored(make_engine, worker_class=fails)
    assert engine.add(make_request(PROMPT[:20], "two")) == 16
    sharing = make_request([*PROMPT[:8], *range(9)], "three")
    engine.adopt(sharing, engine.live["two"].blocks[:2])
    engine.step()
    engine.drain()
    assert engine.stored_pages == 4, "neither's blocks beyond the failed one"
    engine.step()
    engine.check("two")
    engine.check("three")


def test_a_load_past_its_deadline_is_computed(make_engine: Make) -> None:
    slow = faulty_worker(c_ext.FaultRule(STALL, kind=H2D, page=0, layer=1, times=1))
    engine = stored(make_engine, worker_class=slow, **{"load.deadline_s": 0.02})
    assert engine.add(make_request(PROMPT, "two")) == 16
    release = release_when_given_up(engine.workers[0], slow.movers[0])
    engine.step()
    release.join()
    assert len(engine.invalid) == 4, "the forward went on, so that none of its blocks may be used"
    engine.step()
    engine.check("two")


def test_a_load_that_is_stuck_for_good_stops_the_worker(make_engine: Make) -> None:
    stuck = faulty_worker(c_ext.FaultRule(STALL, kind=H2D, layer=1))
    short = {"load.deadline_s": 0.02, "transfer.stuck_s": 1.0, "transfer.close_s": 0.1}
    engine = stored(make_engine, worker_class=stuck, **short)
    engine.add(make_request(PROMPT, "two"))
    with pytest.raises(ClosedError, match="twice"):
        engine.step()
    stuck.movers[0].release()


class ForgetfulWorker(WorkerSide):
    """Stands for an engine that does not ask for every layer."""

    def wait_for_layer(self, name: str) -> None:
        if name != "layer.1":
            super().wait_for_layer(name)


def test_a_layer_that_nobody_waited_for_makes_the_load_fail(
    make_engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = stored(make_engine, worker_class=ForgetfulWorker)
    engine.add(make_request(PROMPT, "two"))
    engine.step()
    assert len(engine.invalid) == 4
    assert NOT_WAITED_FOR in caplog.text
    engine.drain()
    assert engine.stored_pages == 4
    engine.step()
    engine.check("two")


def test_steps_without_loads_wait_for_nothing_and_strange_layers_are_refused(make_engine: Make) -> None:
    engine = stored(make_engine)
    engine.workers[0].wait_for_layer("layer.1")
    with pytest.raises(GeometryError, match=r"layer\.7"):
        engine.workers[0].wait_for_layer("layer.7")
    assert engine.run(make_request(PROMPT[:3], "short")) == 0
