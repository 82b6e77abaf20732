"""Shows which copies wait for a running forward pass, and which do not. The tests use a fake GPU that can hold a
forward pass, with both of vLLM's model runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from flexkv.adapters.vllm import scheduler as scheduler_side
from flexkv.adapters.vllm import worker
from flexkv.cache.stores.eager import EagerStores
from flexkv.transfer.engine import TransferEngine
from tests.unit.adapters.fake_gpu import A_WHILE_S, LONG_S, FakeGpuWorld
from tests.unit.adapters.model_runners import RUNNERS, nothing
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import full

PROMPT = list(range(10, 60))
OTHER = list(range(60, 97))


class GpuEngine(ScheduledEngine):
    """An engine whose KV memory is on a fake GPU, `world`."""

    world: FakeGpuWorld

    def copies_end(self, wait_s: float) -> bool:
        """Waits at most `wait_s` for each submitted copy. Returns whether all of them ended."""
        ops = self.worker.worker._ops
        return all(ops.engine.wait(op.ticket, wait_s) for op in ops._ops.values())

    def forget(self) -> None:
        self.world.gpu.drain()
        super().forget()


Make = Callable[..., GpuEngine]


@pytest.fixture(params=RUNNERS)
def make_engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    engines: list[GpuEngine] = []

    def make(**options: Any) -> GpuEngine:
        world = FakeGpuWorld(monkeypatch)
        where = {"worker_class": world.worker_class, "give": world.give, "runner": request.param}
        engines.append(GpuEngine(tmp_path, [full(4)], **where | options))
        engines[0].world = world
        return engines[0]

    yield make
    for engine in engines:
        engine.world.let_go()
        engine.close()
        engine.world.close()


def load_beside_a_forward(engine: GpuEngine) -> None:
    """Orders an async load in a step in which the test holds the forward pass of another request."""
    engine.run("one", PROMPT)
    engine.forget()
    engine.add("busy", OTHER, output=20)
    engine.step()
    engine.step()
    engine.world.gpu.drain()
    engine.world.hold()
    engine.add("two", PROMPT)
    engine.step()
    assert engine.hits["two"] == 48


def end(engine: GpuEngine) -> None:
    engine.world.let_go()
    engine.settle()
    engine.world.gpu.drain()
    engine.check()


def test_an_async_load_does_not_wait_for_the_forward_just_launched(make_engine: Make) -> None:
    engine = make_engine()
    load_beside_a_forward(engine)
    assert engine.copies_end(LONG_S)
    assert engine.world.held
    end(engine)


def test_control_behind_all_that_the_stream_was_given_it_waits(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side, "forward_spares_loads", lambda *_: False)
    engine = make_engine()
    load_beside_a_forward(engine)
    assert not engine.copies_end(A_WHILE_S)
    end(engine)


@pytest.mark.parametrize("spared", [False, True])
def test_loads_wait_where_the_runner_touches_new_blocks(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, spared: bool
) -> None:
    """Loads wait for the forward pass if the model runner clears new blocks. vLLM's own runner promises not to clear a
    load's blocks, but the runner in this test does. With `spared`, the control, flexkv trusts the promise, and the
    runner clears loaded KV. Under V2 this does no harm, because V2 clears blocks before it calls its first hook.
    """
    engine = make_engine()
    scheduler: Any = engine.scheduler
    scheduler._get_new_block_ids_to_zero = lambda: list(engine.fresh) or None
    if spared:
        monkeypatch.setattr(scheduler_side, "forward_spares_loads", lambda *_: True)
    load_beside_a_forward(engine)
    early = engine.copies_end(A_WHILE_S)
    engine.world.let_go()
    engine.settle()
    engine.world.gpu.drain()
    clears_late = "V1" in request.node.callspec.id
    assert early is (spared and clears_late), "V2's clearing is held too"
    assert bool(engine.trouble) is (spared and clears_late)


MANY = {f"r{n}": [10 + n] * 13 for n in range(4)}
"""Requests with more stores than one direction of the lane processes at a time."""


def reuse_under_a_forward(engine: GpuEngine, late_copies: bool = False) -> bool:
    """Aborts requests while their forward pass runs. The next step writes to the blocks of these requests.

    Args:
        late_copies: whether all copies are held until the next step's forward pass has run. If that pass waits for the
            copies, the function never returns.

    Returns:
        Whether the worker's thread returned from the step while the first forward pass was still running.
    """
    world = engine.world
    world.hold()
    for name, prompt in MANY.items():
        engine.add(name, prompt)
    engine.step()
    for name in MANY:
        engine.end(name)
    engine.add("next", list(range(20, 90)))
    late = Timer(2.0, world.let_go)
    late.start()
    engine.step()
    beside = world.held
    late.cancel()
    if late_copies:
        world.gpu.hold_copies(True)
        world.let_go()
        world.gpu.drain()
        world.gpu.hold_copies(False)
    end(engine)
    engine.forget()
    for name, prompt in MANY.items():
        assert engine.run(f"{name} again", prompt) == 12, "a page was lost"
    world.gpu.drain()
    return beside


SMALL: dict[str, Any] = {"blocks": 20, "step_tokens": 128, "store.max_reference_share": 1.0}


def test_a_long_forward_neither_stalls_the_worker_nor_loses_a_page(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this long limit, a worker that waited for the forward pass would wait until the pass ends.
    monkeypatch.setattr(worker, "REUSE_WAIT_S", LONG_S)
    engine = make_engine(**SMALL)
    assert reuse_under_a_forward(engine)
    engine.check()


def test_control_unordered_the_next_request_is_what_was_stored(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferEngine, "order_after", lambda *_: True)
    engine = make_engine(**SMALL)
    assert reuse_under_a_forward(engine, late_copies=True)
    assert engine.trouble


def test_control_a_wait_for_the_copies_stalls_the_worker(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "REUSE_WAIT_S", LONG_S)
    monkeypatch.setattr(TransferEngine, "order_after", TransferEngine.wait)
    assert not reuse_under_a_forward(make_engine(**SMALL))


def store_of_generated(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs steps until one stores a block that earlier forward passes filled. That step's own forward pass stays
    held.
    """
    engine.add("one", PROMPT, output=40)
    manager: Any = engine.connector.scheduler.unit.manager
    for _ in range(4):
        engine.step()
        assert engine.copies_end(LONG_S)
    assert manager.stats().stored_pages >= 12
    planned: list[int] = []
    plan: Any = EagerStores._plan

    def note(*args: Any) -> Any:
        graphs = plan(*args)
        planned.extend(op.pages for graph in graphs for op in graph.ops)
        return graphs

    monkeypatch.setattr(EagerStores, "_plan", note)
    for _ in range(8):
        engine.world.let_go()
        engine.world.gpu.drain()
        engine.world.hold()
        engine.step()
        if planned:
            return
    raise AssertionError("no block was filled by what was generated")


def test_a_block_of_earlier_forwards_is_stored_beside_the_one_that_runs(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**{"store.generated_blocks": 1})
    store_of_generated(engine, monkeypatch)
    assert engine.copies_end(LONG_S)
    assert engine.world.held
    end(engine)
    engine.forget()
    assert engine.run("two", PROMPT) == 48


def test_control_a_block_that_the_forward_fills_waits_for_it(make_engine: Make) -> None:
    engine = make_engine()
    engine.world.hold()
    engine.add("one", PROMPT)
    engine.step()
    assert not engine.copies_end(A_WHILE_S)
    end(engine)
    engine.forget()
    assert engine.run("two", PROMPT) == 48


@pytest.mark.parametrize("hooked", [True, False])
def test_a_store_does_not_wait_for_what_follows_the_forward(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, hooked: bool
) -> None:
    """A store waits for the forward pass, but not for the sampling after it. V2 calls `wait_for_save` after sampling,
    V1 before it. In the control, the connector lacks the hook that V2 calls right after the forward pass.
    """
    engine = make_engine()
    if not hooked:
        monkeypatch.setattr(type(engine.worker), "finish_forward", nothing)
    is_v2 = type(engine._runner) is RUNNERS["V2"]

    def sample() -> None:
        engine.world.hold()
        engine.world.give(nothing)

    engine.sample = sample
    engine.add("one", PROMPT)
    engine.step()
    assert engine.copies_end(LONG_S if hooked or not is_v2 else A_WHILE_S) is (hooked or not is_v2)
    engine.sample = nothing
    end(engine)
    engine.forget()
    assert engine.run("two", PROMPT) == 48
