"""Pages are written from host memory to disk. Shows when they are written, within which limits, and with which
result.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import NO_ENTRY, GroupSpec
from flexkv.cache.tiers.contract import WriteMode
from flexkv.facts.keys import Rule
from flexkv.simulation.base import RuleBroken
from flexkv.transfer.graph import OpKind
from tests.unit.cache.disk_world import DiskWorld, chain, traffic


def test_a_host_slot_is_not_reused_while_it_is_written() -> None:
    keys = chain(8)
    world = DiskWorld(slots=8)
    world.store(keys)
    (write,) = world.take()
    assert world.store(chain(3, seed=4), name="other") == 3
    world.end(write)
    assert world.store(chain(3, seed=4), name="other") == 0
    assert {symbols[0] for _, symbols in world.disk.content[0].values()} == {
        (0, key.tobytes()) for key in keys
    }


def test_a_failed_write_is_not_on_disk() -> None:
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    (write,) = world.take()
    world.end(write, fails=lambda page: page == 1)
    counts = world.tier.counts
    assert (counts.written, counts.failed_writes) == (3, 1)
    world.drop_host()
    assert world.hits(keys) == 1


def test_writes_beyond_the_bound_wait_and_then_drop() -> None:
    world = DiskWorld(slots=16, limits=traffic(write_pages=4, waiting_pages=6))
    for seed in range(4):
        world.store(chain(3, seed), name=f"w{seed}")
    # The pages of two stores wait to be written. For the other two stores the queue was full.
    assert world.tier.counts.dropped_writes == 6
    (write, part) = world.take()
    assert write.pages + part.pages == 4
    assert world.queue.waiting_pages == 2
    world.end(write)
    world.end(part)
    world.run()
    assert world.tier.counts.written == 6


@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.EVICT])
def test_each_page_is_counted_once_while_no_disk_is_in_use(mode: WriteMode) -> None:
    world = DiskWorld(slots=8, mode=mode)
    counts = world.tier.counts
    world.tier.go_down("every disk failed")
    world.store(chain(6))
    assert (counts.down_writes, counts.dropped_writes, counts.lost) == (
        (6, 0, 0) if mode is WriteMode.THROUGH else (0, 0, 0)
    )
    world.store(chain(8, seed=4), name="other")
    assert (world.manager.hub.presence.find(0, chain(6)) == NO_ENTRY).all(), (
        "the first store's pages were evicted"
    )
    assert counts.down_writes + counts.lost == (14 if mode is WriteMode.THROUGH else 6)
    assert counts.dropped_writes == 0


def test_write_on_evict_writes_what_leaves() -> None:
    world = DiskWorld(slots=32, places=64, mode=WriteMode.EVICT)
    world.store(chain(31))
    assert world.run() == [OpKind.DISK_WRITE]
    assert world.tier.counts.written == 1, "one of 32 slots was missing from those kept free"
    world.store(chain(2, seed=1), name="b")
    assert world.tier.counts.lost == 0
    world.run()
    assert world.tier.counts.written == 3
    assert world.manager.free_slots(0) == 2


@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "two that share slots"])
def test_no_more_leaves_than_is_missing_while_what_leaves_is_written(groups: int) -> None:
    specs = (GroupSpec(4, 32), GroupSpec(4, 32, Rule.WINDOW, 1, shares=0))[:groups]
    world = DiskWorld(groups=specs, mode=WriteMode.EVICT)
    for group in range(groups):
        world.store(chain(32 // groups, seed=group), name=f"r{group}", group=group)
    leaving = world.take()
    assert sum(op.pages for op in leaving) == 2, "one slot in sixteen is to be free"
    assert world.take() == []
    for op in leaving:
        world.end(op)
    assert world.manager.free_slots(0) == 2
    assert world.take() == []


def test_write_on_evict_does_not_write_twice() -> None:
    world = DiskWorld(slots=32, places=64, mode=WriteMode.EVICT)
    keys = chain(32)
    world.store(keys)
    world.run()
    assert world.hits(keys[-3:]) == 3
    before = world.tier.counts.written
    for seed in range(1, 12):
        world.store(chain(3, seed), name=f"s{seed}")
        world.run()
        world.hits(keys[-3:])
    again = world.tier.counts.written - before
    assert again <= 33
    rows = [row[0] for row in world.disk.journal[0].values()]
    assert len(rows) == len(set(rows))


def test_a_page_in_use_does_not_leave() -> None:
    world = DiskWorld(slots=16, places=64, mode=WriteMode.EVICT)
    keys = chain(15)
    world.store(keys)
    world.manager.work.poll()
    world.store(chain(1, seed=1), name="b")
    (write,) = world.take()
    # A request looks up a page while the page is being written before its eviction.
    result = world.match(keys)
    assert result.blocks == 15
    world.end(write)
    assert len(world.match(keys).groups[0].slots) == 15


def test_write_back_waits_for_a_quiet_disk() -> None:
    keys, others = chain(4), chain(3, seed=1)
    world = DiskWorld(mode=WriteMode.BACK, slots=32, places=64)
    world.store(keys)
    world.run()
    world.drop_host()
    world.match(keys)
    (read,) = world.take()
    world.store(others)
    assert world.take() == [], "a read is in flight"
    world.end(read)
    assert world.run() == [OpKind.DISK_WRITE]
    assert world.tier.counts.written == 7


def test_the_simulated_disk_notices_an_early_publish() -> None:
    world = DiskWorld()
    world.store(chain(2))
    (write,) = world.take()
    op = world.manager.tables.ops.get(write.op_id)
    with pytest.raises(RuleBroken, match="not written"):
        world.tier.end_write(0, op.entries, np.ones(2, np.bool_))


def test_what_is_offered_again_and_again_waits_once() -> None:
    world = DiskWorld(mode=WriteMode.EVICT, slots=32, places=64, limits=traffic(waiting_pages=8))
    keys = chain(20)
    world.store(keys)
    for _ in range(5):
        world.manager.work.offer_all()
        assert world.queue.waiting_pages == 20
    # Pages that were evicted from host memory no longer wait to be written. Newly stored pages do.
    world.drop_host(12)
    world.store(chain(6, seed=1), name="b")
    world.manager.work.offer_all()
    assert world.queue.waiting_pages == 14
    world.manager.work.flush()
    world.run()
    assert world.tier.counts.written == 14
    assert world.manager.work.unwritten() == 0


def test_pages_that_are_loaded_go_on_waiting() -> None:
    keys = chain(6)
    world = DiskWorld(mode=WriteMode.BACK, slots=16, places=64)
    world.store(keys)
    world.match(keys[:4])
    op = world.load(4)
    for _ in range(3):
        world.manager.work.offer_all()
        assert world.queue.waiting_pages == 6
    world.end_load(op)
    world.manager.work.flush()
    world.run()
    assert world.tier.counts.written == 6


def test_what_the_disks_have_no_places_for_is_counted() -> None:
    world = DiskWorld(mode=WriteMode.EVICT, slots=8, places=4)
    world.store(chain(7))
    world.manager.work.offer_all()
    assert world.queue.waiting_pages == 4
    assert world.tier.counts.dropped_writes == 3
    world.manager.work.flush()
    world.run()
    assert world.manager.work.unwritten() == 3


def test_pages_that_are_leased_or_failed_are_not_taken_for_written() -> None:
    world = DiskWorld(mode=WriteMode.EVICT, slots=32, places=64)
    keys = chain(6)
    world.store(keys)
    world.match(keys[:4])
    op = world.load(4)
    world.manager.work.offer_all()
    assert world.queue.waiting_pages == 2
    world.manager.work.flush()
    world.run(fails=lambda page: page == 0)
    assert world.tier.counts.written == 1
    assert world.manager.work.unwritten() == 5
    world.end_load(op)
    assert world.manager.work.unwritten() == 5
    world.manager.work.offer_all()
    world.manager.work.flush()
    world.run()
    assert world.manager.work.unwritten() == 0
