"""Large pools keep some slots free (the reserve). Some blocks must not be evicted to fill the reserve."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import CacheListener, GroupSpec, ManagerLimits
from flexkv.cache.ledger.hub import REFILL_PAGES, RESERVE_FROM_SLOTS, RESERVE_MAX_PAGES, reserve_pages
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpResult, OpStatus, TransferGraph

NONE = np.empty(0, np.int32)
SLOTS = RESERVE_FROM_SLOTS


class Recorder(CacheListener):
    def __init__(self) -> None:
        self.evicted: list[bytes] = []

    def on_evict(self, group: int, keys: Keys) -> None:
        self.evicted += [bytes(key) for key in keys]


def keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def make(slots: int, listener: CacheListener | None = None, groups: int = 1) -> LocalCacheManager:
    manager = LocalCacheManager(
        [GroupSpec(4, slots)] * groups,
        ManagerLimits(),
        tiers=unit_tiers(),
        clock=lambda: 0.0,
        listener=listener,
    )
    for group in range(groups):
        manager.grow(group, slots)
    return manager


def plan(manager: LocalCacheManager, chain: Keys, name: str, group: int = 0) -> TransferGraph:
    graph = manager.begin_store(name, group, chain, np.arange(len(chain), dtype=np.int32), 0).graph
    assert graph is not None
    return graph


def finish(manager: LocalCacheManager, graph: TransferGraph) -> None:
    for op in graph.ops:
        manager.complete(0, OpResult(op.op_id, OpStatus.OK, NONE))
    manager.check_integrity()


@pytest.mark.parametrize(
    ("slots", "kept"),
    [(0, 0), (50, 0), (SLOTS - 1, 0), (SLOTS, 64), (2**20, 2**14), (2**30, RESERVE_MAX_PAGES)],
)
def test_only_large_pools_keep_a_bounded_reserve(slots: int, kept: int) -> None:
    assert reserve_pages(slots) == kept


def test_a_small_pool_is_filled_to_its_last_slot() -> None:
    manager = make(SLOTS - 1)
    finish(manager, plan(manager, keys(SLOTS - 1), "a"))
    assert (manager.free_slots(0), manager.cached_blocks()) == (0, SLOTS - 1)


def test_when_a_store_ends_the_next_ones_slots_are_freed_from_the_oldest_end() -> None:
    recorder = Recorder()
    manager = make(SLOTS, recorder)
    old, young = keys(100), keys(SLOTS - 100, seed=1)
    finish(manager, plan(manager, old, "old"))
    manager.release("old")
    finish(manager, plan(manager, young, "young"))
    kept = reserve_pages(SLOTS)
    assert manager.free_slots(0) == kept
    assert recorder.evicted == [bytes(key) for key in old[: -kept - 1 : -1]]
    assert manager.stats().evicted_blocks == kept
    recorder.evicted.clear()
    manager.begin_store("next", 0, keys(kept, seed=2), np.arange(kept, dtype=np.int32), 0)
    assert recorder.evicted == []
    manager.check_integrity()


def test_the_reserve_takes_neither_leased_nor_unwritten_blocks() -> None:
    manager = make(SLOTS)
    leased, late = keys(SLOTS - 200), keys(190, seed=1)
    finish(manager, plan(manager, leased, "leased"))
    assert manager.match("reader", [leased], 0).blocks == len(leased)
    unwritten = plan(manager, late, "unwritten")
    finish(manager, plan(manager, keys(2, seed=2), "ends"))
    # Only the two blocks whose store has just finished may be evicted.
    assert manager.free_slots(0) == 10 < reserve_pages(SLOTS)
    assert manager.match("again", [leased], 0).blocks == len(leased)
    finish(manager, unwritten)
    assert manager.free_slots(0) == reserve_pages(SLOTS)
    assert manager.match("late", [late], 0).blocks == len(late) - (reserve_pages(SLOTS) - 10)


def test_an_idle_manager_refills_a_bounded_part_each_time() -> None:
    slots = 100 * REFILL_PAGES
    manager = make(slots)
    finish(manager, plan(manager, keys(slots), "a"))
    kept = reserve_pages(slots)
    assert manager.free_slots(0) == kept > REFILL_PAGES
    chain = keys(kept, seed=1)
    graph = plan(manager, chain, "b")
    assert manager.free_slots(0) == 0
    for freed in (REFILL_PAGES, kept):
        manager.expire()
        assert manager.free_slots(0) == freed
    finish(manager, graph)
    assert manager.match("reader", [chain], 0).blocks == kept


def test_an_idle_manager_refills_every_groups_reserve() -> None:
    manager = make(SLOTS, groups=2)
    kept = reserve_pages(SLOTS)
    for group in range(2):
        finish(manager, plan(manager, keys(SLOTS, seed=group), f"a{group}", group))
        assert manager.free_slots(group) == kept
        plan(manager, keys(kept, seed=2 + group), f"b{group}", group)
    manager.expire()
    assert [manager.free_slots(group) for group in range(2)] == [kept, kept]
