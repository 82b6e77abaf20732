"""If copies fail, stall or are late, no wrong byte is served, and flexkv reports each result to vLLM exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.errors import CapacityError, GeometryError
from flexkv.observe import Counters
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.full_queue import four_loads
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL, STALL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D, D2H = 0, 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_page_of_an_async_load_is_computed_again_and_stored_again(
    make_engine: Make, ranks: int
) -> None:
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, times=1))
    engine = stored_engine(make_engine, PROMPT, ranks=ranks, remote=ranks > 1, worker_class=worker)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert len(engine.invalid) == 1 if ranks == 1 else 1 <= len(engine.invalid) <= 2
    assert engine.stored_pages == 5 + 1
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_the_engine_resets_its_cache_while_stores_are_in_flight(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H))
    engine = make_engine(worker_class=worker)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    assert engine.side.has_work
    assert engine.pool.reset_prefix_cache()
    assert engine.side.reset()
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == 0
    assert engine.run(make_request(PROMPT, "two")) == 0
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_block_reused_under_a_stalled_store_is_not_published(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make_engine(blocks=8, worker_class=worker, **{"store.max_reference_share": 1.0})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    # Request "two" needs six of seven blocks, so it overwrites blocks that the stalled store still reads.
    engine.add(make_request([*range(23)], "two"))
    engine.step()
    worker.movers[0].release()
    engine.check("two")
    engine.until(lambda: not engine.unit.manager.inflight_ops())
    engine.finish("two")
    engine.drain()
    engine.forget()
    got = engine.run(make_request(PROMPT, "three"))
    assert got < 20
    engine.forget()
    assert engine.run(make_request([*range(23)], "four")) == 20


def test_a_forward_waits_for_a_copy_that_is_only_slow(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(1, kind=D2H, nth_op=0, delay_s=0.01))
    engine = make_engine(blocks=8, worker_class=worker, **{"store.max_reference_share": 1.0})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    engine.add(make_request([*range(23)], "two"))
    engine.step()
    engine.finish("two")
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_an_aborted_async_load_is_reported_once_when_the_slow_rank_is_quiet(make_engine: Make) -> None:
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D))
    engine = stored_engine(make_engine, PROMPT, ranks=2, remote=True, worker_class=slow)
    slow.movers[0].release()
    assert engine.add(make_request(PROMPT, "two")) == 20
    engine.step({})
    assert slow.movers[1].wait_stalled(1, 10.0)
    blocks = engine.finish("two", keep_blocks=True)
    for _ in range(5):
        engine.step({})
    assert engine.finished_loads == []
    assert all(block.ref_cnt == 1 for block in blocks)
    slow.movers[1].release()
    engine.until(lambda: engine.finished_loads == ["two"])
    engine.pool.free_blocks(blocks)
    engine.drain()
    engine.step({})
    assert engine.finished_loads == ["two"]
    engine.unit.manager.check_integrity()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_load_past_its_deadline_is_reported_when_the_lane_is_quiet(make_engine: Make) -> None:
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, page=1, times=1))
    recomputes = EngineRole(recomputes=True)
    engine = stored_engine(
        make_engine, PROMPT, worker_class=slow, role=recomputes, **{"load.deadline_s": 0.05}
    )
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 20
    engine.step({})
    assert slow.movers[0].wait_stalled(1, 10.0)
    engine.until(lambda: any(op.given_up for op in engine.workers[0]._ops._ops.values()))
    for _ in range(5):
        engine.step({})
    assert engine.finished_loads == [], "reported while bytes may still move"
    slow.movers[0].release()
    engine.until(lambda: engine.finished_loads == ["two"])
    assert engine.invalid, "pages that were not issued before the deadline count as failed"
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_reset_under_an_async_load_voids_it(make_engine: Make) -> None:
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D))
    engine = stored_engine(make_engine, PROMPT, worker_class=slow)
    request = make_request(PROMPT, "two")
    engine.add(request)
    engine.step({})
    assert engine.side.reset() is False
    engine.step({})
    slow.movers[0].release()
    engine.until(lambda: engine.finished_loads == ["two"])
    assert request.num_computed_tokens == 0
    engine.drain()
    assert engine.side.reset() is True


def test_after_a_reset_running_requests_store_nothing_of_the_old_weights(make_engine: Make) -> None:
    engine = make_engine()
    engine.add(make_request(PROMPT, "one"))
    engine.step({"one": 8})
    assert engine.side.reset()
    engine.step()
    engine.finish("one")
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 0


def test_a_load_finds_its_place_in_a_full_queue(make_engine: Make) -> None:
    engine, slow, requests = four_loads(make_engine, PROMPT)
    names = [request.request_id for request in requests]
    assert engine.finished_loads == []
    slow.movers[0].release()
    engine.until(lambda: sorted(engine.finished_loads) == names)
    for name in names:
        engine.check(name)


def test_a_load_that_finds_no_place_before_its_deadline_is_given_up(make_engine: Make) -> None:
    """A load that gets no queue entry before its deadline fails at its deadline. The load whose copies are in flight is
    reported later, when its copies have stopped.
    """
    engine, slow, requests = four_loads(make_engine, PROMPT, **{"load.deadline_s": 0.05})
    names = [request.request_id for request in requests]
    assert slow.movers[0].wait_stalled(1, 10.0)
    engine.until(lambda: len(engine.finished_loads) == 3)
    assert sorted(engine.finished_loads) == names[1:]
    counters = Counters(engine.workers[0].counters.take())
    assert counters.value("flexkv_failed_pages_total", direction="load", reason="deadline") == 3 * 5
    slow.movers[0].release()
    engine.until(lambda: sorted(engine.finished_loads) == names)
    engine.step()
    for name in names:
        engine.check(name)


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_hangs_up_while_its_load_runs_is_no_failure(make_engine: Make, fails: bool) -> None:
    """If a client disconnects while its load runs, the load's pages count as cancelled, not as failed. With `fails`,
    the control, the load's copies fail, and no client disconnects.
    """
    slow = faulty_worker(testing_ext.FaultRule(FAIL if fails else STALL, kind=H2D, times=1))
    engine = stored_engine(make_engine, PROMPT, worker_class=slow)
    engine.add(make_request(PROMPT, "two"))
    engine.step({})
    if fails:
        engine.end_load("two")
    else:
        assert slow.movers[0].wait_stalled(1, 10.0)
        engine.finish("two")
        engine.step({})
        slow.movers[0].release()
        engine.drain()
    counters = Counters(engine.workers[0].counters.take())
    assert counters.value("flexkv_cancelled_pages_total", direction="load") == (0 if fails else 5)
    assert sum(counters.data.get("flexkv_failed_pages_total", {}).values()) == fails


def test_the_engine_comes_to_rest(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    engine.run(make_request(PROMPT, "one"))
    assert not engine.side.has_work
    assert all(not worker.busy for worker in engine.workers)
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks if not block.is_null)


def test_bytes_that_changed_in_host_memory_are_found(make_engine: Make) -> None:
    engine = stored_engine(make_engine, PROMPT, **{"host.verify": True})
    for slot in range(5):
        engine.unit.pool.slot(slot)[3] ^= 1
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert len(engine.invalid) == 5
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert len(engine.invalid) == 5


def test_too_little_memory_says_how_much_a_slot_needs(make_engine: Make) -> None:
    with pytest.raises(CapacityError, match=r"4096 bytes .* slot of 8192 bytes .* host\.bytes"):
        make_engine(ranks=2, **{"host.bytes": 4096})


def test_ranks_that_disagree_are_refused(make_engine: Make) -> None:
    engine = make_engine()
    other = make_engine(blocks=16)
    engine.close()
    engine.side = SchedulerSide(engine.side._spec)
    engine.side.bind_block_pool(engine.pool)
    said = other.workers[0].handshake()
    assert said is not None
    with pytest.raises(GeometryError, match="16"):
        engine.side.take_handshake({0: said})
