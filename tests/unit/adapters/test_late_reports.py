"""The scheduler's side acts before it knows the result of a step: with batches in flight, on aborts and on resets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from flexkv.transfer.graph import OpStatus
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.full_queue import four_loads
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL, STALL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D, D2H = 0, 1
LONG_S = 60.0


def run_shared_failure(make_engine: Make) -> tuple[MiniEngine, Callable[[], None]]:
    """Runs a step with a failing sync load into blocks that two requests share. Returns the engine, and a function that
    reports the failure to the scheduler.
    """
    # The first store belongs to request "one". The second store ends only after the step has made its report.
    late_store = testing_ext.FaultRule(STALL, kind=D2H, nth_op=1)
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=1, times=1), late_store)
    engine = make_engine(worker_class=worker, **{"load.mode": "sync"})
    engine.run(make_request(PROMPT[:8], "one"))
    engine.forget()
    assert engine.add(make_request(PROMPT[:16], "two")) == 8
    engine.adopt(make_request([*PROMPT[:8], *range(9)], "three"), engine.live["two"].blocks[:2])
    hear = engine.hold_reports()
    engine.step()
    worker.movers[0].release()
    # Wait until the store has ended. Its end is not reported yet.
    ends_s = time.monotonic() + LONG_S
    while any(lane.open_ops for lane in engine.workers[0]._ops.engine.lanes()):
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    return engine, hear


def test_no_store_overtakes_the_report_of_a_failed_load(make_engine: Make) -> None:
    engine, hear = run_shared_failure(make_engine)
    engine.side.match(make_request(PROMPT, "four"), 0)
    hear()
    engine.drain()
    assert engine.stored_pages == 2


def test_a_request_that_ends_before_the_report_leaves_no_wrong_store(make_engine: Make) -> None:
    engine, hear = run_shared_failure(make_engine)
    engine.finish("three", keep_blocks=True)
    hear()
    engine.drain()
    assert engine.stored_pages == 2


def test_a_request_may_end_when_its_computed_tokens_were_taken_back(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    request = make_request(PROMPT, "one")
    engine.add(request)
    engine.step()
    request.num_computed_tokens, request.num_in_flight_tokens = 0, 3
    engine.finish("one")
    engine.drain()
    assert engine.stored_pages == 5


def test_an_early_store_of_a_block_that_is_cleared_first_is_void(make_engine: Make) -> None:
    engine = make_engine(remote=True, **{"store.partial_blocks": True})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.until(lambda: engine.stored_pages == 5)
    engine.finish("one")
    engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    output: Any = engine._output({})
    output.new_block_ids_to_zero = [1]
    orders = engine.side.build(output)
    assert len(orders.early) == len(orders.void) == 1
    worker = engine.workers[0]
    worker.before_forward(orders)
    results: list[Any] = []
    while not results:
        worker.poll(idle=True)
        report = worker.take_metadata()
        results = report.reports[0].results if report else []
    assert [result.status for result in results] == [OpStatus.CANCELLED]


@pytest.mark.parametrize("hashed", [False, True])
def test_what_was_loaded_before_a_reset_is_not_stored_after_it(make_engine: Make, hashed: bool) -> None:
    engine = stored_engine(make_engine, PROMPT)
    if not hashed:
        # In vLLM, loaded blocks get their hashes only when the request is scheduled.
        engine._cache_blocks = lambda live, tokens: None  # type: ignore[method-assign]
    assert engine.add(make_request(PROMPT, "two")) == 20
    engine.end_load("two")
    engine.side.reset()
    engine.step()
    engine.finish("two")
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 0


def test_a_reset_voids_loads_that_wait_for_their_place(make_engine: Make) -> None:
    engine, slow, requests = four_loads(make_engine, PROMPT)
    assert engine.side.reset() is False
    engine.step({})
    slow.movers[0].release()
    engine.until(lambda: len(engine.finished_loads) == 4)
    assert [request.num_computed_tokens for request in requests] == [0] * 4
