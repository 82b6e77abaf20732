"""Tests the outcome of a lookup, the reason why the lookup promises no more, and how both are counted."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import ManagerLimits, Outcome, TailCandidates
from flexkv.cache.ledger.requests import MOST_MISSES
from flexkv.cache.manager import LocalCacheManager
from flexkv.observe import Counters, MissReason
from flexkv.transfer.graph import OpStatus
from flexkv.unit.tier_metrics import STATS, TierMetrics
from tests.unit.cache.disk_world import DiskWorld, chain, traffic
from tests.unit.cache.host_world import keys, make, store
from tests.unit.cache.test_load_tries import fail_a_load


def missed(manager: LocalCacheManager) -> dict[MissReason, int]:
    return manager.stats().missed


def on_disk_alone(blocks: int, **settings: object) -> DiskWorld:
    world = DiskWorld(**settings)  # type: ignore[arg-type]
    world.store(chain(blocks), "w")
    world.run()
    world.drop_host()
    return world


def test_a_hit_and_what_follows_it() -> None:
    manager, whole = make(), keys(6)
    store(manager, whole[:4])
    result = manager.match("r", [whole], 0)
    assert (result.outcome, result.miss, result.blocks) == (Outcome.HIT, MissReason.ABSENT, 4)
    result = manager.match("r", [whole[:4]], 0)
    assert (result.outcome, result.miss) == (Outcome.HIT, None)
    result = manager.match("r", [keys(3, seed=9)], 0)
    assert (result.outcome, result.miss) == (Outcome.MISS, MissReason.ABSENT)


def test_a_miss_counts_once_when_it_is_acted_on_with_the_last_answer() -> None:
    manager, whole = make(), keys(6)
    for _ in range(5):
        assert manager.match("r", [whole], 0).miss is MissReason.ABSENT
    assert missed(manager) == {}
    store(manager, whole[:4])
    manager.match("r", [whole], 0)
    assert manager.begin_load("r", [np.arange(4, dtype=np.int32)]) is not None
    assert missed(manager) == {MissReason.ABSENT: 2}
    manager.end_request("r")
    assert missed(manager) == {MissReason.ABSENT: 2}


def test_what_was_found_in_the_end_is_no_miss() -> None:
    manager, whole = make(), keys(4)
    manager.match("r", [whole], 0)
    store(manager, whole)
    assert manager.match("r", [whole], 0).outcome is Outcome.HIT
    manager.release("r")
    assert missed(manager) == {}


def test_a_lookup_of_the_tail_after_a_hit_keeps_what_was_missed() -> None:
    manager, whole = make(), keys(6)
    store(manager, whole[:4])
    manager.match("r", [whole], 0)
    tail = TailCandidates(keys(2, seed=5), np.array([1, 2], np.int32), 4)
    result = manager.match("r", [whole[:4]], 0, [tail])
    assert (result.outcome, result.blocks, result.tail_tokens) == (Outcome.HIT, 4, 0)
    manager.release("r")
    assert missed(manager) == {MissReason.ABSENT: 2}


def test_ids_whose_end_nobody_tells_are_bounded() -> None:
    manager, wanted = make(), keys(1)
    for number in range(MOST_MISSES + 5):
        manager.match(f"r{number}", [wanted], 0)
    assert len(manager.tables.requests.misses) == MOST_MISSES
    manager.release("r0")
    manager.release(f"r{MOST_MISSES + 4}")
    assert missed(manager) == {MissReason.ABSENT: 1}, "the oldest was dropped"


def test_a_copy_of_the_totals_does_not_change() -> None:
    manager = make()
    before = manager.stats()
    manager.match("r", [keys(2)], 0)
    manager.release("r")
    assert (before.missed, missed(manager)) == ({}, {MissReason.ABSENT: 2})


def test_a_disabled_manager() -> None:
    manager, whole = make(), keys(4)
    store(manager, whole)
    manager.disable()
    assert manager.match("r", [whole], 0).miss is MissReason.OFF


def test_after_a_failed_load_of_its_own() -> None:
    manager, whole = make(), keys(6)
    store(manager, whole)
    assert fail_a_load(manager, whole, [4]) == 6
    store(manager, whole[4:5], "other", 4)
    result = manager.match("r", [whole], 0)
    assert (result.outcome, result.miss, result.blocks) == (Outcome.HIT, MissReason.FAILED_LOAD, 4)
    assert manager.match("another", [whole], 0).miss is None


def test_after_a_failed_load_of_another_request_whose_pages_are_still_there() -> None:
    manager, whole = make(rest_s=60.0), keys(6)
    store(manager, whole)
    assert fail_a_load(manager, whole, [], status=OpStatus.CANCELLED) == 6
    result = manager.match("another", [whole], 0)
    assert (result.outcome, result.miss) == (Outcome.MISS, MissReason.FAILED_LOAD)


def test_a_promise_that_the_queue_of_loads_cuts() -> None:
    manager, whole = make(inflight_load_pages=4), keys(6)
    store(manager, whole)
    result = manager.match("r", [whole], 0)
    assert (result.outcome, result.miss, result.blocks) == (Outcome.HIT, MissReason.QUEUE_FULL, 4)


def test_what_is_being_read_comes_and_then_is_a_hit() -> None:
    world = on_disk_alone(4)
    result = world.look(chain(4), "r")
    assert (result.outcome, result.miss, result.reads) == (Outcome.COMING, None, 1)
    assert not result.is_final
    world.run()
    result = world.look(chain(4), "r")
    assert (result.outcome, result.miss, result.blocks) == (Outcome.HIT, None, 4)


@pytest.mark.parametrize("looks_again", [False, True])
def test_a_tier_that_is_waited_for_too_long(looks_again: bool) -> None:
    world = on_disk_alone(4, limits=traffic(wait_s=5.0))
    world.look(chain(4), "r")
    world.now_s += 6.0
    if looks_again:
        result = world.look(chain(4), "r")
        assert (result.outcome, result.miss) == (Outcome.MISS, MissReason.LATE)
    world.manager.release("r")
    assert missed(world.manager) == {MissReason.LATE: 4}
    world.run()


def test_what_the_engine_computes_sooner() -> None:
    world = on_disk_alone(4)
    cost = world.manager.cost
    for step in range(8):
        cost.compute.see(1000, 1e-6, world.now_s)
        cost.fetch(1).see(step + 1, 10.0 * (step + 1), world.now_s)  # type: ignore[arg-type]
        cost.load.see(step + 1, 1e-6 * (step + 1), world.now_s)
    result = world.look(chain(4), "r")
    assert (result.outcome, result.miss) == (Outcome.MISS, MissReason.COMPUTED_SOONER)


def test_room_that_does_not_come() -> None:
    world = on_disk_alone(
        4, slots=8, manager_limits=ManagerLimits(asks_again=True), limits=traffic(wait_s=2.0)
    )
    world.store(chain(8, seed=99), "b")
    world.run()
    assert world.look(chain(8, seed=99), "b").blocks == 8
    assert world.look(chain(4), "r").outcome is Outcome.ASK_AGAIN
    for _ in range(20):
        world.now_s += 0.5
        if not world.manager.still_waits("r"):
            break
    result = world.look(chain(4), "r")
    assert (result.outcome, result.miss) == (Outcome.MISS, MissReason.NO_ROOM)


def test_metrics_have_every_total_and_every_reason() -> None:
    manager, whole, counters = make(), keys(6), Counters()
    metrics = TierMetrics(manager)
    store(manager, whole[:4])
    manager.match("r", [whole], 0)
    manager.release("r")
    metrics.count(counters)
    metrics.count(counters)
    assert counters.value("flexkv_missed_blocks_total", reason="absent") == 2
    assert counters.value("flexkv_manager_blocks_total", event="promised") == 4
    assert counters.value("flexkv_manager_pages_total", event="stored") == 4
    assert counters.value("flexkv_manager_events_total", event="lookup") == 1


def test_no_total_of_a_manager_is_left_without_a_metric() -> None:
    elsewhere = {"evicted_blocks", "expired_blocks", "streamed_pages", "expired_leases", "resets", "missed"}
    assert set(STATS) | elsewhere == set(make().stats().__dataclass_fields__)
