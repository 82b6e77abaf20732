"""The engine hands back a promise, completely or in part, before or during the promised load."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.tensorrt_llm.requests import blocks_of, still_wanted, tokens_of
from flexkv.errors import TransferError
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.pool import GARBAGE
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    SHAPE,
    WHOLE,
    Make,
    World,
    promised,
    stalled_load,
    steps,
    stored,
)
from tests.unit.transfer.transfer_world import FAIL

BLOCKS = WHOLE // SHAPE.tokens
ALL = list(range(BLOCKS))
CASES: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([(0, WHOLE)], []),
    ([(0, 1000)], []),
    ([(0, 8)], [2, 3, 4, 5, 6]),
    ([(20, WHOLE)], [0, 1, 2, 3, 4]),
    # If a block is handed back only in part, it is still loaded.
    ([(0, 10)], [2, 3, 4, 5, 6]),
    ([(22, WHOLE)], [0, 1, 2, 3, 4, 5]),
    ([(20, WHOLE), (0, 8)], [2, 3, 4]),
    ([(0, 8), (20, WHOLE)], [2, 3, 4]),
    ([(0, 16), (16, WHOLE)], []),
    # If two ranges that are handed back meet inside a block, the complete block is handed back.
    ([(0, 10), (10, WHOLE)], []),
    ([(10, WHOLE), (0, 10)], []),
    ([(0, 10), (8, WHOLE)], []),
    ([(0, 9), (11, WHOLE)], [2]),
    ([(0, 5), (0, 9), (23, WHOLE)], [2, 3, 4, 5]),
    ([(WHOLE, 40)], ALL),
    ([(8, 8)], ALL),
]
"""Token ranges that are handed back one after another, and the blocks that are then still loaded."""


def names(world: World, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
    """Passes the ids to the worker, then polls until the worker returns at least one id."""
    ends_s = time.monotonic() + LONG_S
    found: tuple[list[int], list[int]] = world.worker.get_finished(saving, loading)
    while not found[0] + found[1]:
        assert time.monotonic() < ends_s, "nothing comes back"
        time.sleep(0.001)
        found = world.worker.get_finished([], [])
    return found


def filled(world: World, request: Request) -> list[int]:
    """Returns the indexes of the request's blocks that hold the right numbers. Checks that all other blocks still hold
    garbage.
    """
    truth = world.executor.pool.truth(request, 0, WHOLE)
    found = []
    for ordinal, block in enumerate(request.blocks[:BLOCKS]):
        first = ordinal * SHAPE.tokens
        expected = truth[:, :, :, first : first + SHAPE.tokens]
        if np.array_equal(world.executor.pool.words[block], expected):
            found.append(ordinal)
        else:
            assert (world.executor.pool.words[block] == GARBAGE).all(), f"block {ordinal} was written in part"
    return found


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(("ranges", "loaded"), CASES)
def test_what_is_handed_back_is_not_written(
    make_world: Make, mode: str, ranges: list[tuple[int, int]], loaded: list[int]
) -> None:
    """A load does not write to the blocks that the engine has handed back. The engine hands back the part of a promise
    that it has meanwhile found in its own cache, and other requests may read these blocks.
    """
    world = stored(make_world, {"FLEXKV_LOAD_MODE": mode})
    request, blocks = promised(world)
    for start, end in ranges:
        world.scheduler.cancel_load(request, start, end)
    manager = world.scheduler.side.ranks.unit.manager
    assert (manager.leased_pages("900") == 0) == (not loaded)
    world.scheduler.update_state_after_alloc(request, blocks)
    if mode == "async":
        assert names(world, [], [900]) == ([], [900]), "it is returned also where nothing is left of it"
    else:
        nothing = SimpleNamespace(new_requests=[], cached_requests=[])
        world.worker.bind_connector_meta(world.scheduler.build_connector_meta(nothing))
        world.worker.start_load_kv(None)
    assert filled(world, request) == loaded
    world.scheduler.side.ranks.poll()
    assert manager.inflight_ops() == 0
    assert manager.leased_pages("900") == 0
    manager.check_integrity()


@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("kept", [0, 12, 16])
def test_an_engine_that_takes_a_part_computes_the_rest(
    make_world: Make, mode: str, chunk: int, kept: int
) -> None:
    world = stored(make_world, {"FLEXKV_LOAD_MODE": mode}, chunk=chunk)
    world.executor.kept = lambda tokens: kept
    for tail in range(3):
        world.request([*PROMPT, tail])
    world.executor.run()
    assert world.executor.calls["cancel_load"] == 3
    assert list(world.executor.loaded.values())[-3:] == [kept] * 3
    world.executor.kept = lambda tokens: tokens
    assert world.hit(world.serve([*PROMPT, 0])) == WHOLE
    world.check()


def test_an_offer_taken_back_whole_leaves_nothing_behind(make_world: Make) -> None:
    """After the engine has handed a complete promise back and computed the prompt, no record of the promise is left.
    The engine may still name the promised load to the rank and wait for it.
    """
    world = stored(make_world)
    world.executor.kept = lambda tokens: 0
    for _ in range(3):
        world.serve(PROMPT)
    side = world.worker.side
    assert (side._load_orders, side._save_orders, side._cancelled) == ({}, {}, set())
    request, blocks = promised(world)
    world.scheduler.cancel_load(request, 0, WHOLE)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert world.scheduler.request_finished(request, blocks)
    saved, loaded = names(world, [900], [900])
    while not saved or not loaded:
        more = names(world, [], [])
        saved, loaded = saved + more[0], loaded + more[1]
    assert (saved, loaded) == ([900], [900])
    assert (side._load_orders, side._save_orders, side._cancelled) == ({}, {}, set())
    world.executor.free += blocks
    world.check()


def test_a_load_in_flight_is_taken_back_whole(make_world: Make) -> None:
    world, request, faults = stalled_load(make_world)
    world.scheduler.cancel_load(request, 0, WHOLE)
    steps(world)
    assert request.state == "loading", "bytes may still arrive: the blocks stay"
    world.executor.cancel(request)
    faults.mover.release()
    world.executor.run()
    world.check()


def test_a_load_of_which_a_part_is_taken_back_is_still_awaited(make_world: Make) -> None:
    """If the engine hands back a part of a load that fails, the rank does not report the load as done until the rest is
    handed back. The engine counts the rest as loaded when the rank returns the load's id, so an early report would make
    it use blocks whose load failed.
    """
    world = stored(make_world, movers=Faults(FAIL, OpKind.H2D, times=1))
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    world.scheduler.cancel_load(request, 20, WHOLE)
    assert world.worker.get_finished([], [900]) == ([], [])
    for _ in range(20):
        assert world.worker.get_finished([], []) == ([], []), "it failed"
        time.sleep(0.001)
    world.scheduler.cancel_load(request, 0, WHOLE)
    assert names(world, [], []) == ([], [900])


def test_a_load_in_flight_that_is_taken_back_in_two_pieces_is_awaited_no_more(make_world: Make) -> None:
    """When the engine has handed back all of a load in flight in two ranges, the rank returns the load's id although
    the load failed. The two ranges meet inside a block.
    """
    world = stored(make_world, movers=Faults(FAIL, OpKind.H2D, times=1))
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    world.scheduler.cancel_load(request, 0, 10)
    assert world.worker.get_finished([], [900]) == ([], [])
    for _ in range(20):
        assert world.worker.get_finished([], []) == ([], []), "it failed"
        time.sleep(0.001)
    world.scheduler.cancel_load(request, 10, WHOLE)
    assert names(world, [], []) == ([], [900])


def test_a_promise_outlives_its_lease(make_world: Make) -> None:
    """A promise is kept after its lease has expired, because the engine may keep a promise for many steps before it has
    memory for the blocks.
    """
    world = stored(make_world, {"FLEXKV_LOAD_LEASE_S": "0.001"})
    request, blocks = promised(world)
    manager = world.scheduler.side.ranks.unit.manager
    expire(manager)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert names(world, [], [900]) == ([], [900])
    assert filled(world, request) == ALL


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_promise_whose_pages_are_gone_is_not_kept_in_silence(make_world: Make, mode: str) -> None:
    world = stored(make_world, {"FLEXKV_LOAD_LEASE_S": "0.001", "FLEXKV_LOAD_MODE": mode})
    request, blocks = promised(world)
    manager = world.scheduler.side.ranks.unit.manager
    expire(manager)
    manager.reset()
    with pytest.raises(TransferError, match=r"promise of 7 blocks.*load\.lease_s"):
        world.scheduler.update_state_after_alloc(request, blocks)
    assert manager.leased_pages("900") == 0
    manager.check_integrity()


def expire(manager: Any) -> None:
    ends_s = time.monotonic() + LONG_S
    while manager.leased_pages("900"):
        assert time.monotonic() < ends_s
        time.sleep(0.002)
        manager.expire()


def test_an_engine_with_memory_for_less_than_it_was_promised(make_world: Make) -> None:
    """If the engine provides fewer blocks than were promised, only these blocks are loaded. The engine provides blocks
    for the first chunk, and computes the tokens after them.
    """
    world = stored(make_world, {"FLEXKV_LOAD_MODE": "sync"})
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks[:3])
    said = SimpleNamespace(request_id=900, computed_position=0, num_scheduled_tokens=4)
    batch = SimpleNamespace(new_requests=[said], cached_requests=[])
    world.worker.bind_connector_meta(world.scheduler.build_connector_meta(batch))
    world.worker.start_load_kv(None)
    assert filled(world, request) == [0, 1, 2]
    assert world.scheduler.side.ranks.requests[900].computed == 12


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [(0, 12, []), (4, 8, []), (4, 6, [1]), (6, 8, [1]), (5, 7, [1]), (0, 5, [1]), (8, 20, [1]), (6, 6, [1])],
)
def test_blocks_that_are_left_of_one(start: int, end: int, left: list[int]) -> None:
    assert list(blocks_of(still_wanted(tokens_of(range(1, 2), 4), start, end), 4)) == left
