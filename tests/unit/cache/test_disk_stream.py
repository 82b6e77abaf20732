"""The manager promises blocks while they are being read from disk (`TierFacts.streams`). The tests cover each outcome
of the read and of the load.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import TailCandidates
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpResult, OpStatus
from tests.unit.cache import disk_world
from tests.unit.cache.disk_world import DiskWorld, chain, traffic

STREAM = traffic(streams=True)


def written(keys: Keys, limits: DiskTraffic = STREAM, **kwargs: object) -> DiskWorld:
    """Returns a world that streams, in which `keys` are on disk and not in host memory."""
    return disk_world.written(keys, limits=limits, **kwargs)


def test_what_is_on_disk_is_promised_when_its_read_is_planned() -> None:
    keys = chain(8)
    world = written(keys[2:])
    world.store(keys[:2])
    world.run()
    result = world.look(keys)
    assert (result.blocks, result.reads) == (8, 0)
    assert not world.manager.waits("r")
    (read,) = world.take()
    op = world.load(8)
    assert op.reads.tolist() == [0, 0] + [read.op_id] * 6, "the first two are there"
    assert op.slots[2:].tolist() == read.slots.tolist()
    assert world.manager.stats().streamed_pages == 6
    world.end(read)
    assert world.end_load(op).failed_blocks.tolist() == []
    assert world.match(keys).blocks == 8


def test_no_other_lookup_hits_what_is_not_verified() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    assert len(world.manager.hub.index.match_prefix(0, keys)) == 0
    # The lookup of another request promises the blocks of the same read.
    result = world.look(keys, "other")
    (read,) = world.take()
    assert result.blocks == 4
    assert world.load(4, "other").reads.tolist() == [read.op_id] * 4


def test_a_load_that_ends_before_its_read_is_heard_of() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    (read,) = world.take()
    op = world.load(4)
    assert len(world.end_load(op, failed=[2]).failed_blocks) == 1
    assert len(world.tier) == 4, "that it did not come says nothing about the page on disk"
    world.end(read, fails=lambda page: page == 2)
    assert len(world.tier) == 3, "its read does"
    assert world.look(keys).blocks == 2


def test_a_load_of_a_page_whose_read_failed() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    (read,) = world.take()
    op = world.load(4)
    world.end(read, fails=lambda page: page == 1)
    done = world.end_load(op, failed=[1])
    assert done.failed_blocks.tolist() == [1]
    assert world.tier.counts.failed_reads == 1
    assert world.look(keys).blocks == 1
    assert world.store(keys[1:2]) == 0
    assert world.match(keys, "other").blocks == 4


def test_a_page_that_was_there_and_fails_is_forgotten_everywhere() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    (read,) = world.take()
    op = world.load(4)
    world.end(read)
    assert len(world.end_load(op, failed=[3]).failed_blocks) == 1
    assert len(world.tier) == 3
    assert world.match(keys).blocks == 3


def test_slots_are_kept_for_the_load_until_it_ends() -> None:
    keys = chain(6)
    world = written(keys)
    world.look(keys)
    (read,) = world.take()
    op = world.load(6)
    world.end(read)
    assert world.store(chain(4, seed=5), name="other") == 2, "six of eight slots are being loaded"
    world.end_load(op)
    assert world.store(chain(4, seed=6), name="other") == 0


def test_a_promise_that_is_dropped_leaves_what_its_read_brings() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    world.manager.release("r")
    world.manager.check_integrity()
    world.run()
    assert world.match(keys).blocks == 4


def test_a_block_that_a_store_is_filling_ends_the_promise() -> None:
    keys = chain(6)
    world = written(np.delete(keys, 3, axis=0))
    plan = world.manager.begin_store("w2", 0, keys[3:4], np.zeros(1, np.int32), 3)
    assert plan.graph is not None
    # A store's pages may never be published. So the manager promises neither the blocks that the store fills nor the
    # blocks after them.
    result = world.look(keys)
    assert (result.blocks, result.reads) == (3, 0)
    world.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.FAILED, np.zeros(1, np.int32)))


def test_without_room_less_is_promised() -> None:
    keys = chain(6)
    world = written(keys)
    world.store(chain(5, seed=3), "other")
    held = world.match(chain(5, seed=3), "held")
    assert held.blocks == 5
    assert world.look(keys).blocks == 3, "three of eight slots are free"


def test_a_tail_is_waited_for_as_ever() -> None:
    keys = chain(4)
    world = written(keys[:3])
    world.store(keys[3:], first=3, tokens=2)
    world.run()
    world.drop_host()
    tail = TailCandidates(keys[3:], np.array([2], np.int32), 3)
    result = world.manager.match("r", [keys[:3]], 0, [tail])
    assert (result.blocks, result.tail_tokens, result.reads) == (3, 0, 0)
    world.run()
    result = world.manager.match("r", [keys[:3]], 0, [tail])
    assert (result.blocks, result.tail_tokens, result.reads) == (3, 0, 1)
    world.run()
    assert world.manager.match("r", [keys[:3]], 0, [tail]).tail_tokens == 2


def test_the_time_of_a_load_that_waited_says_nothing_of_loading() -> None:
    keys = chain(4)
    world = written(keys)
    for _ in range(2):
        world.look(keys)
        (read,) = world.take()
        op = world.load(4)
        world.now_s += 7
        world.end(read)
        world.end_load(op)
        world.drop_host()
    assert world.manager.cost.load.samples == 0


def test_a_pending_block_that_nobody_fills_cannot_be_leased() -> None:
    world = DiskWorld()
    index = world.manager.hub.presence
    _, entries, *_ = index.insert(0, chain(1), 1)
    assert index.pin_coming(entries).tolist() == index.slots_of(entries).tolist()
    index.unpin(entries)
    index.finish(entries, np.zeros(1, np.uint8))
    with pytest.raises(ContractError, match="on its way"):
        index.pin_coming(entries)
