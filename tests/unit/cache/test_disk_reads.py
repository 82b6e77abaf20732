"""Pages are read from disk for a lookup. Shows which pages are read, which requests wait, and that pages are verified
before they are promised.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits, TailCandidates
from flexkv.errors import ContractError
from flexkv.facts.keys import Rule
from flexkv.transfer.graph import FailureCause, OpKind, OpResult, OpStatus
from tests.unit.cache.disk_world import DiskWorld, chain, traffic, written


def test_host_blocks_are_leased_while_the_rest_is_read() -> None:
    keys = chain(8)
    world = written(keys[3:])
    world.store(keys[:3])
    result = world.match(keys)
    assert (result.blocks, result.reads) == (3, 1)
    # Reads are filling five of the eight slots, and three slots are promised, so nothing may be evicted.
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
    assert world.tier.counts.failed_reads == 1
    assert len(world.tier) == 5
    assert keys[2].tobytes() not in {row[0] for row in world.disk.journal[0].values()}
    # After the engine has computed the page again, the page is stored and written again.
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
    assert len(world.tier) == 4
    assert world.hits(keys) == 4


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
    causes = np.array([FailureCause.NOT_EXECUTED, FailureCause.CONTENT], np.uint8)
    failed = np.array([1, 3], np.int32)
    world.manager.work.complete(OpResult(op.op_id, OpStatus.FAILED, failed, "why", causes=causes))
    world.manager.check_integrity()
    assert len(world.tier) == 3
    assert (world.tier.counts.failed_reads, world.tier.counts.unread) == (1, 1)


def test_two_requests_wait_for_one_read() -> None:
    keys = chain(4)
    world = written(keys)
    assert world.match(keys, "a").reads == 1
    assert world.match(keys, "b").reads == 1
    assert world.run() == [OpKind.DISK_READ]
    assert (world.match(keys, "a").blocks, world.match(keys, "b").blocks) == (4, 4)


def test_of_pages_in_flight_only_those_that_nobody_reads_are_read() -> None:
    keys = chain(6)
    world = written(keys)
    assert world.match(keys[:4], "short").reads == 1
    assert world.match(keys, "long").reads == 2, "the read in flight, and one for the rest"
    assert [op.pages for op in world.take()] == [4, 2]
    # For a third request all pages are already being read, so the manager plans no read.
    assert world.match(keys, "late").reads == 2
    assert world.take() == []
    for op in list(world.lane.ops.values()):
        world.end(op)
    assert [world.match(keys, name).blocks for name in ("short", "long", "late")] == [6, 6, 6]


def test_a_read_in_flight_is_joined_where_no_other_may_begin() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(fetch_ops=1))
    assert world.match(keys, "a").reads == 1
    assert world.match(keys, "b").reads == 1
    assert world.run() == [OpKind.DISK_READ]
    assert world.match(keys, "b").blocks == 4


def test_who_joins_a_read_has_its_pages_when_the_first_request_has_gone() -> None:
    keys = chain(4)
    world = written(keys)
    world.match(keys, "a")
    world.match(keys, "b")
    world.manager.release("a")
    world.run()
    assert world.store(chain(8, seed=7), name="other") == 4, (
        "four of eight slots are held for the second request"
    )
    assert world.match(keys, "b").blocks == 4


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
    world = written(keys, limits=traffic(wait_s=5.0))
    world.match(keys)
    (read,) = world.take()
    world.now_s += 6
    assert not world.manager.waits("r")
    result = world.match(keys)
    assert (result.blocks, result.reads) == (0, 0)
    assert world.tier.counts.late == 1
    world.end(read)
    assert world.match(keys).blocks == 4, "it came all the same"
    world.manager.release("r")
    world.drop_host()
    assert world.match(keys).reads == 1, "the next admission may wait again"


def test_waits_that_nobody_follows_up_are_dropped() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(wait_s=5.0))
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
    world.manager.hub.remove(0, world.manager.hub.index.find(0, keys[2:4]))
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
    assert len(world.tier) == 12
    assert world.hits(keys) == 8


def test_no_more_is_read_than_can_be_promised() -> None:
    keys = chain(6)
    world = written(keys, manager_limits=ManagerLimits(inflight_load_pages=4))
    world.match(keys)
    (read,) = world.take()
    assert read.pages == 4


def test_reads_are_bounded() -> None:
    keys = chain(6)
    world = written(keys, limits=traffic(fetch_pages=4))
    world.match(keys)
    (read,) = world.take()
    assert read.pages == 4
    assert world.match(chain(3, seed=8), "other").reads == 0
    world.end(read)
    assert world.hits(keys) == 6


def test_a_place_is_not_reused_while_it_is_read() -> None:
    keys = chain(4)
    world = written(keys, places=4)
    world.match(keys)
    (read,) = world.take()
    world.store(chain(3, seed=4), name="other")
    assert world.take() == [], "all places are being read"
    assert world.tier.counts.dropped_writes == 3
    world.end(read)
    assert world.match(keys).blocks == 4


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
    groups = (GroupSpec(4, 8), GroupSpec(4, 8, Rule.WINDOW, 2))
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


def test_what_is_published_is_leased_for_all_who_wait_and_what_is_not_for_nobody() -> None:
    world = DiskWorld()
    index = world.manager.hub.presence
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
    tokens = world.manager.hub.tokens[0]
    assert tokens.tolist() == [4] * 8, "one of the slots held two tokens before"
