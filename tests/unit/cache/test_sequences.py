"""Follows requests from their first lookup to their end through all tiers, call by call, with the possible faults of
each call. Managers that break a rule in between must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import ManagerLimits, Outcome
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.errors import FlexKVError
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import FailureCause, OpKind, OpResult, OpStatus, TransferOp
from tests.unit.cache.broken_disk_managers import (
    DropsWhatWasReadForAnother,
    ForgetsWhatNobodyBlames,
    KeepsDamagedPages,
    KeepsTheDiskOverReset,
    PublishesFailedReads,
    ReusesSlotsBeingWritten,
)
from tests.unit.cache.broken_managers import IgnoresDiscard, PublishesAfterReset
from tests.unit.cache.disk_world import BLOCK_TOKENS, NONE, DiskWorld, blocks_by_tier, chain, traffic, written

BLOCKS, HALF = 64, 32
GDS = traffic(gds_loads=GdsUse.ALWAYS)
Managers = type[LocalCacheManager]


def half_on_disk(slots: int = 96, **kwargs: Any) -> tuple[DiskWorld, Keys]:
    """Returns a world with 64 blocks, of which the first half is in host memory and the second half only on disk."""
    keys = chain(BLOCKS)
    world = written(keys[HALF:], slots=slots, places=128, **kwargs)
    world.store(keys[:HALF])
    world.run()
    return world, keys


# --- a lookup that waits for the disk ---


def waits_for_the_disk(**kwargs: Any) -> tuple[DiskWorld, Keys, TransferOp]:
    """Returns a world in which a request has looked up 64 blocks. The half in host memory is leased, and the read of
    the other half is in flight.
    """
    world, keys = half_on_disk(**kwargs)
    result = world.match(keys)
    assert (result.blocks, result.reads) == (HALF, 1)
    assert world.manager.waits("r")
    (read,) = world.take()
    assert (read.kind, read.pages) == (OpKind.DISK_READ, HALF)
    return world, keys, read


def test_nothing_waits_for_a_manager_that_was_disabled() -> None:
    world, keys, read = waits_for_the_disk()
    world.manager.disable()
    assert not world.manager.waits("r")
    assert world.match(keys).outcome is Outcome.MISS
    world.end(read)


def test_half_is_read_then_all_is_loaded_by_one_op() -> None:
    world, keys, read = waits_for_the_disk()
    world.end(read)
    assert not world.manager.waits("r")
    result = world.match(keys)
    assert (result.blocks, result.reads, blocks_by_tier(result)) == (BLOCKS, 0, (HALF, HALF))
    op = world.load(BLOCKS)
    assert (op.kind, op.pages) == (OpKind.H2D, BLOCKS)
    assert len(world.end_load(op).failed_blocks) == 0
    world.manager.end_request("r")
    assert [tier.counts.hits for tier in world.manager.tiers] == [HALF, HALF]


def seven_pages_are_damaged(manager_class: Managers = LocalCacheManager) -> None:
    world, keys, read = waits_for_the_disk(manager_class=manager_class)
    bad = {5, 6, 9, 10, 11, 20, 31}
    world.end(read, lambda page: page in bad)
    assert world.match(keys).blocks == HALF + 5, "the hit ends before the first of them"
    there = world.manager.hub.there(0, keys[HALF:])
    assert np.flatnonzero(~there).tolist() == sorted(bad), "the others are worth having"
    assert np.flatnonzero(~world.tier.present(0, keys[HALF:])).tolist() == sorted(bad)


def test_of_pages_that_are_damaged_the_others_stay() -> None:
    seven_pages_are_damaged()


def another_request_needs_slots_meanwhile(manager_class: Managers = LocalCacheManager) -> None:
    world, keys, read = waits_for_the_disk(manager_class=manager_class)
    world.end(read)
    assert world.store(chain(96, seed=3), name="other") == BLOCKS, "64 of 96 slots are kept for the request"
    assert world.match(keys).blocks == BLOCKS


def test_what_was_read_is_kept_while_others_store() -> None:
    another_request_needs_slots_meanwhile()


def test_the_engine_gets_the_first_blocks_itself_meanwhile() -> None:
    world, keys, read = waits_for_the_disk()
    world.end(read)
    result = world.manager.match("r", [keys], 40 * BLOCK_TOKENS)
    assert (result.blocks, result.groups[0].first_block, blocks_by_tier(result)) == (24, 40, (0, 24))
    world.manager.check_integrity()
    world.manager.release("r")
    assert world.store(chain(96, seed=3), name="other") == 0, "nothing else is kept"


def test_a_request_goes_on_without_what_takes_too_long() -> None:
    world, keys, read = waits_for_the_disk(limits=traffic(wait_s=5.0))
    world.now_s += 6
    assert not world.manager.waits("r")
    assert (world.match(keys).blocks, world.tier.counts.late) == (HALF, 1)
    op = world.load(HALF)
    world.end(read)
    world.end_load(op)
    world.manager.end_request("r")
    assert blocks_by_tier(world.match(keys, "next")) == (BLOCKS, 0), "it came all the same"


def test_an_aborted_request_leaves_its_read_to_others() -> None:
    world, keys, read = waits_for_the_disk()
    world.manager.end_request("r")
    assert (world.match(keys, "next").reads, world.take()) == (1, [])
    world.end(read)
    assert world.match(keys, "next").blocks == BLOCKS


def test_host_memory_that_is_too_small_takes_what_fits() -> None:
    keys = chain(BLOCKS)
    world = written(keys[HALF:], slots=48, places=128)
    world.store(keys[:HALF])
    world.run()
    assert world.match(keys).reads == 1
    (read,) = world.take()
    assert read.pages == 16
    world.end(read)
    assert world.match(keys).blocks == 48


# --- promised pages that are read while a load waits for them ---


def a_streamed_page_fails(load_first: bool, manager_class: Managers = LocalCacheManager) -> None:
    """Page 40 fails in the read and in the load that waits for the read. If `load_first` is set, the load reports
    first.
    """
    world, keys = half_on_disk(limits=traffic(streams=True), manager_class=manager_class)
    assert (world.look(keys).blocks, world.manager.waits("r")) == (BLOCKS, False)
    (read,) = world.take()
    op = world.load(BLOCKS)
    # Before the load has finished, the engine's step offers blocks that it computes from the loaded ones.
    behind = chain(2, seed=9)
    store = world.manager.begin_store("r", 0, behind, np.array([70, 71], np.int32), BLOCKS)
    assert store.graph is not None
    for first in (load_first, not load_first):
        if first:
            assert world.end_load(op, failed=[40]).failed_blocks.tolist() == [40]
        else:
            world.end(read, lambda page: page == 40 - HALF)
    done = world.manager.complete(0, OpResult(store.graph.ops[0].op_id, OpStatus.OK, NONE))
    assert done is not None
    assert len(done.published) == 0, "it was computed from a page that never came"
    assert np.flatnonzero(~world.tier.present(0, keys[HALF:])).tolist() == [8]
    assert world.look(keys).blocks == 40, "the request is promised what lies before"
    world.manager.end_request("r")
    world.store(keys[40:41], name="r", first=40)
    assert world.match(keys, "next").blocks == BLOCKS, "what came after it serves others"


@pytest.mark.parametrize("load_first", [True, False], ids=["load first", "read first"])
def test_a_streamed_page_that_fails_ends_the_promise_there(load_first: bool) -> None:
    a_streamed_page_fails(load_first)


# --- a load directly from disk ---


def a_page_of_a_gds_load_fails(cause: FailureCause, manager_class: Managers = LocalCacheManager) -> None:
    """Page 17 of the half on disk fails on the second of two ranks."""
    world, keys = half_on_disk(limits=GDS, manager_limits=ManagerLimits(ranks=2), manager_class=manager_class)
    assert (blocks_by_tier(world.look(keys)), world.take()) == ((HALF, HALF), [])
    from_host, from_disk = world.begin(list(range(BLOCKS))).ops
    assert (from_host.kind, from_disk.kind) == (OpKind.H2D, OpKind.GDS_READ)
    store = world.manager.begin_store("r", 0, chain(1, seed=9), np.array([70], np.int32), BLOCKS)
    assert store.graph is not None
    complete = world.manager.complete
    failed, causes = np.array([17], np.int32), np.array([cause], np.uint8)
    assert complete(1, OpResult(from_disk.op_id, OpStatus.FAILED, failed, "why", causes=causes)) is None
    done = complete(0, OpResult(from_disk.op_id, OpStatus.OK, NONE))
    assert done is not None
    assert done.failed_blocks.tolist() == [HALF + 17]
    for rank in (0, 1):
        complete(rank, OpResult(from_host.op_id, OpStatus.OK, NONE))
    for rank in (0, 1):
        stored = complete(rank, OpResult(store.graph.ops[0].op_id, OpStatus.OK, NONE))
    assert stored is not None
    assert len(stored.published) == 0, "it was computed from a page that did not come"
    kept = cause is not FailureCause.CONTENT
    assert world.tier.present(0, keys[HALF:]).tolist() == [kept or page != 17 for page in range(HALF)]
    # The request's pages are now read to host memory, where the disk lane checks them.
    assert world.look(keys).reads == 1
    assert world.run() == [OpKind.DISK_READ]
    assert world.match(keys).blocks == (BLOCKS if kept else HALF + 17)


@pytest.mark.parametrize("cause", [FailureCause.CONTENT, FailureCause.SOURCE, FailureCause.TRANSPORT])
def test_a_page_of_a_gds_load_that_fails_is_judged_by_its_cause(cause: FailureCause) -> None:
    a_page_of_a_gds_load_fails(cause)


# --- a store, its write, and a reset in between ---


def a_reset_comes_while_pages_move(manager_class: Managers = LocalCacheManager) -> None:
    keys, late = chain(4), chain(2, seed=1)
    world = DiskWorld(slots=12, manager_class=manager_class)
    plan = world.manager.begin_store("w", 0, keys, np.arange(4, dtype=np.int32), 0)
    assert plan.graph is not None
    assert world.match(keys).blocks == 0, "not before it has ended"
    (d2h,) = plan.graph.ops
    for position, slot in enumerate(d2h.slots.tolist()):
        world.host[0][slot] = (0, keys[position].tobytes())
    world.manager.complete(0, OpResult(d2h.op_id, OpStatus.OK, NONE))
    assert world.match(keys).blocks == 4
    world.manager.end_request("r")
    (write,) = world.take()
    assert write.kind is OpKind.DISK_WRITE
    # A burst of stores needs slots. Pages that are being written to disk stay, and all others may be evicted.
    assert world.store(chain(12, seed=2), name="burst") == 4
    assert world.manager.hub.there(0, keys).all()
    overtaken = world.manager.begin_store("late", 0, late, np.array([8, 9], np.int32), 0)
    while overtaken.graph is None:
        world.drop_host()
        overtaken = world.manager.begin_store("late", 0, late, np.array([8, 9], np.int32), 0)
    world.manager.reset()
    assert world.match(keys).blocks == 0
    # The same blocks are stored again with the new weights, while the write of the old weights is still in flight.
    world.store(keys, name="again")
    again = [op for op in world.take() if op.kind is OpKind.DISK_WRITE]
    assert not set(write.places.tolist()) & {place for op in again for place in op.places.tolist()}
    world.end(write)
    assert not world.tier.present(0, keys).any(), "the old weights' pages are nowhere"
    done = world.manager.complete(0, OpResult(overtaken.graph.ops[0].op_id, OpStatus.OK, NONE))
    assert done is not None
    assert len(done.published) == 0
    for op in again:
        world.end(op)
    world.run()
    assert world.tier.present(0, keys).all()
    world.drop_host()
    assert world.hits(keys) == 4
    assert world.match(late).blocks == 0


def test_a_reset_overtakes_stores_and_writes() -> None:
    a_reset_comes_while_pages_move()


# --- controls ---


CONTROLS: Sequence[tuple[Callable[..., None], Sequence[Any], Managers]] = [
    (seven_pages_are_damaged, (), PublishesFailedReads),
    (seven_pages_are_damaged, (), KeepsDamagedPages),
    (another_request_needs_slots_meanwhile, (), DropsWhatWasReadForAnother),
    (a_streamed_page_fails, (True,), IgnoresDiscard),
    (a_streamed_page_fails, (False,), KeepsDamagedPages),
    (a_page_of_a_gds_load_fails, (FailureCause.SOURCE,), ForgetsWhatNobodyBlames),
    (a_page_of_a_gds_load_fails, (FailureCause.CONTENT,), IgnoresDiscard),
    (a_reset_comes_while_pages_move, (), KeepsTheDiskOverReset),
    (a_reset_comes_while_pages_move, (), PublishesAfterReset),
    (a_reset_comes_while_pages_move, (), ReusesSlotsBeingWritten),
]


@pytest.mark.parametrize(
    ("sequence", "given", "manager_class"),
    CONTROLS,
    ids=[f"{c[0].__name__}-{c[2].__name__}" for c in CONTROLS],
)
def test_a_broken_manager_does_not_come_through(
    sequence: Callable[..., None], given: Sequence[Any], manager_class: Managers
) -> None:
    with pytest.raises((AssertionError, FlexKVError)):
        sequence(*given, manager_class=manager_class)
