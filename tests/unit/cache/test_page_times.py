"""Tests the time to live of single pages (`flexkv.ttl_s`) in host memory, on disk and in the tiers behind the disk, and
how much time a page has left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import CacheListener, GroupSpec, ManagerLimits
from flexkv.cache.ledger.page_times import NOTED_PAGES, REMEMBERED, ExpiredKeys, earlier
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import TierFacts, WriteMode
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.tiers.peer_folders.tier import PeerTier
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys, Rule
from flexkv.observe import Counters, MissReason
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from flexkv.simulation.symbolic_tier import SymbolicTier
from flexkv.simulation.symbolic_volumes import SymbolicVolumes
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.unit.tier_metrics import TierMetrics
from tests.unit.cache import test_gds_stores as gds_stores
from tests.unit.cache.broken_managers import caught_by
from tests.unit.cache.broken_times import BROKEN_TIMES, BROKEN_TIMES_ON_DISK
from tests.unit.cache.disk_world import NONE, DiskWorld, chain, traffic
from tests.unit.cache.test_lookup import tail_of

KEYS = chain(6)
TTL_S = 10


def in_host(slots: int = 8) -> DiskWorld:
    """Returns a world whose disk is never written to, so that pages are only in host memory."""
    return DiskWorld(slots=slots, mode=WriteMode.OFF)


def timed(keys: Keys = KEYS, **kwargs: Any) -> DiskWorld:
    """Returns a world in which `keys` are only on disk, and expire after TTL_S."""
    world = DiskWorld(**kwargs)
    world.store(keys, ttl_s=TTL_S)
    world.run()
    world.drop_host()
    return world


# --- host memory ---


def test_a_page_is_a_miss_once_its_time_is_over() -> None:
    world = in_host()
    world.store(KEYS[:4], ttl_s=TTL_S)
    world.store(KEYS[4:], first=4)
    world.now_s += TTL_S - 1
    assert world.match(KEYS).blocks == 6
    world.manager.release("r")
    world.now_s += 1
    result = world.match(KEYS)
    assert (result.blocks, result.miss) == (0, MissReason.EXPIRED)
    assert world.match(KEYS[4:], "other").blocks == 2, "those without a time stay"


def test_expired_pages_are_counted_and_reported() -> None:
    world, counters = in_host(), Counters()
    metrics, gone = TierMetrics(world.manager), []

    class Hears(CacheListener):
        def on_evict(self, group: int, keys: Keys) -> None:
            gone.extend(keys.tolist())

    world.manager.hub.listeners.append(Hears())
    world.store(KEYS, ttl_s=TTL_S)
    world.now_s += TTL_S
    world.match(KEYS)
    world.manager.release("r")
    metrics.count(counters)
    assert sorted(gone) == sorted(KEYS.tolist())
    assert counters.value("flexkv_expired_pages_total") == 6
    assert counters.value("flexkv_missed_blocks_total", reason="expired") == 6
    assert counters.value("flexkv_evictions_total") == 0


@pytest.mark.parametrize("call", ["present", "known", "expire", "prefetch", "begin_store"])
def test_no_call_finds_an_expired_page(call: str) -> None:
    world = in_host()
    world.store(KEYS, ttl_s=TTL_S)
    world.now_s += TTL_S
    manager = world.manager
    if call == "present":
        assert not manager.present(0, KEYS).any()
    elif call == "known":
        assert not manager.known(0, KEYS).any()
    elif call == "expire":
        assert manager.expire() == 0
    elif call == "prefetch":
        assert manager.prefetch("r", [KEYS]) == 0
    else:
        assert world.store(KEYS) == 0
        assert world.match(KEYS).blocks == 6, "they were stored again"
        return
    assert manager.free_slots(0) == 8
    manager.check_integrity()


def test_expired_pages_leave_before_others_are_evicted() -> None:
    world = in_host(slots=6)
    world.store(KEYS[:3])
    world.store(KEYS[3:], ttl_s=TTL_S)
    world.now_s += TTL_S
    world.store(chain(3, seed=1))
    assert world.match(KEYS[:3]).blocks == 3, "the least recently used pages are still there"


def test_a_promised_page_is_loaded_however_late() -> None:
    world = in_host()
    world.store(KEYS, ttl_s=TTL_S)
    assert world.match(KEYS).blocks == 6
    world.now_s += TTL_S
    assert world.match(KEYS, "other").blocks == 0
    assert world.manager.free_slots(0) == 2, "the promise holds their slots"
    op = world.load(6)
    assert not len(world.end_load(op).failed_blocks)
    assert world.manager.free_slots(0) == 8


def test_a_page_that_expires_while_it_is_being_stored_is_not_published() -> None:
    world = in_host()
    plan = world.manager.begin_store("w", 0, KEYS, np.arange(6, dtype=np.int32), 0, ttl_s=TTL_S)
    assert plan.graph is not None
    world.now_s += TTL_S
    assert not world.manager.known(0, KEYS).any()
    world.load_ended(plan.graph)
    assert world.match(KEYS).blocks == 0
    assert world.manager.free_slots(0) == 8


def test_pages_that_are_cached_keep_the_time_of_their_first_store() -> None:
    world = in_host()
    world.store(KEYS[:2])
    world.store(KEYS[:4], ttl_s=TTL_S)
    world.store(KEYS[:4], ttl_s=10 * TTL_S)
    world.now_s += TTL_S
    assert world.match(KEYS).blocks == 2


def test_a_page_stored_again_without_a_time_stays() -> None:
    world = in_host()
    world.store(KEYS, ttl_s=TTL_S)
    world.drop_host()
    world.store(KEYS)
    world.now_s += TTL_S
    assert world.match(KEYS).blocks == 6


def test_a_slot_does_not_pass_its_time_on() -> None:
    world = in_host(slots=6)
    world.store(KEYS, ttl_s=TTL_S)
    world.store(chain(6, seed=1))
    world.now_s += TTL_S
    assert world.match(chain(6, seed=1)).blocks == 6


def test_a_tail_expires() -> None:
    world = in_host()
    tail = tail_of([3, 2], 7, base=2)
    world.store(KEYS[:2])
    world.store(np.ascontiguousarray(tail.keys[:1]), first=2, tokens=3, ttl_s=TTL_S)
    assert world.manager.match("r", [KEYS[:2]], 0, [tail]).tail_tokens == 3
    world.manager.release("r")
    world.now_s += TTL_S
    match = world.manager.match("r", [KEYS[:2]], 0, [tail])
    assert (match.blocks, match.tail_tokens) == (2, 0)


def test_windows_expire() -> None:
    world = DiskWorld(mode=WriteMode.OFF, groups=(GroupSpec(4, 8), GroupSpec(4, 8, Rule.WINDOW, 2)))
    window = chain(6, seed=1)
    world.store(KEYS)
    world.store(window, group=1, ttl_s=TTL_S)
    assert world.manager.match("r", [KEYS, window], 0).blocks == 6
    world.manager.release("r")
    world.now_s += TTL_S
    match = world.manager.match("r", [KEYS, window], 0)
    assert (match.blocks, match.miss) == (0, MissReason.EXPIRED)


def test_a_reset_forgets_times() -> None:
    world = in_host()
    world.store(KEYS, ttl_s=TTL_S)
    world.manager.reset()
    world.store(KEYS)
    world.now_s += TTL_S
    assert world.match(KEYS).blocks == 6


def test_notes_of_pages_that_have_left_are_bounded() -> None:
    manager = LocalCacheManager((GroupSpec(4, 64),), ManagerLimits(), tiers=unit_tiers(), unix_s=lambda: 1.0)
    manager.grow(0, 64)
    times = manager.hub.times
    for number in range(2 * NOTED_PAGES // 64):
        keys = chain(64, seed=number)
        plan = manager.begin_store("w", 0, keys, np.arange(64, dtype=np.int32), 0, ttl_s=100 + number % 7)
        assert plan.graph is not None
        manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, NONE))
        assert times._pages <= NOTED_PAGES + 3 * 64
    assert times._pages >= 64
    assert sum(len(keys) for noted in times._noted.values() for _, keys in noted) == times._pages


# --- disk, and tiers behind it ---


def test_a_page_on_disk_expires() -> None:
    world = timed()
    world.now_s += TTL_S - 1
    assert world.hits(KEYS) == 6
    world.drop_host()
    world.now_s += 1
    result = world.match(KEYS)
    assert (result.blocks, result.reads, result.miss) == (0, 0, MissReason.EXPIRED)
    assert world.tier.counts.expired == 6
    assert world.disk.journal == [{}]


def test_a_page_brings_its_time_back_from_disk() -> None:
    world = timed()
    assert world.hits(KEYS) == 6
    world.now_s += TTL_S
    assert world.match(KEYS).blocks == 0, "host memory had them without their time"


def test_a_page_that_expires_while_it_is_read_is_a_miss() -> None:
    world = timed()
    assert world.match(KEYS).reads == 1
    world.now_s += TTL_S
    world.run()
    assert world.match(KEYS).blocks == 0


def test_a_time_survives_the_process() -> None:
    world = DiskWorld(disk=SymbolicVolumes.reopened(timed().disk))
    assert world.hits(KEYS) == 6
    world.now_s += TTL_S
    assert world.match(KEYS).blocks == 0
    late = DiskWorld(disk=SymbolicVolumes.reopened(timed().disk))
    late.now_s += TTL_S
    assert late.hits(KEYS) == 0


def test_the_disks_own_time_bounds_it() -> None:
    world = timed(limits=traffic(ttl_s=4))
    world.now_s += 4
    assert world.hits(KEYS) == 0
    longer = timed(limits=traffic(ttl_s=100))
    longer.now_s += TTL_S
    assert longer.hits(KEYS) == 0


def test_pages_whose_time_is_the_disks_alone_stay_in_host_memory() -> None:
    world = DiskWorld(limits=traffic(ttl_s=TTL_S))
    world.store(KEYS)
    world.run()
    world.drop_host()
    assert world.hits(KEYS) == 6
    world.now_s += TTL_S
    assert world.hits(KEYS) == 6


def test_a_straight_load_is_not_promised_what_has_expired() -> None:
    world = timed(limits=traffic(gds_loads=GdsUse.ALWAYS))
    assert world.look(KEYS).blocks == 6
    world.manager.release("r")
    world.now_s += TTL_S
    assert world.look(KEYS).blocks == 0


def test_what_a_request_stores_that_it_has_loaded_expires_with_its_source() -> None:
    world = timed(limits=traffic(gds_loads=GdsUse.ALWAYS))
    assert world.look(KEYS).blocks == 6
    world.end_load(world.load(6))
    world.store(KEYS, "r")
    world.now_s += TTL_S
    assert world.look(KEYS, "other").blocks == 0


def test_a_straight_store_keeps_its_time() -> None:
    world = gds_stores.make_world()
    planned = world.manager.begin_store("w", 0, KEYS, np.arange(6, dtype=np.int32), 0, ttl_s=TTL_S)
    assert planned.graph is not None
    gds_stores.stripes(world, planned.graph.ops[0])
    (seal,) = gds_stores.seals(world)
    gds_stores.end_seal(world, seal)
    assert world.look(KEYS).blocks == 6
    world.manager.release("r")
    world.now_s += TTL_S
    assert world.look(KEYS).blocks == 0
    assert {row[3] for row in world.disk.journal[0].values()} <= {1000 + TTL_S}


def test_pages_of_peers_expire_with_their_rows() -> None:
    def peers(context: TierContext) -> PeerTier:
        return PeerTier(context, SymbolicVolumes.reopened(timed().disk), TierFacts("peers"))

    def look_at(now_s: list[float]) -> tuple[LocalCacheManager, int]:
        tiers = [*unit_tiers(), peers]
        manager = LocalCacheManager(
            (GroupSpec(4, 8),), ManagerLimits(), tiers=tiers, clock=lambda: 0.0, unix_s=lambda: now_s[0]
        )
        manager.grow(0, 8)
        return manager, manager.match("r", [KEYS], 0).reads

    assert look_at([1000.0 + TTL_S])[1] == 0
    now_s = [1000.0]
    manager, reads = look_at(now_s)
    assert reads == 1
    ((_, graph),) = manager.work.take_planned()
    manager.work.complete(OpResult(graph.ops[0].op_id, OpStatus.OK, NONE))
    assert manager.match("r", [KEYS], 0).blocks == 6
    manager.release("r")
    now_s[0] += TTL_S
    assert manager.match("r", [KEYS], 0).blocks == 0


def test_expired_pages_on_disk_leave_before_others_are_evicted() -> None:
    world = DiskWorld(slots=16, places=12)
    world.store(KEYS, ttl_s=TTL_S)
    old = chain(6, seed=1)
    world.store(old)
    world.run()
    world.drop_host()
    world.now_s += TTL_S
    world.store(chain(6, seed=2))
    world.run()
    world.drop_host()
    assert world.hits(old) == 6
    assert world.tier.counts.evicted == 0


def test_expired_pages_on_disk_leave_although_nobody_asks() -> None:
    world = timed()
    world.now_s += TTL_S
    world.tier.poll(0.0)
    assert (len(world.tier), world.tier.counts.expired, world.disk.journal) == (0, 6, [{}])


def test_groups_that_share_places_expire_apart() -> None:
    groups = (GroupSpec(4, 12), GroupSpec(4, 12, shares=0))
    other = chain(6, seed=1)
    world = DiskWorld(groups=groups)
    world.store(KEYS, ttl_s=TTL_S)
    world.store(other, group=1, ttl_s=2 * TTL_S)
    world.run()
    world.drop_host()
    world.now_s += TTL_S
    world.tier.poll(0.0)
    assert [len(world.tier.leading(group, keys)) for group, keys in enumerate((KEYS, other))] == [0, 6]


def test_a_tier_that_keeps_no_times_gets_no_page_that_expires() -> None:
    """A page with a time to live is not written to a tier that keeps no expiry, because this tier would serve the page
    for ever. One such tier is a store that machines share.
    """
    assert not SymbolicTier.keeps_times
    world = DiskWorld()
    world.tier.keeps_times = False
    world.store(KEYS[:3], ttl_s=TTL_S)
    world.store(KEYS[3:], first=3)
    world.run()
    assert len(world.disk.journal[0]) == 3
    assert world.tier.counts.dropped_writes == 0


@pytest.mark.parametrize("mode", [WriteMode.EVICT, WriteMode.BACK])
def test_pages_that_leave_host_memory_are_written_with_their_time(mode: WriteMode) -> None:
    world = DiskWorld(mode=mode)
    world.store(KEYS, ttl_s=TTL_S)
    world.queue.offer_all()
    world.queue.flush()
    world.run()
    world.drop_host()
    assert world.hits(KEYS) == 6
    world.drop_host()
    world.now_s += TTL_S
    assert world.hits(KEYS) == 0


# --- single functions ---


def test_the_earlier_of_two_times() -> None:
    one = np.array([0, 0, 5, 5, 5], np.uint64)
    other = np.array([0, 7, 0, 7, 3], np.uint64)
    assert earlier(one, other).tolist() == [0, 7, 5, 5, 3]
    assert earlier(one, 4).tolist() == [4, 4, 4, 4, 4]
    assert earlier(one, 0).tolist() == one.tolist()


def test_the_last_expired_keys_are_remembered() -> None:
    expired, many = ExpiredKeys(), chain(REMEMBERED + 10, seed=4)
    assert not expired.holds(many[:1])
    expired.add(many[:20])
    expired.add(many[20:])
    assert not expired.holds(many[9:10])
    assert expired.holds(many[10:11])
    assert expired.holds(many[-1:])


# --- simulations against the model ---


def configs(disk: bool) -> Iterator[SimulationConfig]:
    for seed in range(6):
        yield SimulationConfig(
            seed=seed,
            steps=4_000,
            groups=(GroupSpec(4, 14 if disk else 40),),
            ttl_s=5,
            ranks=1 + seed % 2,
            disk_places=(24, 48)[seed % 2] if disk else 0,
            disk_mode=(WriteMode.THROUGH, WriteMode.EVICT)[seed % 4 // 2],
            gds_loads=disk and seed % 3 == 1,
            stream=disk and seed % 3 == 2,
            integrity_every=0,
        )


@pytest.mark.parametrize("disk", [False, True])
def test_no_rule_is_broken(disk: bool) -> None:
    for config in configs(disk):
        report = Simulation(dataclasses.replace(config, integrity_every=10)).run()
        assert report.stats.expired_blocks > 5
        assert report.verified_pages > 20


@pytest.mark.parametrize("groups", [(GroupSpec(4, 30), GroupSpec(4, 30, Rule.WINDOW, 2))])
def test_no_rule_is_broken_with_windows(groups: tuple[GroupSpec, ...]) -> None:
    config = SimulationConfig(seed=1, steps=4_000, groups=groups, ttl_s=5, disk_places=40)
    assert Simulation(config).run().stats.expired_blocks > 5


@pytest.mark.parametrize("manager_class", BROKEN_TIMES, ids=lambda c: c.__name__)
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(configs(disk=False), manager_class)


@pytest.mark.parametrize("manager_class", BROKEN_TIMES_ON_DISK, ids=lambda c: c.__name__)
def test_a_broken_manager_with_a_disk_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(configs(disk=True), manager_class)


def test_the_real_manager_passes_where_the_broken_ones_fail() -> None:
    for disk in (False, True):
        assert caught_by(configs(disk), LocalCacheManager) == ""
