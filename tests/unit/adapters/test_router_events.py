"""A router that knows only KV events predicts the served tokens exactly, even after evictions, dropped pages and
resets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.soak import soak_factor
from tests.unit.adapters.router_world import HOST_SLOTS, Router, World
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS

Make = Callable[..., World]
REQUESTS = 300


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Make]:
    worlds: list[World] = []

    def make(misses_one: bool = False, **settings: Any) -> World:
        worlds.append(World(tmp_path, Router(misses_one), **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["through", "back", "evict"])
def test_a_router_predicts_what_is_served(make_world: Make, mode: str) -> None:
    world = make_world(**{"disk.mode": mode})
    hits = 0
    for _ in range(REQUESTS * soak_factor()):
        predicted, served = world.serve_one()
        assert predicted == served
        hits += served > 0
        world.disturb()
    assert hits > REQUESTS / 4
    assert world.router.removals > REQUESTS / 4


def test_control_a_removal_that_is_not_heard_is_seen(make_world: Make) -> None:
    world = make_world(misses_one=True)
    wrong = 0
    for _ in range(REQUESTS):
        predicted, served = world.serve_one()
        wrong += predicted != served
    assert wrong


def test_what_lay_on_disks_that_are_out_of_use_is_not_predicted(make_world: Make) -> None:
    world = make_world()
    for _ in range(20):
        world.serve_one()
    world.settle()
    assert world.router.has["STORAGE"] - world.router.has["CPU"]
    disks = world.engine.unit.own_disks
    assert disks is not None
    disks.go_down("the test says so")
    world.settle()
    assert not world.router.has["STORAGE"]
    for _ in range(20):
        predicted, served = world.serve_one()
        assert predicted == served


def test_a_unit_that_is_disabled_clears_what_was_announced(make_world: Make) -> None:
    world = make_world()
    for _ in range(5):
        world.serve_one()
    world.settle()
    assert world.router.has["CPU"]
    (worker,) = world.engine.workers
    worker._ops.refusal = "the test says so"
    world.engine.step({})
    world.settle()
    assert world.engine.unit.reason
    assert world.router.has == {"CPU": set(), "STORAGE": set()}
    for _ in range(5):
        assert world.serve_one() == (0, 0)
    world.settle()
    assert world.router.has == {"CPU": set(), "STORAGE": set()}


def test_a_block_on_both_media_is_announced_for_each_and_leaves_each(
    make_world: Make,
) -> None:
    world = make_world()
    request = world.request()
    world.engine.run(request)
    world.settle()
    blocks = {maybe_convert_block_hash(each) for each in request.block_hashes}
    assert world.router.has == {"CPU": blocks, "STORAGE": blocks}
    slots = world.engine.counters.value("flexkv_disk_slots")
    assert world.engine.counters.value("flexkv_disk_capacity_tokens") == BLOCK_TOKENS * slots > 0
    world.engine.unit.manager.hub.evict(0, HOST_SLOTS)
    world.settle()
    assert world.router.has == {"CPU": set(), "STORAGE": blocks}
    world.engine.unit.manager.forget(0, world.engine.keys_of(request))
    world.settle()
    assert world.router.has == {"CPU": set(), "STORAGE": set()}
