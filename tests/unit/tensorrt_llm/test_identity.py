"""Ranks accept only steps of the scheduler that they joined. A scheduler accepts only reports of its own ranks."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.common.rank_reports import RankReport
from flexkv.adapters.tensorrt_llm.link import (
    LENGTH,
    MAX_STRANGERS,
    MAX_WAITING_BYTES,
    Listener,
    Wire,
    connect,
)
from flexkv.adapters.tensorrt_llm.messages import RankJoin
from flexkv.adapters.tensorrt_llm.rank_coordinator import RankCoordinator
from flexkv.adapters.tensorrt_llm.worker import WorkerSide
from flexkv.errors import TransferError
from flexkv.facts.ranks import UnitId, random_id
from flexkv.transfer.graph import OpKind
from flexkv.unit.base import UnitState
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, World, lookup, promised, stored
from tests.unit.transfer.transfer_world import STALL

SYNC = {"FLEXKV_LOAD_MODE": "sync"}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.ERROR)
    return caplog


def ranks_of(world: World) -> RankCoordinator:
    assert world.scheduler is not None
    return world.scheduler.side.ranks


def pool_of(world: World) -> Any:
    return world.executor.pool.words


def refused(counters: Any, kind: str) -> float:
    return float(counters.data.get("flexkv_refused_messages_total", {}).get(kind, 0))


def until(world: World, done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < ends_s, "it never came to that"
        ranks_of(world).poll()
        time.sleep(0.001)


def planned_step(world: World, request: Any, blocks: list[int]) -> Any:
    """Returns the metadata of a step that loads the promised blocks of the request."""
    assert world.scheduler is not None
    world.scheduler.update_state_after_alloc(request, blocks)
    nothing = type("Output", (), {"new_requests": [], "cached_requests": []})
    step = world.scheduler.build_connector_meta(nothing)
    assert step.loads
    return step


# --- a rank gets steps of another scheduler ---


@pytest.mark.parametrize("ahead", [0, 1000], ids=["steps-behind", "steps-ahead"])
def test_a_step_of_another_scheduler_is_refused_with_its_loads(make_world: Make, ahead: int) -> None:
    """A step of another scheduler is refused, even if its number is one that was already carried out. If such a step
    were skipped instead, the forward pass would read garbage.
    """
    one, other = stored(make_world, SYNC), stored(make_world, SYNC)
    request, blocks = promised(other)
    step = planned_step(other, request, blocks)
    before = pool_of(one).copy()
    with pytest.raises(TransferError, match=r"a step of .* reached it and is refused, with loads of blocks"):
        one.worker.side.start(replace(step, step=step.step + ahead))
    assert np.array_equal(pool_of(one), before)
    assert refused(one.worker.side.counters, "orders") == 1
    assert one.hit(one.serve(PROMPT)) == WHOLE
    # The refused step belongs to `other`, whose own rank carries it out, so nothing is lost.
    other.worker.side.start(step)


def test_a_step_of_another_scheduler_without_loads_changes_nothing(
    make_world: Make, logged: pytest.LogCaptureFixture
) -> None:
    one, other = stored(make_world), stored(make_world)
    nothing = type("Output", (), {"new_requests": [], "cached_requests": []})
    assert other.scheduler is not None
    for _ in range(3):
        one.worker.side.start(other.scheduler.build_connector_meta(nothing))
    assert sum("refused" in record.message for record in logged.records) == 1
    assert one.hit(one.serve(PROMPT)) == WHOLE


def test_two_engines_in_one_process_serve_their_own(make_world: Make) -> None:
    one, other = stored(make_world), make_world()
    other.warm_up()
    assert other.hit(other.serve(PROMPT)) == 0
    prompt = [token + 1 for token in PROMPT]
    one.serve(prompt)
    assert (one.hit(one.serve(prompt)), one.hit(one.serve(PROMPT))) == (WHOLE, WHOLE)
    assert (other.hit(other.serve(prompt)), other.hit(other.serve(PROMPT))) == (0, WHOLE)
    one.check()
    other.check()


# --- a scheduler gets reports of other ranks ---


def facts_of(world: World) -> Any:
    return world.worker.side.facts()


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (lambda facts: RankJoin(0, facts, 4), "rank 0 has joined before"),
        (lambda facts: RankJoin(7, facts, 4), "rank 7 joins an engine of 1 rank"),
        (lambda facts: RankJoin(-1, facts, 4), "rank -1 joins an engine of 1 rank"),
        (lambda facts: RankReport(0, error="broken"), "rank 0 reports before it has joined"),
    ],
)
def test_a_rank_of_another_engine_cannot_join(
    make_world: Make,
    report: Callable[[Any], RankJoin | RankReport],
    why: str,
    logged: pytest.LogCaptureFixture,
) -> None:
    world = stored(make_world)
    intruder = connect(world.scheduler.side.ranks.address)
    intruder.send(report(facts_of(world)))
    until(world, lambda: bool(refused(world.scheduler.side.counters, "reports")))
    assert why in logged.text
    until(world, lambda: bool(intruder.receive() or intruder.closed))
    assert world.scheduler.side.ranks.usable
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_a_stranger_hears_nothing_and_may_go(make_world: Make) -> None:
    world = stored(make_world)
    stranger = connect(world.scheduler.side.ranks.address)
    world.serve(PROMPT)
    assert stranger.receive() == []
    stranger.close()
    ranks_of(world).poll()
    assert world.scheduler.side.ranks.usable, "only a rank's end ends the cache"
    assert world.hit(world.serve(PROMPT)) == WHOLE


@pytest.mark.parametrize(
    "sent",
    [
        LENGTH.pack(4) + b"GET ",
        LENGTH.pack(MAX_WAITING_BYTES + 1),
        LENGTH.pack(0xFFFFFFFF) + b"x" * 100,
        LENGTH.pack(0),
        LENGTH.pack(5) + pickle.dumps(3, protocol=2)[:5],
        LENGTH.pack(len(pickle.dumps({"a": 1}))) + pickle.dumps({"a": 1}),
    ],
)
def test_a_stranger_that_speaks_another_language_is_turned_away(make_world: Make, sent: bytes) -> None:
    world = stored(make_world)
    stranger = connect(world.scheduler.side.ranks.address)
    stranger._socket.setblocking(True)
    stranger._socket.sendall(sent)
    stranger._socket.setblocking(False)
    until(world, lambda: bool(stranger.receive() or stranger.closed))
    assert world.scheduler.side.ranks.usable
    assert world.hit(world.serve(PROMPT)) == WHOLE


def test_strangers_are_bounded() -> None:
    listener = Listener()
    wires: list[Wire] = []
    for _ in range(MAX_STRANGERS + 5):
        wires.append(connect(listener.address))
        listener.poll()
    for wire in wires:
        wire.receive()
    assert [bool(wire.closed) for wire in wires] == [True] * 5 + [False] * MAX_STRANGERS
    listener.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_report_to_another_unit_frees_and_publishes_nothing(make_world: Make, own: bool) -> None:
    """A report of another unit frees no slot and publishes no page. With `own`, the control, a rank of this unit
    reports, so the slots are freed and the pages are published.
    """
    faults = Faults(STALL, OpKind.D2H, times=1)
    world = make_world(movers=faults)
    world.warm_up()
    world.request(PROMPT)
    while not faults.mover.wait_stalled(1, 0.0):
        world.executor.step()
    manager = world.scheduler.side.ranks.unit.manager
    assert manager.inflight_ops() == 1
    [op_id] = world.worker.side._ops._ops
    faults.mover.release()
    ends_s = time.monotonic() + LONG_S
    while not (results := world.worker.side._ops.engine.poll()):
        assert time.monotonic() < ends_s
    world.worker.side._ops._ops.clear()
    assert [result.op_id for result in results] == [op_id]
    unit = world.worker.side.unit if own else UnitId(random_id())
    world.worker.side._wire.send(RankReport(0, unit, results))
    counters = world.scheduler.side.counters
    until(world, lambda: not manager.inflight_ops() if own else bool(refused(counters, "reports")))
    assert (manager.inflight_ops(), lookup(world)) == ((0, WHOLE) if own else (1, 0))


def test_a_rank_whose_pool_was_replaced_takes_no_grant_for_the_old_one(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    """A rank whose pool was replaced refuses a grant for the old pool. In this test, the rank registers another pool
    between its first report and the grant.
    """
    world = make_world()
    joined = WorkerSide._join

    def join_and_replace(side: WorkerSide, address: str) -> None:
        before = side._wire
        joined(side, address)
        if before is None:
            monkeypatch.setattr(side, "pool_id", random_id())

    monkeypatch.setattr(WorkerSide, "_join", join_and_replace)
    world.serve(PROMPT)
    until(world, lambda: world.scheduler.side.ranks.unit.state is not UnitState.AWAITING_RANKS)
    for _ in range(20):
        world.executor.step()
    until(world, lambda: not world.scheduler.side.ranks.unit.usable)
    assert not world.worker.side.attached
    assert "granted for another KV pool" in logged.text
    assert world.hit(world.serve(PROMPT)) == 0
    world.check()
