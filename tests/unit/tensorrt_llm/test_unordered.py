"""flexkv promised requests a load between steps, but the load was never ordered. The engine still names the load to its
ranks and waits for it.
"""

from __future__ import annotations

import time

import pytest

from flexkv.adapters.tensorrt_llm.loads import Loads
from flexkv.errors import TransferError
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.late import LateOrders
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, World, end, promised, stored


def named(world: World, looks: int = 50) -> list[int]:
    """Names request 900's load to the rank. Returns the ids that the rank then reports as loaded."""
    loaded: list[int] = world.worker.get_finished([], [900])[1]
    for _ in range(looks):
        if loaded:
            break
        time.sleep(0.001)
        loaded = world.worker.get_finished([], [])[1]
    return loaded


def ended(world: World, request: Request) -> tuple[list[int], list[int]]:
    """Ends a request whose load the rank has not reported. Returns the ids that the rank returns as saved, and the ids
    that it returns as loaded.
    """
    assert world.scheduler.request_finished(request, request.blocks), "the rank may keep its id"
    ends_s = time.monotonic() + LONG_S
    saved, loaded = world.worker.get_finished([900], [])
    while not saved or not loaded:
        assert time.monotonic() < ends_s, "the engine never gets the request back"
        time.sleep(0.001)
        more = world.worker.get_finished([], [])
        saved, loaded = saved + more[0], loaded + more[1]
    return saved, loaded


def nothing_left(world: World, request: Request) -> None:
    """Checks that neither the scheduler nor the rank still has a record of the request, and that other requests are
    served as before.
    """
    world.executor.free += request.blocks
    requests, rank = world.scheduler.side.ranks.requests, world.worker.side
    assert 900 not in requests
    assert (rank._load_orders, rank._save_orders, rank._cancelled) == ({}, {}, set())
    world.serve(PROMPT)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def lose_pages(world: World) -> None:
    world.scheduler.side.ranks.unit.manager.reset()


@pytest.mark.parametrize("reset", [False, True])
def test_an_engine_that_was_told_of_nothing_the_second_time_waits_for_nothing(
    make_world: Make, reset: bool
) -> None:
    world = stored(make_world)
    request, blocks = promised(world)
    if reset:
        world.scheduler.request_reset(request)
    lose_pages(world)
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert named(world) == [900]
    end(world, request)
    nothing_left(world, request)


def test_control_a_scheduler_that_orders_nothing_keeps_the_request_for_good(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loads, "_order", lambda *_: None)
    world = stored(make_world)
    request, blocks = promised(world)
    lose_pages(world)
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert named(world) == []


def test_a_promise_that_was_made_again_is_loaded_and_not_excused(make_world: Make) -> None:
    world = stored(make_world)
    late = LateOrders(world)
    request, _ = promised(world)
    world.scheduler.request_reset(request)
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (WHOLE, True)
    late.hold()
    world.scheduler.update_state_after_alloc(request, request.blocks)
    assert named(world) == [], "its order is on its way"
    late.let_through()
    ends_s = time.monotonic() + LONG_S
    while world.worker.get_finished([], [])[1] != [900]:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    assert world.executor.pool.wrong(request, WHOLE) == []
    world.scheduler.side.ranks.poll()
    end(world, request)
    nothing_left(world, request)


@pytest.mark.parametrize("first", ["named", "ended"])
def test_a_request_that_ends_before_it_has_blocks_comes_back(make_world: Make, first: str) -> None:
    world = stored(make_world)
    late = LateOrders(world)
    request, _ = promised(world)
    if first == "named":
        assert named(world) == []
        assert ended(world, request) == ([900], [900])
    else:
        assert world.scheduler.request_finished(request, request.blocks)
        late.hold()
        assert world.worker.get_finished([900], [900]) == ([], [])
        late.let_through()
        assert world.worker.get_finished([], []) == ([900], [900])
    nothing_left(world, request)


def test_a_request_that_is_never_named_leaves_nothing_behind(make_world: Make) -> None:
    world = stored(make_world)
    request, _ = promised(world)
    end(world, request)
    nothing_left(world, request)


def test_a_promise_that_could_not_be_kept_is_never_called_loaded(make_world: Make) -> None:
    """If a promise could not be kept, the rank never reports the load as done, even if the engine passes the blocks a
    second time after the error. The engine may still rely on the promise then.
    """
    world = stored(make_world, {"FLEXKV_LOAD_LEASE_S": "0.001"})
    request, blocks = promised(world)
    manager = world.scheduler.side.ranks.unit.manager
    ends_s = time.monotonic() + LONG_S
    while manager.leased_pages("900"):
        assert time.monotonic() < ends_s
        time.sleep(0.002)
        manager.expire()
    lose_pages(world)
    with pytest.raises(TransferError, match="took up a promise"):
        world.scheduler.update_state_after_alloc(request, blocks)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert named(world) == []
    assert ended(world, request) == ([900], [900])
    nothing_left(world, request)


def test_a_promise_that_a_reset_took_away_is_never_called_loaded(make_world: Make) -> None:
    """If a reset ended a promise, the rank never reports the load as done. The engine passes blocks without a new
    lookup, so it may still rely on the promise from before the reset.
    """
    world = stored(make_world)
    request, blocks = promised(world)
    world.scheduler.request_reset(request)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert named(world) == []
    assert ended(world, request) == ([900], [900])
    nothing_left(world, request)
