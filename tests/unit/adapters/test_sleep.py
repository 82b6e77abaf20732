"""Engines that release their KV memory (sleep): no copy touches that memory. Waiting loads and stores fail with a
reason that names the sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.adapters.vllm.worker import ASLEEP
from flexkv.errors import ClosedError
from flexkv.transfer.graph import OpStatus
from tests import testing_ext
from tests.unit.adapters.faulty_worker import FaultyWorker, faulty_worker, release_when_given_up
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.sleeping_engine import SleepingEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import STALL

PROMPT = list(range(100, 123))
H2D, D2H = 0, 1
SHORT = {"transfer.close_s": 0.05, "load.deadline_s": 60.0}
"""Settings with which the worker soon cancels a stalled copy when the engine goes to sleep."""

Make = Callable[..., SleepingEngine]


@pytest.fixture
def make_sleeping() -> Iterator[Make]:
    engines: list[SleepingEngine] = []

    def make(**options: Any) -> SleepingEngine:
        engines.append(SleepingEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        for worker in engine.workers:
            if isinstance(worker, FaultyWorker) and worker.rank in worker.movers:
                worker.movers[worker.rank].release()
        engine.close()


def stored(make: Make, **options: Any) -> SleepingEngine:
    engine = make(**options)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    return engine


class DeafWorker(FaultyWorker):
    """For the control test: a worker that goes on copying when the engine releases its memory."""

    rules: ClassVar[list[Any]] = [testing_ext.FaultRule(STALL, kind=H2D, nth_op=0)]
    movers: ClassVar[dict[int, Any]] = {}

    def unregister_kv_caches(self) -> None:
        """Does not end any copy."""


def with_stalled_load(make: Make, worker: type[FaultyWorker]) -> SleepingEngine:
    engine = stored(make, worker_class=worker, **SHORT)
    assert engine.add(make_request(PROMPT, "two")) == 20
    engine.step({})
    assert worker.movers[0].wait_stalled(1, 60.0)
    return engine


def test_no_copy_reaches_memory_that_the_engine_has_taken(make_sleeping: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, nth_op=0))
    engine = with_stalled_load(make_sleeping, worker)
    released = release_when_given_up(engine.workers[0], worker.movers[0])
    engine.lose_memory()
    released.join()
    assert not engine.workers[0]._ops._ops
    engine.step({})
    assert not engine.was_touched
    assert engine.finished_loads == ["two"]
    assert len(engine.invalid) == 5, "blocks of a load that was ended are named"
    engine.wake_up()
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()


def test_control_a_copy_that_goes_on_is_found_out(make_sleeping: Make) -> None:
    engine = with_stalled_load(make_sleeping, DeafWorker)
    engine.lose_memory()
    DeafWorker.movers[0].release()
    engine.until(lambda: engine.finished_loads == ["two"])
    assert engine.was_touched


def test_a_copy_that_cannot_be_ended_keeps_the_memory(make_sleeping: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make_sleeping(worker_class=worker, **SHORT, **{"transfer.stuck_s": 0.1})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert worker.movers[0].wait_stalled(1, 60.0)
    with pytest.raises(
        ClosedError, match=r"rank 0: \d copies ended neither within transfer.close_s \(0.05 s\)"
    ):
        engine.workers[0].unregister_kv_caches()
    # The connector refused the sleep, so the engine is still awake.
    worker.movers[0].release()
    engine.finish("one")
    engine.drain()
    assert engine.run(make_request([*range(23)], "two")) == 0
    assert engine.stored_pages >= 5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_is_asked_of_a_sleeping_engine_ends_refused(make_sleeping: Make, mode: str, ranks: int) -> None:
    engine = stored(make_sleeping, ranks=ranks, remote=ranks > 1, **{"load.mode": mode})
    engine.lose_memory()
    # A scheduler adds no requests while its engine sleeps, but a worker must not rely on that.
    assert engine.add(make_request(PROMPT, "two")) == 20
    engine.step({"two": 3} if mode == "sync" else {})
    engine.end_load("two")
    assert len(engine.invalid) == 5
    assert not any(worker.busy for worker in engine.workers)
    assert engine.live["two"].request.num_computed_tokens == 0
    engine.wake_up()
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()


def test_refusals_name_the_sleep(make_sleeping: Make) -> None:
    engine = stored(make_sleeping)
    worker = engine.workers[0]
    worker.unregister_kv_caches()
    engine.side.match(request := make_request(PROMPT, "two"), 0)
    blocks = engine.pool.get_new_blocks(6)
    ids = [block.block_id for block in blocks]
    engine.side.allocated(request, type("Blocks", (), {"get_block_ids": lambda self: (ids,)})(), 20)
    worker.start_loads(engine.side.build(SchedulerOutput.make_empty()))
    [result] = worker._ops.reports.take_results()
    assert (result.status, result.reason) == (OpStatus.CANCELLED, ASLEEP)
    assert worker.reports.take_finished() == {"two"}
    assert worker.reports.take_failed_blocks() == set(ids[:5])


def test_the_hooks_may_come_twice_and_before_there_is_a_pool(make_sleeping: Make) -> None:
    engine = stored(make_sleeping, ranks=2, remote=True)
    for _ in range(2):
        engine.lose_memory()
    for _ in range(2):
        engine.wake_up()
    assert engine.run(make_request(PROMPT, "two")) == 20
    late = make_sleeping(ranks=2, remote=True)
    late.lose_memory()  # no step has brought the worker the grant of its pool yet
    late.step({})
    late.wake_up()
    late.run(make_request(PROMPT, "one"))
    late.forget()
    assert late.run(make_request(PROMPT, "two")) == 20


@pytest.mark.parametrize("store", ["eager", "lazy", "layerwise"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_slept_caches_again(make_sleeping: Make, store: str, ranks: int) -> None:
    settings: dict[str, Any] = {"store.mode": store, "store.max_reference_share": 1.0}
    engine = make_sleeping(blocks=14, ranks=ranks, remote=ranks > 1, **settings)
    for nap in range(3):
        engine.run(make_request(PROMPT, f"a{nap}"))
        engine.run(make_request([*range(23)], f"b{nap}"))
        engine.drain()
        engine.sleep()
        engine.step({})
        assert not engine.was_touched
        engine.wake_up()
        assert engine.run(make_request(PROMPT, f"c{nap}")) == 0, (
            "the reset before the sleep forgot everything"
        )


def test_a_load_begun_between_steps_and_reset_before_its_step_fails(make_sleeping: Make) -> None:
    """A load that begins between two steps fails if a reset comes before the step that would order it. In vLLM 0.33, an
    async load may begin when vLLM takes a step's output.
    """
    engine = stored(make_sleeping)
    assert engine.add(make_request(PROMPT, "two")) == 20
    assert not engine.side.reset(), "a load is on its way"
    engine.step({})
    engine.end_load("two")
    assert len(engine.invalid) == 5
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()


# --- vLLM 0.32, which calls no hook of a worker's connector for a sleep ---

ENDS = {"role": EngineRole(ends_copies=True)}


def store_stalls(make: Make, **options: Any) -> tuple[SleepingEngine, Any]:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make(worker_class=worker, **SHORT, **options)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert worker.movers[0].wait_stalled(1, 60.0)
    engine.finish("one")
    assert engine.pool.reset_prefix_cache()
    return engine, worker.movers[0]


def test_a_reset_before_a_sleep_ends_every_copy(make_sleeping: Make) -> None:
    engine, mover = store_stalls(make_sleeping, **ENDS)
    released = release_when_given_up(engine.workers[0], mover)
    assert engine.side.reset()
    released.join()
    assert not engine.workers[0]._ops._ops
    engine.drain()
    assert engine.stored_pages == 0
    engine.pools.spoil()
    assert engine.run(make_request(PROMPT, "two")) == 0
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_control_other_resets_leave_copies_in_flight(make_sleeping: Make) -> None:
    engine, mover = store_stalls(make_sleeping)
    assert engine.side.reset()
    assert engine.workers[0]._ops._ops
    mover.release()
    engine.drain()


def test_a_reset_fails_when_a_copy_cannot_be_ended(
    make_sleeping: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine, mover = store_stalls(make_sleeping, **ENDS, **{"transfer.stuck_s": 0.1})
    with caplog.at_level(logging.ERROR):
        assert not engine.side.reset()
    assert "must not sleep" in caplog.text
    mover.release()
    engine.drain()
    assert engine.side.reset()


def test_a_reset_that_fails_ends_the_stores_that_were_not_begun(
    make_sleeping: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.adapters.vllm.scheduler.current_device_is_host", lambda: False)
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    settings = {"transfer.stuck_s": 0.1, "store.partial_blocks": True}
    engine = make_sleeping(worker_class=worker, **SHORT, **ENDS, **settings)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert worker.movers[0].wait_stalled(1, 60.0)
    engine.finish("one")
    assert engine.side.orders.early, "the tail waits for the next step"
    assert engine.pool.reset_prefix_cache()
    assert not engine.side.reset()
    worker.movers[0].release()
    engine.drain()
    assert engine.unit.manager.inflight_ops() == 0
    assert engine.side.reset()


def test_a_reset_fails_while_other_processes_copy(
    make_sleeping: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine, mover = store_stalls(make_sleeping, remote=True, **ENDS)
    with caplog.at_level(logging.ERROR):
        assert not engine.side.reset()
    assert "workers in other processes" in caplog.text
    mover.release()
    engine.drain()
    assert engine.side.reset()


def test_stores_not_begun_before_a_sleep_are_dropped(
    make_sleeping: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that have not begun before a sleep are dropped. On a device, the last stores of a request wait for the
    next step, which would come only after the sleep.
    """
    monkeypatch.setattr("flexkv.adapters.vllm.scheduler.current_device_is_host", lambda: False)
    engine: MiniEngine = make_sleeping(**ENDS, **{"store.partial_blocks": True})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    assert (pages := sum(op.pages for graph in engine.side.orders.early for op in graph.ops))
    assert engine.pool.reset_prefix_cache()
    assert engine.side.reset()
    assert not engine.side.orders.early
    engine.drain()
    assert engine.unit.manager.inflight_ops() == 0
    assert engine.counters.value("flexkv_dropped_store_pages_total", reason="released") == pages
