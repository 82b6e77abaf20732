"""Tests the complete disk tier of a manager: pages that are written and read again, a lane that fails, a reset, and
dropped pages.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.errors import ConfigError
from flexkv.transfer.graph import OpKind, OpResult, OpStatus, Priority
from tests.unit.cache.disk_world import DiskWorld, chain, traffic, written


def test_a_stored_page_goes_to_disk_and_comes_back() -> None:
    keys = chain(5)
    world = DiskWorld()
    world.store(keys)
    (write,) = world.take()
    assert (write.kind, write.priority, write.pages) == (OpKind.DISK_WRITE, Priority.STORE, 5)
    world.end(write)
    assert world.tier.counts.written == 5
    assert world.match(keys).reads == 0, "what host memory has is not read"
    world.manager.release("r")
    world.drop_host()
    first = world.match(keys)
    assert (first.blocks, first.reads) == (0, 1)
    assert world.manager.waits("r")
    (read,) = world.take()
    assert (read.kind, read.priority, read.pages) == (OpKind.DISK_READ, Priority.LOAD, 5)
    assert np.array_equal(read.tags, write.tags)
    assert world.match(keys).blocks == 0, "nothing is promised before it was verified"
    world.end(read)
    assert not world.manager.waits("r")
    assert world.match(keys).blocks == 5
    assert world.tier.counts.read == 5


def test_a_lane_that_is_down_makes_disk_pages_misses() -> None:
    keys = chain(4)
    world = written(keys)
    world.match(keys)
    (read,) = world.take()
    world.end(read, status=OpStatus.LANE_DOWN)
    result = world.match(keys)
    assert (result.blocks, result.reads) == (0, 0)
    world.store(keys)
    assert world.take() == []
    assert world.match(keys).blocks == 4, "host memory goes on"


def test_a_reset_forgets_the_disk_and_what_is_in_flight() -> None:
    keys, other = chain(4), chain(3, seed=7)
    world = written(keys)
    world.store(other)
    (write,) = world.take()
    world.match(keys)
    (read,) = world.take()
    world.manager.reset()
    assert world.disk.epoch == 1
    assert not world.manager.waits("r")
    world.end(write)
    world.end(read)
    assert world.disk.journal == [{}]
    assert world.hits(keys) == 0
    assert world.hits(other) == 0
    assert world.tier.counts.unread == 4
    world.store(keys)
    world.run()
    world.drop_host()
    assert world.hits(keys) == 4


def test_forgetting_reaches_the_disk() -> None:
    keys = chain(6)
    world = written(keys)
    world.hits(keys[:3])
    assert world.manager.forget(0, keys[2:5]) == 3
    world.drop_host()
    assert world.hits(keys) == 2


@pytest.mark.parametrize(("status", "left"), [(OpStatus.LANE_DOWN, 4), (OpStatus.FAILED, 0)])
def test_a_lane_to_the_engine_that_is_down_leaves_what_is_on_disk(status: OpStatus, left: int) -> None:
    """If a load fails because its lane is down, its pages stay on disk, because they may be good. Host memory drops its
    pages in any case, because they cannot reach the engine by another lane.
    """
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    world.run()
    world.match(keys)
    world.end_load(world.load(4), [0, 1, 2, 3], status)
    world.drop_host()
    assert world.hits(keys, "other") == left


def test_a_load_that_a_reset_overtook_forgets_nothing_newer() -> None:
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    world.run()
    world.match(keys)
    load = world.load(4)
    world.manager.reset()
    world.store(keys)
    world.run()
    world.end_load(load, [0, 1, 2, 3])
    world.drop_host()
    assert world.hits(keys) == 4


def test_a_page_whose_load_failed_is_forgotten_on_disk_too() -> None:
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    world.run()
    world.match(keys)
    graph = world.manager.begin_load("r", [np.arange(4, dtype=np.int32)])
    assert graph is not None
    world.manager.complete(
        0, OpResult(graph.ops[0].op_id, OpStatus.FAILED, np.array([1], np.int32), "digest")
    )
    assert world.hits(keys) == 1


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="disk tier: fetch_pages=0"):
        DiskWorld(limits=traffic(fetch_pages=0))
    with pytest.raises(ConfigError, match="ttl_s=-1"):
        DiskWorld(limits=traffic(ttl_s=-1))
