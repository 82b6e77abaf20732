"""Prefetches are fetches that begin before the engine first looks up a request. They promise nothing, and take no host
slots that requests wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.errors import ConfigError
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.request_settings import NO_SETTINGS
from flexkv.simulation.run import Simulation
from flexkv.transfer.graph import OpKind
from tests.unit.cache.broken_managers import caught_by
from tests.unit.cache.disk_world import (
    BLOCK_TOKENS,
    DiskWorld,
    blocks_by_tier,
    chain,
    traffic,
    two_groups,
    written,
)
from tests.unit.cache.host_world import make
from tests.unit.cache.test_disk_simulation import narrow_configs

SLOTS = 32


def begin(world: DiskWorld, keys: Keys, name: str = "r", start: int = 0) -> int:
    """Begins a prefetch, and checks that it promises nothing and that no request waits for it."""
    fetches = world.manager.prefetch(name, [keys], start * BLOCK_TOKENS)
    world.manager.check_integrity()
    assert world.manager.leased_pages(name) == 0
    assert not world.manager.waits(name)
    return fetches


def test_what_was_prefetched_is_a_hit_at_once_and_the_disks() -> None:
    keys = chain(8)
    world = written(keys[2:], slots=SLOTS)
    world.store(keys[:2])
    world.run()
    assert begin(world, keys) == 1
    assert world.run() == [OpKind.DISK_READ]
    result = world.match(keys)
    assert (result.blocks, result.reads, blocks_by_tier(result)) == (8, 0, (2, 6))
    assert world.tier.counts.prefetched == 6
    assert world.tier.counts.waits == 0, "the request did not wait"


def test_what_was_prefetched_is_kept_until_the_request_is_looked_up() -> None:
    keys = chain(8)
    world = written(keys, slots=SLOTS)
    begin(world, keys)
    world.run()
    assert world.store(chain(SLOTS, seed=5), name="other") == 8, "eight slots are held for the request"
    assert world.match(keys).blocks == 8
    world.manager.release("r")
    assert world.store(chain(SLOTS, seed=6), name="other") == 0


def test_the_first_lookup_joins_the_prefetch_and_waits_from_then_on() -> None:
    keys = chain(8)
    world = written(keys, slots=SLOTS, limits=traffic(wait_s=5.0))
    begin(world, keys)
    world.now_s += 100
    result = world.match(keys)
    assert (result.blocks, result.reads) == (0, 1), "the time in the queue is not the disk's"
    assert world.manager.waits("r")
    assert world.run() == [OpKind.DISK_READ]
    assert blocks_by_tier(world.match(keys)) == (0, 8)
    assert (world.tier.counts.waits, world.tier.counts.late) == (1, 0)


def test_a_prefetch_that_was_cut_leaves_the_rest_to_the_lookup() -> None:
    keys = chain(8)
    world = written(keys, slots=16)
    assert begin(world, keys) == 1
    (read,) = world.take()
    assert read.pages == 4, "a quarter of the slots"
    world.end(read)
    result = world.match(keys)
    assert (result.blocks, result.reads) == (4, 1)
    world.run()
    assert blocks_by_tier(world.match(keys)) == (0, 8)


def test_what_the_engine_has_itself_is_not_prefetched() -> None:
    keys = chain(8)
    world = written(keys, slots=SLOTS)
    begin(world, keys, start=5)
    (read,) = world.take()
    assert read.pages == 3
    world.end(read)
    assert blocks_by_tier(world.manager.match("r", [keys], 5 * BLOCK_TOKENS)) == (0, 3)


def test_two_requests_share_one_prefetch() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS * 2)
    assert (begin(world, keys, "a"), begin(world, keys, "b")) == (1, 1)
    assert world.run() == [OpKind.DISK_READ]
    assert [world.match(keys, name).blocks for name in "ab"] == [6, 6]
    assert world.tier.counts.prefetched == 6


def test_requests_that_are_prefetched_have_a_bound() -> None:
    keys = chain(4)
    world = written(keys, slots=64, manager_limits=ManagerLimits(prefetch_requests=2))
    assert [begin(world, keys[n:], f"r{n}") > 0 for n in range(3)] == [True, True, False]
    world.match(keys, "r0")
    assert begin(world, keys[2:], "r2") > 0, "one of them was looked up"
    with pytest.raises(ConfigError, match="prefetch_requests=-1"):
        make(prefetch_requests=-1)


def test_without_a_limit_of_requests_nothing_is_prefetched() -> None:
    keys = chain(4)
    world = written(keys, slots=SLOTS, manager_limits=ManagerLimits(prefetch_requests=0))
    assert begin(world, keys) == 0
    assert world.take() == []


def test_prefetches_keep_a_quarter_of_host_memory_at_most() -> None:
    world = written(chain(16), slots=32)
    begin(world, chain(16)[:5], "a")
    begin(world, chain(16)[5:], "b")
    assert [op.pages for op in world.take()] == [5, 3]
    for op in list(world.lane.ops.values()):
        world.end(op)
    assert begin(world, chain(16)[8:], "c") == 0
    assert world.store(chain(32, seed=5), name="other") == 8


@pytest.mark.parametrize(
    ("limits", "pages"), [(traffic(fetch_pages=8), 4), (traffic(fetch_ops=2), 6)], ids=["pages", "ops"]
)
def test_prefetches_leave_room_for_the_reads_of_lookups(limits: DiskTraffic, pages: int) -> None:
    keys, other = chain(6), chain(4, seed=1)
    world = written(keys, slots=64, limits=limits)
    world.store(other)
    world.run()
    world.drop_host()
    begin(world, keys, "waits in the queue")
    assert begin(world, other, "waits too") == 0
    assert world.match(other, "runs").reads == 1
    assert [op.pages for op in world.take()] == [pages, 4]


def test_a_request_that_ends_in_the_queue_gives_its_slots_back() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS)
    begin(world, keys)
    (read,) = world.take()
    world.manager.end_request("r")
    world.end(read)
    assert world.match(keys, "later").blocks == 6, "it came all the same"
    world.manager.release("later")
    assert world.store(chain(SLOTS, seed=3)) == 0


def test_reads_for_requests_that_have_ended_count_until_they_have_come() -> None:
    """A prefetch counts against the limit until its reads have finished, even if its request has ended. Otherwise
    clients that disconnect one after the other could fill host memory with pages that no request waits for.
    """
    keys = chain(16)
    world = written(keys, slots=SLOTS)
    for name in range(8):
        begin(world, keys[2 * name :][:2], f"r{name}")
        world.manager.end_request(f"r{name}")
    assert sum(op.pages for op in world.take()) == SLOTS // 4
    for op in list(world.lane.ops.values()):
        world.end(op)
    assert begin(world, keys[8:10], "later") == 1


def test_what_nobody_looks_up_is_given_back_in_time() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS, limits=traffic(wait_s=5.0))
    begin(world, keys)
    world.run()
    world.now_s += 11
    world.manager.expire()
    assert world.store(chain(SLOTS, seed=3)) == 0
    assert begin(world, keys) == 1, "the request may be prefetched again"


def test_a_reset_ends_prefetches() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS)
    begin(world, keys)
    (read,) = world.take()
    world.manager.reset()
    world.end(read)
    assert world.match(keys).blocks == 0
    world.manager.disable()
    assert begin(world, keys, "other") == 0


def test_what_is_promised_where_it_lies_is_not_prefetched() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS, limits=traffic(gds_loads=GdsUse.ALWAYS))
    assert begin(world, keys) == 0
    assert world.take() == []
    assert blocks_by_tier(world.look(keys)) == (0, 6)


@pytest.mark.parametrize("layers", [True, False], ids=["by layers", "whole"])
def test_what_streams_is_prefetched_as_a_lookup_reads_it(layers: bool) -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS, limits=traffic(streams=True, stream_layers=layers))
    assert begin(world, keys) == 1
    (read,) = world.take()
    assert read.layerwise == layers
    result = world.look(keys)
    assert (result.blocks, result.reads, blocks_by_tier(result)) == (6, 0, (0, 6)), "promised while it comes"
    world.end(read)
    world.load(6)


def test_several_groups_are_prefetched_together() -> None:
    world, keys = two_groups(4)
    # Prefetches may use a quarter of the 16 slots, which is two blocks of each group.
    assert world.manager.prefetch("r", keys, 0) == 2
    assert [op.pages for op in world.take()] == [2, 2]
    for op in list(world.lane.ops.values()):
        world.end(op)
    assert world.manager.match("r", keys, 0).blocks == 2


def test_groups_with_a_window_are_not_prefetched() -> None:
    """No page is prefetched if one of the groups has a window. The pages that a window group needs are known only when
    the end of the hit is known.
    """
    world = DiskWorld(groups=(GroupSpec(4, SLOTS), GroupSpec(4, SLOTS, Rule.WINDOW, 2)))
    keys = [chain(6), chain(6, seed=1)]
    for group in range(2):
        world.store(keys[group], group=group)
    world.run()
    world.drop_host()
    assert world.manager.prefetch("r", keys, 0) == 0


def test_a_prefetch_without_other_tiers_does_nothing() -> None:
    manager = make()
    assert manager.prefetch("r", [chain(3)], 0) == 0
    manager.check_integrity()


def test_a_request_that_has_been_looked_up_is_not_prefetched() -> None:
    keys = chain(6)
    world = written(keys, slots=SLOTS)
    world.match(keys)
    assert world.manager.prefetch("r", [keys], 0) == 0
    assert world.manager.waits("r"), "it waits as before"


# --- controls ---


class PrefetchPromises(LocalCacheManager):
    """A broken manager whose prefetch acts like a lookup. Nothing ends the lease of this lookup."""

    def prefetch(self, request_id: str, keys: Any, start_tokens: int = 0, settings: Any = None) -> int:
        return super().match(request_id, keys, start_tokens).reads


class PrefetchesWithoutBound(LocalCacheManager):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.promises._room_for_prefetch = lambda groups: 1_000_000  # type: ignore[method-assign]


class PrefetchDropsPins(LocalCacheManager):
    """A broken manager that lets prefetched pages be evicted while the read still writes to them."""

    def prefetch(self, request_id: str, keys: Any, start_tokens: int = 0, settings: Any = NO_SETTINGS) -> int:
        fetches = super().prefetch(request_id, keys, start_tokens, settings)
        if fetches:
            for pages in self.tables.requests.waits[request_id].held:
                self.hub.index.unpin(np.repeat(pages.entries, 2))
        return fetches


@pytest.mark.parametrize(
    "manager_class",
    [PrefetchPromises, PrefetchesWithoutBound, PrefetchDropsPins],
    ids=lambda c: c.__name__,
)
def test_a_broken_prefetch_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(), manager_class, 5)


def test_the_simulation_prefetches() -> None:
    reports = [Simulation(config).run() for config in narrow_configs()]
    assert sum(report.disk.prefetched for report in reports) > 10
