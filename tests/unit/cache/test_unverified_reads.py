"""If blocks are offered for a store while they are being read from disk, they must be stored, because the read may
still fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import StorePlan
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.facts.keys import Keys
from flexkv.simulation.run import Simulation
from flexkv.transfer.graph import FailureCause, OpId, OpKind, OpResult, OpStatus, TransferOp
from tests.unit.cache.broken_managers import caught_by
from tests.unit.cache.disk_world import NONE, DiskWorld, chain, traffic, written
from tests.unit.cache.test_disk_simulation import narrow_configs

Coming = tuple[DiskWorld, Keys, TransferOp]
"""A world, the keys of blocks on its disk, and the read of these blocks, which is in flight."""


def offer(world: DiskWorld, keys: Keys, first_engine_block: int = 20, name: str = "computed") -> StorePlan:
    """Offers blocks for a store. A request other than the loading one has computed these blocks, in other engine
    blocks.
    """
    blocks = np.arange(len(keys), dtype=np.int32) + first_engine_block
    plan = world.manager.begin_store(name, 0, keys, blocks, 0)
    world.manager.check_integrity()
    return plan


def end_store(world: DiskWorld, plan: StorePlan, keys: Keys, status: OpStatus = OpStatus.OK) -> None:
    assert plan.graph is not None
    (op,) = plan.graph.ops
    for position, slot in zip(plan.stored.tolist(), op.slots.tolist(), strict=True):
        world.host[0][slot] = (0, keys[position].tobytes())
    world.manager.complete(0, OpResult(OpId(op.op_id), status, NONE, "why"))
    world.manager.check_integrity()


@pytest.fixture
def coming() -> Coming:
    """Returns a world with four blocks on disk. A lookup has begun to read them."""
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    (read,) = world.take()
    return world, keys, read


def all_fail(page: int) -> bool:
    return True


def test_blocks_whose_read_fails_are_stored(coming: Coming) -> None:
    world, keys, read = coming
    plan = offer(world, keys)
    assert (plan.stored.tolist(), plan.known, plan.dropped) == ([0, 1, 2, 3], 0, 0)
    world.end(read, all_fail)
    end_store(world, plan, keys)
    assert world.match(keys).blocks == 4
    assert OpKind.DISK_WRITE in world.run(), "what was bad on disk is written again"
    assert world.tier.present(0, keys).all()


def test_blocks_stored_before_their_read_fails_are_written_to_disk_again(coming: Coming) -> None:
    world, keys, read = coming
    end_store(world, offer(world, keys), keys)
    assert world.take() == [], "they are on disk, as far as is known"
    world.end(read, lambda page: page == 2)
    (write,) = world.take()
    assert (write.kind, write.pages) == (OpKind.DISK_WRITE, 1)
    world.end(write)
    assert world.tier.present(0, keys).all()


def test_a_read_that_ends_well_leaves_the_store_as_it_is(coming: Coming) -> None:
    world, keys, read = coming
    plan = offer(world, keys)
    world.end(read)
    assert world.match(keys).blocks == 0, "the store's slots are the keys' own, and are being written"
    end_store(world, plan, keys)
    assert world.match(keys).blocks == 4
    world.manager.release("r")
    assert world.manager.free_slots(0) == 4


def test_a_store_that_fails_leaves_what_is_on_disk(coming: Coming) -> None:
    world, keys, read = coming
    plan = offer(world, keys)
    world.end(read)
    end_store(world, plan, keys, OpStatus.LANE_DOWN)
    assert world.hits(keys, "later") == 4


def test_a_streamed_load_takes_its_pages_from_the_read_all_the_same() -> None:
    keys = chain(3)
    world = written(keys, limits=traffic(streams=True))
    assert world.look(keys).blocks == 3
    (read,) = world.take()
    op = world.load(3)
    plan = offer(world, keys)
    assert len(plan.stored) == 3
    world.end(read)
    assert op.reads.tolist() == [read.op_id] * 3
    for slot, key in zip(op.slots.tolist(), keys, strict=True):
        assert world.host[0][slot] == (0, key.tobytes())
    assert len(world.end_load(op).failed_blocks) == 0
    end_store(world, plan, keys)
    assert world.match(keys, "later").blocks == 3


def test_blocks_that_the_read_itself_fills_are_not_copied_back() -> None:
    """Blocks that a load is filling are not stored when the load's own step offers them. A step plans its stores before
    its load has finished. If the load fails, the engine computes these blocks and offers them again.
    """
    keys = chain(4)
    world = written(keys, limits=traffic(streams=True))
    world.look(keys)
    (read,) = world.take()
    op = world.load(4)
    own = offer(world, keys, first_engine_block=0, name="r")
    shared = offer(world, keys, first_engine_block=0, name="shares the engine's blocks")
    for plan in (own, shared):
        assert (plan.graph, plan.known, plan.dropped) == (None, 4, 0)
    world.end(read)
    world.end_load(op)


def test_without_a_slot_they_are_dropped_and_may_be_offered_again() -> None:
    keys = chain(6)
    world = written(keys, slots=8)
    world.look(keys)
    (read,) = world.take()
    plan = offer(world, keys)
    assert (plan.stored.tolist(), plan.known, plan.dropped) == ([0, 1], 0, 4)
    world.end(read)
    end_store(world, plan, keys)
    world.manager.release("r")
    assert world.match(keys, "later").blocks == 6
    assert offer(world, keys).known == 6


def test_what_the_offer_has_already_is_not_evicted_for_the_rest() -> None:
    keys = chain(6)
    world = written(keys, slots=8)
    world.store(keys[:3])
    world.look(keys)
    (read,) = world.take()
    world.manager.release("r")
    plan = offer(world, keys)
    assert (plan.stored.tolist(), plan.known, plan.dropped) == ([3, 4], 3, 1)
    world.end(read)
    end_store(world, plan, keys)
    assert world.match(keys, "later").blocks == 6


def test_a_page_that_a_gds_load_found_bad_is_written_again_from_host_memory() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(gds_loads=GdsUse.ALWAYS))
    world.look(keys)
    op = world.load(4)
    end_store(world, offer(world, keys), keys)
    assert world.take() == []
    bad = np.array([1], np.int32)
    causes = np.array([FailureCause.CONTENT], np.uint8)
    world.manager.complete(0, OpResult(op.op_id, OpStatus.FAILED, bad, "why", causes=causes))
    (write,) = world.take()
    assert (write.kind, write.pages) == (OpKind.DISK_WRITE, 1)
    world.end(write)


class TakesReadsForStored(LocalCacheManager):
    """A broken manager that counts pages that are being read as stored, although they may never arrive."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        stores = self._store_route()
        stores._take_over = lambda offer, room: 0  # type: ignore[attr-defined]


def test_control_a_manager_that_takes_reads_for_stored_is_caught() -> None:
    assert "were called known" in caught_by(narrow_configs(), TakesReadsForStored)


def test_the_simulation_stores_what_is_being_read() -> None:
    assert any(Simulation(config).run().stored_while_read for config in narrow_configs())
