"""The disk tier behind a manager, outcome by outcome. The disks are simulated: no bytes, the same promises."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupPolicy, GroupSpec, ManagerLimits, TailCandidates
from flexkv.cache.disk_base import DiskLimits, DiskMode
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.simulated_model import RuleBroken
from flexkv.errors import ConfigError, ContractError
from flexkv.transfer.graph import Blame, OpKind, OpResult, OpStatus, Priority
from tests.unit.cache.disk_world import DiskWorld, chain


def written(keys_: np.ndarray, **kwargs: object) -> DiskWorld:
    """A world in which `keys_` are on disk and not in host memory."""
    world = DiskWorld(**kwargs)  # type: ignore[arg-type]
    world.store(keys_)
    assert OpKind.DISK_WRITE in world.run()
    world.drop_host()
    return world


def test_a_stored_page_goes_to_disk_and_comes_back() -> None:
    keys = chain(5)
    world = DiskWorld()
    world.store(keys)
    (write,) = world.take()
    assert (write.kind, write.priority, write.pages) == (OpKind.DISK_WRITE, Priority.STORE, 5)
    world.end(write)
    assert world.manager.disk.counts.written == 5
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
    assert world.manager.disk.counts.read == 5


def test_host_blocks_are_leased_while_the_rest_is_read() -> None:
    keys = chain(8)
    world = written(keys[3:])
    world.store(keys[:3])
    result = world.match(keys)
    assert (result.blocks, result.reads) == (3, 1)
    # Five slots are being read into, three are promised: nothing may be evicted.
    assert world.store(chain(4, seed=9), name="other") == 4
    world.run()
    assert world.match(keys).blocks == 8


def test_what_was_read_stays_until_its_request_asks_again() -> None:
    keys = chain(6)
    world = written(keys)
    world.match(keys)
    world.run()
    assert world.store(chain(4, seed=5), name="other") == 2, "six of eight slots are held for the request"
    assert world.match(keys).blocks == 6
    world.manager.release("r")
    assert world.store(chain(4, seed=6), name="other") == 0


def test_a_damaged_page_is_a_miss_and_forgotten() -> None:
    keys = chain(6)
    world = written(keys)
    world.disk.content[0].pop(
        next(place for place, row in world.disk.journal[0].items() if row[0] == keys[2].tobytes())
    )
    assert world.hits(keys) == 2
    assert world.manager.disk.counts.failed_reads == 1
    assert len(world.manager.disk.index) == 5
    assert keys[2].tobytes() not in {row[0] for row in world.disk.journal[0].values()}
    # Computed again, it is stored and written again.
    world.store(keys[2:3])
    world.run()
    world.drop_host()
    assert world.hits(keys) == 6


def test_a_read_that_was_never_issued_forgets_nothing() -> None:
    keys = chain(4)
    world = written(keys)
    world.match(keys)
    (read,) = world.take()
    world.end(read, status=OpStatus.CANCELLED)
    assert len(world.manager.disk.index) == 4
    assert world.hits(keys) == 4


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


def test_two_requests_wait_for_one_read() -> None:
    keys = chain(4)
    world = written(keys)
    assert world.match(keys, "a").reads == 1
    assert world.match(keys, "b").reads == 1
    assert world.run() == [OpKind.DISK_READ]
    assert (world.match(keys, "a").blocks, world.match(keys, "b").blocks) == (4, 4)


def test_a_request_that_ends_leaves_its_read_alone() -> None:
    keys = chain(4)
    world = written(keys)
    world.match(keys)
    (read,) = world.take()
    world.manager.release("r")
    assert not world.manager.waits("r")
    world.end(read)
    assert world.match(keys).blocks == 4


def test_a_read_that_takes_too_long_is_not_waited_for() -> None:
    keys = chain(4)
    world = written(keys, limits=DiskLimits(wait_s=5.0))
    world.match(keys)
    (read,) = world.take()
    world.now_s += 6
    assert not world.manager.waits("r")
    result = world.match(keys)
    assert (result.blocks, result.reads) == (0, 0)
    assert world.manager.disk.counts.late == 1
    world.end(read)
    assert world.match(keys).blocks == 4, "it came all the same"
    world.manager.release("r")
    world.drop_host()
    assert world.match(keys).reads == 1, "the next admission may wait again"


def test_waits_that_nobody_follows_up_are_dropped() -> None:
    keys = chain(4)
    world = written(keys, limits=DiskLimits(wait_s=5.0))
    world.match(keys)
    world.run()
    world.now_s += 11
    world.manager.expire()
    assert world.store(chain(8, seed=3)) == 0, "nothing is held any more"


def test_a_hole_in_host_memory_is_filled() -> None:
    keys = chain(6)
    world = DiskWorld()
    world.store(keys)
    world.run()
    world.manager.host.remove(0, world.manager.host.index.find(0, keys[2:4]))
    result = world.match(keys)
    assert (result.blocks, result.reads) == (2, 1)
    (read,) = world.take()
    assert read.pages == 2
    world.end(read)
    assert world.match(keys).blocks == 6


def test_a_hit_larger_than_host_memory_is_cut_to_it() -> None:
    keys = chain(12)
    world = DiskWorld(slots=8)
    world.store(keys[:6])
    world.run()
    world.store(keys[6:], first=6)
    world.run()
    assert len(world.manager.disk.index) == 12
    assert world.hits(keys) == 8


def test_no_more_is_read_than_can_be_promised() -> None:
    keys = chain(6)
    world = written(keys, manager_limits=ManagerLimits(inflight_load_pages=4))
    world.match(keys)
    (read,) = world.take()
    assert read.pages == 4


def test_reads_are_bounded() -> None:
    keys = chain(6)
    world = written(keys, limits=DiskLimits(read_pages=4))
    world.match(keys)
    (read,) = world.take()
    assert read.pages == 4
    assert world.match(chain(3, seed=8), "other").reads == 0
    world.end(read)
    assert world.hits(keys) == 6


def test_the_disk_evicts_what_was_used_least() -> None:
    world = DiskWorld(slots=8, places=8)
    old, new = chain(6, seed=1), chain(5, seed=2)
    world.store(old)
    world.run()
    world.drop_host()
    assert world.hits(old[:3]) == 3
    world.store(new)
    world.run()
    assert world.manager.disk.counts.evicted == 3
    world.drop_host()
    assert world.hits(old) == 3
    world.drop_host()
    assert world.hits(new) == 5


def test_a_place_is_not_reused_while_it_is_read() -> None:
    keys = chain(4)
    world = written(keys, places=4)
    world.match(keys)
    (read,) = world.take()
    world.store(chain(3, seed=4), name="other")
    assert world.take() == [], "all places are being read"
    assert world.manager.disk.counts.dropped_writes == 3
    world.end(read)
    assert world.match(keys).blocks == 4


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
    counts = world.manager.disk.counts
    assert (counts.written, counts.failed_writes) == (3, 1)
    world.drop_host()
    assert world.hits(keys) == 1


def test_writes_beyond_the_bound_wait_and_then_drop() -> None:
    world = DiskWorld(slots=16, limits=DiskLimits(write_pages=4, waiting_pages=6))
    for seed in range(4):
        world.store(chain(3, seed), name=f"w{seed}")
    # Two stores wait for their plan; the other two found the queue full.
    assert world.manager.disk.counts.dropped_writes == 6
    (write, part) = world.take()
    assert write.pages + part.pages == 4
    assert world.manager.disk.writes.waiting_pages == 2
    world.end(write)
    world.end(part)
    world.run()
    assert world.manager.disk.counts.written == 6


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
    assert world.manager.disk.counts.unread == 4
    world.store(keys)
    world.run()
    world.drop_host()
    assert world.hits(keys) == 4


def test_a_new_manager_finds_what_the_last_one_wrote() -> None:
    keys = chain(6)
    disk = written(keys, slots=8).disk
    world = DiskWorld(disk=disk)
    assert len(world.manager.disk.index) == 6
    assert world.hits(keys) == 6
    world.store(chain(4, seed=3))
    world.run()
    world.drop_host()
    assert world.hits(chain(4, seed=3)) == 4
    world.drop_host()
    assert world.hits(keys) == 6, "the new writes took other places"


def test_a_stale_row_is_a_miss() -> None:
    keys = chain(4)
    disk = written(keys).disk
    place = next(iter(disk.journal[0]))
    disk.content[0][place] = ((b"x" * 16, 99, 0, 4), [(0, b"x" * 16)])
    world = DiskWorld(disk=disk)
    assert world.hits(keys) < 4


def test_a_lost_disk_is_a_miss_and_the_other_goes_on() -> None:
    keys = chain(8)
    world = written(keys)
    world.disk.lose(0)
    for lost in world.disk.poll().lost:
        world.manager.disk.index.lose(lost.disk)
    world.manager.check_integrity()
    assert world.manager.disk.counts.gone == 4
    world.store(keys)
    world.run()
    assert all(place % 2 == 1 for place in world.disk.journal[0])
    assert len(world.manager.disk.index) == 8
    world.drop_host()
    assert world.hits(keys) == 8


def test_a_disk_that_was_lost_before_the_start_gets_no_page() -> None:
    disk = written(chain(8)).disk
    disk.lose(1)
    world = DiskWorld(disk=disk)
    world.store(chain(6, seed=2))
    world.run()
    assert all(place % 2 == 0 for place in disk.journal[0])


def test_pages_expire() -> None:
    keys = chain(4)
    world = written(keys, limits=DiskLimits(ttl_s=60))
    world.now_s += 59
    assert world.hits(keys[:2]) == 2
    world.drop_host()
    world.now_s += 2
    assert world.match(keys).reads == 0
    assert world.manager.disk.counts.expired == 4
    assert world.disk.journal == [{}]


def test_expiry_survives_the_process() -> None:
    keys = chain(4)
    disk = written(keys, limits=DiskLimits(ttl_s=60)).disk
    world = DiskWorld(disk=disk)
    world.now_s += 61
    assert world.hits(keys) == 0


def test_forgetting_reaches_the_disk() -> None:
    keys = chain(6)
    world = written(keys)
    world.hits(keys[:3])
    assert world.manager.forget(0, keys[2:5]) == 3
    world.drop_host()
    assert world.hits(keys) == 2


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


def test_pages_of_a_read_that_was_cut_off_stay_on_disk() -> None:
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    world.run()
    world.drop_host()
    assert world.match(keys).reads == 1
    (op,) = world.take()
    while not world.lane.move_page(op.op_id, False):
        continue
    world.lane.end(op.op_id)
    blames = np.array([Blame.NOBODY, Blame.PAGE], np.uint8)
    failed = np.array([1, 3], np.int32)
    world.manager.disk.complete(OpResult(op.op_id, OpStatus.FAILED, failed, "why", blames=blames))
    world.manager.check_integrity()
    assert len(world.manager.disk.index) == 3
    assert (world.manager.disk.counts.failed_reads, world.manager.disk.counts.unread) == (1, 1)


def test_a_partial_tail_comes_back_with_its_tokens() -> None:
    keys, tail = chain(2), chain(1, seed=5)
    world = DiskWorld()
    world.store(keys)
    world.store(tail, first=2, tokens=3)
    world.run()
    assert sorted(row[2] for row in world.disk.journal[0].values()) == [3, 4, 4]
    world.drop_host()
    assert world.hits(keys) == 2
    candidates = TailCandidates(tail, np.array([3], np.int32), 2)
    result = world.manager.match("r", [keys], 0, [candidates])
    assert (result.tail_tokens, result.reads) == (0, 1)
    world.run()
    assert world.manager.match("r", [keys], 0, [candidates]).tail_tokens == 3


def test_groups_with_a_window_read_what_they_need() -> None:
    groups = (GroupSpec(4, 8), GroupSpec(4, 8, GroupPolicy.TRAILING_WINDOW, 8))
    world = DiskWorld(groups=groups)
    full, window = chain(6), chain(6, seed=1)
    world.store(full, group=0)
    world.store(window, group=1)
    world.run()
    world.drop_host()
    result = world.manager.match("r", [full, window], 0)
    assert (result.blocks, result.reads) == (0, 2)
    assert sorted(op.pages for op in world.take()) == [2, 6]
    for op in list(world.lane.ops.values()):
        world.end(op)
    assert world.manager.match("r", [full, window], 0).blocks == 6


def test_write_on_evict_writes_what_leaves() -> None:
    world = DiskWorld(slots=32, places=64, mode=DiskMode.EVICT)
    world.store(chain(31))
    assert world.run() == [OpKind.DISK_WRITE]
    assert world.manager.disk.counts.written == 1, "one of 32 slots was missing from those kept free"
    world.store(chain(2, seed=1), name="b")
    assert world.manager.disk.counts.lost == 0
    world.run()
    assert world.manager.disk.counts.written == 3
    assert world.manager.free_slots(0) == 2


def test_write_on_evict_does_not_write_twice() -> None:
    world = DiskWorld(slots=32, places=64, mode=DiskMode.EVICT)
    keys = chain(32)
    world.store(keys)
    world.run()
    assert world.hits(keys[-3:]) == 3
    before = world.manager.disk.counts.written
    for seed in range(1, 12):
        world.store(chain(3, seed), name=f"s{seed}")
        world.run()
        world.hits(keys[-3:])
    again = world.manager.disk.counts.written - before
    assert again <= 33
    rows = [row[0] for row in world.disk.journal[0].values()]
    assert len(rows) == len(set(rows))


def test_a_page_in_use_does_not_leave() -> None:
    world = DiskWorld(slots=16, places=64, mode=DiskMode.EVICT)
    keys = chain(15)
    world.store(keys)
    world.manager.disk.pump()
    world.store(chain(1, seed=1), name="b")
    (write,) = world.take()
    # The page that was to leave is asked for while it is being written.
    result = world.match(keys)
    assert result.blocks == 15
    world.end(write)
    assert len(world.match(keys).groups[0].slots) == 15


def test_write_back_waits_for_a_quiet_disk() -> None:
    keys, others = chain(4), chain(3, seed=1)
    world = DiskWorld(mode=DiskMode.BACK, slots=32, places=64)
    world.store(keys)
    world.run()
    world.drop_host()
    world.match(keys)
    (read,) = world.take()
    world.store(others)
    assert world.take() == [], "a read is under way"
    world.end(read)
    assert world.run() == [OpKind.DISK_WRITE]
    assert world.manager.disk.counts.written == 7


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="read_pages=0"):
        DiskLimits(read_pages=0).check()
    with pytest.raises(ConfigError, match="ttl_s"):
        DiskLimits(ttl_s=-1).check()
    alone = LocalCacheManager([GroupSpec(4, 4)])
    with pytest.raises(ContractError, match="no disk tier"):
        alone.disk  # noqa: B018


def test_the_simulated_disk_notices_an_early_publish() -> None:
    world = DiskWorld()
    world.store(chain(2))
    (write,) = world.take()
    op = world.manager.disk.writes.ops.get(write.op_id)
    with pytest.raises(RuleBroken, match="not written"):
        world.manager.disk.index.end_write(0, op.disk, np.ones(2, np.bool_))


def test_what_is_published_is_leased_for_all_who_wait_and_what_is_not_for_nobody() -> None:
    world = DiskWorld()
    index = world.manager.host.index
    _, entries, *_ = index.insert(0, chain(3), 3)
    index.remove(entries[2:])
    assert index.finish(entries, np.array([1, 0, 1], np.uint8), 2).tolist() == [1, 0, 0]
    index.check_integrity(np.repeat(entries[:1], 2))
    assert index.free_slots(0) == 7
    with pytest.raises(ContractError, match="leases"):
        index.finish(entries[:1], np.ones(1, np.uint8), 2**31)


def test_pages_read_into_slots_that_held_a_tail_are_whole_again() -> None:
    keys, tail = chain(8), chain(1, seed=3)
    world = written(keys)
    world.store(tail, tokens=2)
    world.run()
    world.drop_host()
    assert world.hits(keys) == 8
    tokens = world.manager.host.tokens[0]
    assert tokens.tolist() == [4] * 8, "one of the slots held two tokens before"
