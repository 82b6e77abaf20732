"""Tests rules for every promise of pages on disk, whether the pages are streamed or loaded by GDS."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.errors import ContractError
from tests.unit.cache.disk_world import chain, traffic, two_groups, written

STREAM = traffic(streams=True)
GDS = traffic(gds_loads=GdsUse.ALWAYS)

each_way = pytest.mark.parametrize("limits", [STREAM, GDS], ids=["streamed", "gds"])


def test_without_a_setting_nothing_on_disk_is_promised() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic())
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 1)


@each_way
def test_a_reset_fails_the_load_and_forgets_the_pages(limits: DiskTraffic) -> None:
    keys = chain(4)
    world = written(keys, limits=limits)
    world.look(keys)
    reads = world.take()
    op = world.load(4)
    world.look(keys, "promised")
    world.manager.reset()
    world.manager.check_integrity()
    for read in reads:
        world.end(read)
    assert len(world.end_load(op, failed=[1]).failed_blocks) == 4
    assert world.look(keys).blocks == 0
    assert world.manager.free_slots(0) == 8
    assert world.tier.counts.failed_reads == 0


@each_way
def test_a_lease_that_expires_leaves_no_promise_and_the_pages(limits: DiskTraffic) -> None:
    keys = chain(4)
    world = written(keys, limits=limits)
    world.look(keys)
    world.now_s += 61
    assert world.manager.expire() == 1
    world.manager.check_integrity()
    with pytest.raises(ContractError, match="no lease"):
        world.begin([0])
    world.run()
    world.manager.check_integrity()
    assert world.match(keys, "other").blocks == 4


@each_way
def test_groups_of_one_request_are_loaded_together(limits: DiskTraffic) -> None:
    world, keys = two_groups(4, limits=limits)
    result = world.manager.match("r", keys, 0)
    assert (result.blocks, result.reads) == (4, 0)
    reads = world.take()
    graph = world.manager.begin_load("r", [np.arange(4, dtype=np.int32)] * 2)
    assert graph is not None
    assert [op.group for op in graph.ops] == [0, 1]
    if limits.facts.streams:
        assert [op.reads.tolist() for op in graph.ops] == [[read.op_id] * 4 for read in reads]
    else:
        assert reads == []
    for read in reads:
        world.end(read)
    world.load_ended(graph)
    world.manager.check_integrity()
