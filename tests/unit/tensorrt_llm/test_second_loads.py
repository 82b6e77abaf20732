"""A request repeats its lookup after the engine has handed back the request's load between steps. The engine identifies
a load only by the request's id, and may name it to a rank before the rank has the order of the load.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.late import LateOrders
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, World, promised, stored
from tests.unit.tensorrt_llm.world import end as world_end
from tests.unit.transfer.transfer_world import FAIL, STALL

First = Callable[[World, LateOrders, Request], None]
"""A function that ends the first promise of a request in some way."""


def handed_back(world: World, late: LateOrders, request: Request) -> None:
    """Hands the complete promise back before the request has blocks, so the engine waits for no load."""
    world.scheduler.cancel_load(request, 0, WHOLE)
    world.scheduler.update_state_after_alloc(request, request.blocks)
    assert world.worker.get_finished([], []) == ([], [])
    late.hold()


def handed_back_and_reset(world: World, late: LateOrders, request: Request) -> None:
    handed_back(world, late, request)
    world.scheduler.request_reset(request)


def handed_back_late_and_reset(world: World, late: LateOrders, request: Request) -> None:
    """Hands the promise back and resets the request while the rank has not received the first order. So the rank does
    not have the first order when the engine names the second load.
    """
    late.hold()
    handed_back_and_reset(world, late, request)


def ordered_and_reset(world: World, late: LateOrders, request: Request) -> None:
    """Orders the load. A reset takes the request's blocks before the engine has named the load to the rank."""
    world.scheduler.update_state_after_alloc(request, request.blocks)
    assert world.worker.get_finished([], []) == ([], [])
    world.scheduler.request_reset(request)
    assert world.worker.get_finished([], []) == ([], [])
    late.hold()


def ordered_and_cancelled(world: World, late: LateOrders, request: Request) -> None:
    world.scheduler.update_state_after_alloc(request, request.blocks)
    assert world.worker.get_finished([], []) == ([], [])
    world.scheduler.cancel_load(request, 0, WHOLE)
    assert world.worker.get_finished([], []) == ([], [])
    late.hold()


def given_no_blocks_and_reset(world: World, late: LateOrders, request: Request) -> None:
    """Passes no blocks, like an engine without memory for the load. So the order contains no copy, and no rank reports
    its end.
    """
    world.scheduler.update_state_after_alloc(request, [])
    assert world.worker.get_finished([], []) == ([], [])
    world.scheduler.request_reset(request)
    late.hold()


FIRST: list[First] = [
    handed_back,
    handed_back_and_reset,
    handed_back_late_and_reset,
    ordered_and_reset,
    ordered_and_cancelled,
    given_no_blocks_and_reset,
]


def ask_again(world: World, late: LateOrders, request: Request) -> tuple[int, list[int]]:
    """Looks the request up again. If the lookup promises tokens, the engine names the load to the rank before the order
    arrives. Returns the number of promised tokens, and the positions whose numbers are wrong when the rank reports the
    load.
    """
    tokens, is_async = world.scheduler.get_num_new_matched_tokens(request, 0)
    world.scheduler.update_state_after_alloc(request, request.blocks)
    if not is_async:
        return tokens, []
    loaded: list[int] = world.worker.get_finished([], [900])[1]
    late.let_through()
    ends_s = time.monotonic() + LONG_S
    while not loaded:
        assert time.monotonic() < ends_s, "nothing comes back"
        time.sleep(0.001)
        loaded = world.worker.get_finished([], [])[1]
    return tokens, world.executor.pool.wrong(request, tokens)


def end(world: World, request: Request) -> None:
    """Ends the request. Checks that neither the scheduler nor the rank keeps a record of it."""
    requests = world.scheduler.side.ranks.requests
    assert requests[900].may_be_named, "ranks may have to do with its load yet"
    world_end(world, request)
    world.executor.free += request.blocks
    rank = world.worker.side
    assert (rank._load_orders, rank._save_orders, rank._cancelled) == ({}, {}, set())
    assert 900 not in requests
    assert world.scheduler.side.ranks.unit.manager.inflight_ops() == 0


@pytest.mark.parametrize("first", FIRST)
def test_no_load_is_taken_for_another_of_its_request(make_world: Make, first: First) -> None:
    world = stored(make_world)
    late = LateOrders(world)
    request, _ = promised(world)
    first(world, late, request)
    assert ask_again(world, late, request) == (0, [])
    world.scheduler.request_reset(request)
    assert ask_again(world, late, request) == (0, []), "for as long as it lives"
    late.let_through()
    end(world, request)
    assert world.hit(world.serve(PROMPT)) == WHOLE, "others are promised as before"
    world.check()


@pytest.mark.parametrize("first", [f for f in FIRST if f is not handed_back_late_and_reset])
def test_a_scheduler_without_memory_of_the_first_load_would_serve_garbage(
    make_world: Make, first: First
) -> None:
    """As a control, the scheduler forgets the request before the second load. The request then gets garbage. One of
    the cases in `FIRST` is left out, because it would not fail: if the messages that order both loads arrive late, the
    second message replaces the first.
    """
    world = stored(make_world)
    late = LateOrders(world)
    request, _ = promised(world)
    first(world, late, request)
    world.scheduler.side.ranks.requests.clear()
    tokens, wrong = ask_again(world, late, request)
    assert tokens == WHOLE
    assert wrong == list(range(WHOLE))


def test_a_load_that_was_reset_in_flight_is_the_last(make_world: Make) -> None:
    """If a request was reset while its load was in flight, no second load is promised to it. The first load ends while
    the request is looked up again. Late messages about the first load could make the rank report a failing second load
    as done.
    """
    faults = Faults(STALL, OpKind.H2D, times=1)
    world = stored(make_world, movers=faults)
    late = LateOrders(world)
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert world.worker.get_finished([], [900]) == ([], [])
    assert faults.mover.wait_stalled(1, LONG_S)
    late.hold()
    world.scheduler.request_reset(request)
    faults.mover.release()
    ends_s = time.monotonic() + LONG_S
    while world.worker.get_finished([], [])[1] != [900]:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    assert ask_again(world, late, request) == (0, [])
    late.let_through()
    end(world, request)
    world.check()


def test_a_request_whose_load_failed_is_promised_no_other(make_world: Make) -> None:
    """If a request's load failed, no other load is promised to it. The engine still waits for the first load, until the
    request is cancelled. Meanwhile another request has stored the page again.
    """
    world = stored(make_world, movers=Faults(FAIL, OpKind.H2D, times=1))
    late = LateOrders(world)
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    for _ in range(20):
        assert world.worker.get_finished([], [900] if _ == 0 else []) == ([], [])
        time.sleep(0.001)
    world.serve_beside(PROMPT)
    assert ask_again(world, late, request) == (0, [])
    end(world, request)
    assert world.hit(world.serve(PROMPT)) == WHOLE


def test_a_request_that_was_loaded_well_may_load_again(make_world: Make) -> None:
    """If a request's load succeeded, a second load may be promised to it, as after a pause. Every rank has completed
    the first order, so the second order cannot be mistaken for the first.
    """
    world = stored(make_world)
    late = LateOrders(world)
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert ask_named(world) == [900]
    for block in blocks:
        world.executor.pool.words[block] = 0
    world.scheduler.request_reset(request)
    late.hold()
    assert ask_again(world, late, request) == (WHOLE, [])
    assert not world.scheduler.request_finished(request, blocks)


def ask_named(world: World) -> list[int]:
    """Names the load to the rank. Waits until the rank has returned the load's id and the scheduler knows that the load
    has ended.
    """
    loaded: list[int] = world.worker.get_finished([], [900])[1]
    ends_s = time.monotonic() + LONG_S
    while not loaded or world.scheduler.side.ranks.requests[900].load:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
        loaded += world.worker.get_finished([], [])[1]
    return loaded
