"""If blocks are offered for a GDS store while they are being read from disk, they must be stored, because the read may
still fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import NO_ENTRIES
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.facts.keys import Keys
from flexkv.simulation.run import Simulation
from flexkv.transfer.graph import FailureCause, OpKind, OpResult, OpStatus, TransferOp
from tests.unit.cache.broken_managers import caught_by
from tests.unit.cache.disk_world import BLOCK_TOKENS, NONE, DiskWorld, chain, traffic
from tests.unit.cache.test_disk_simulation import narrow_configs
from tests.unit.cache.test_gds_stores import end_seal, make_world, plan, seals, stripes
from tests.unit.cache.test_unverified_reads import all_fail, end_store

BLOCKS = 4


def stored_on_disk(keys: Keys, loads: GdsUse = GdsUse.ALWAYS) -> DiskWorld:
    """Returns a world that stores directly to disk, and whose disk already contains `keys`."""
    world = make_world(limits=traffic(gds_loads=loads, gds_stores=True))
    (op,) = plan(world, keys, "first").graph.ops  # type: ignore[union-attr]
    stripes(world, op)
    (seal,) = seals(world)
    end_seal(world, seal)
    return world


@pytest.fixture
def keys() -> Keys:
    return chain(BLOCKS)


@pytest.fixture
def loading(keys: Keys) -> tuple[DiskWorld, TransferOp]:
    """Returns a world with `keys` on disk, and the op of a GDS load that copies these pages to engine blocks 0 to 3.
    The load is in flight.
    """
    world = stored_on_disk(keys)
    assert world.look(keys).blocks == BLOCKS
    return world, world.load(BLOCKS)


def fail(world: DiskWorld, op: TransferOp, pages: list[int]) -> None:
    """Reports that `pages` of a GDS load had wrong content."""
    failed = np.array(pages, np.int32)
    causes = np.full(len(pages), FailureCause.CONTENT, np.uint8)
    world.manager.complete(0, OpResult(op.op_id, OpStatus.FAILED, failed, "why", causes=causes))
    world.manager.check_integrity()


def leading_hit(world: DiskWorld, keys: Keys) -> int:
    """Returns the number of blocks that are promised to another request after all copies have finished."""
    world.run()
    world.manager.end_request("r")
    blocks = world.look(keys, "later").blocks
    world.manager.release("later")
    return blocks


def test_blocks_whose_gds_load_fails_are_stored(loading: tuple[DiskWorld, TransferOp], keys: Keys) -> None:
    world, load = loading
    planned = plan(world, keys)
    assert (planned.stored.tolist(), planned.known, planned.dropped) == ([0, 1, 2, 3], 0, 0)
    fail(world, load, [1, 2, 3])
    end_store(world, planned, keys)
    assert leading_hit(world, keys) == BLOCKS
    assert world.tier.present(0, keys).all(), "what was bad on disk is written there again"


def test_blocks_stored_before_their_gds_load_fails_are_written_to_disk_again(
    loading: tuple[DiskWorld, TransferOp], keys: Keys
) -> None:
    world, load = loading
    end_store(world, plan(world, keys), keys)
    assert world.take() == [], "they are on disk, as far as is known"
    fail(world, load, [2])
    (write,) = world.take()
    assert (write.kind, write.pages) == (OpKind.DISK_WRITE, 1)
    world.end(write)
    assert world.tier.present(0, keys).all()


def test_a_gds_load_that_ends_well_costs_no_write(loading: tuple[DiskWorld, TransferOp], keys: Keys) -> None:
    world, load = loading
    planned = plan(world, keys)
    assert planned.graph is not None
    assert [op.kind for op in planned.graph.ops] == [OpKind.D2H]
    world.end_load(load)
    end_store(world, planned, keys)
    assert world.take() == []
    assert world.tier.present(0, keys).all()


def test_a_store_that_fails_leaves_what_is_on_disk(loading: tuple[DiskWorld, TransferOp], keys: Keys) -> None:
    world, load = loading
    planned = plan(world, keys)
    world.end_load(load)
    end_store(world, planned, keys, OpStatus.LANE_DOWN)
    assert leading_hit(world, keys) == BLOCKS


def test_blocks_that_the_gds_load_itself_fills_are_not_copied_back(
    loading: tuple[DiskWorld, TransferOp], keys: Keys
) -> None:
    world, load = loading
    own = world.manager.begin_store("r", 0, keys, load.blocks, 0)
    assert (own.graph, own.known, own.dropped) == (None, BLOCKS, 0)
    world.end_load(load)


def test_what_is_on_no_tier_goes_to_disk_beside_what_is_being_read(
    loading: tuple[DiskWorld, TransferOp],
) -> None:
    world, load = loading
    keys = chain(BLOCKS + 2)
    assert (chain(BLOCKS) == keys[:BLOCKS]).all()
    planned = plan(world, keys)
    assert planned.graph is not None
    to_disk, to_host = planned.graph.ops
    assert (to_disk.kind, to_disk.blocks.tolist()) == (OpKind.GDS_WRITE, [14, 15])
    assert (to_host.kind, to_host.blocks.tolist()) == (OpKind.D2H, [10, 11, 12, 13])
    assert planned.stored.tolist() == [4, 5, 0, 1, 2, 3], "in the order of the ops"
    assert (planned.known, planned.dropped) == (0, 0)
    # A failed load revokes its request's stores of later blocks, both the stores to disk and the stores to host memory.
    assert world.manager.discard_from("w", 5 * BLOCK_TOKENS) == 1
    assert world.manager.discard_from("w", 2 * BLOCK_TOKENS) == 3
    stripes(world, to_disk)
    done = world.manager.complete(0, OpResult(to_host.op_id, OpStatus.OK, NONE))
    assert done is not None
    assert done.published.tolist() == [0, 1]
    world.end_load(load)


def test_without_a_slot_they_are_dropped(loading: tuple[DiskWorld, TransferOp], keys: Keys) -> None:
    world, load = loading
    held = chain(6, seed=5)
    world.tier.hold("a test")
    (op,) = plan(world, held, "holds host memory").graph.ops  # type: ignore[union-attr]
    assert op.kind is OpKind.D2H
    world.tier.held = ""
    planned = plan(world, keys)
    assert (planned.stored.tolist(), planned.known, planned.dropped) == ([0, 1], 0, 2)
    world.end_load(load)


def test_what_the_offer_has_in_host_memory_is_not_evicted_for_the_rest(
    loading: tuple[DiskWorld, TransferOp], keys: Keys
) -> None:
    world, load = loading
    behind = chain(BLOCKS + 5)
    assert (behind[:BLOCKS] == keys).all()
    world.tier.hold("a test")
    world.store(behind[BLOCKS:])
    world.tier.held = ""
    planned = plan(world, behind)
    assert (planned.stored.tolist(), planned.known, planned.dropped) == ([0, 1, 2], 5, 1)
    world.end_load(load)


@pytest.fixture
def reading(keys: Keys) -> tuple[DiskWorld, TransferOp]:
    """Returns a world with `keys` on disk, and the op that reads these pages to host memory. The read is in flight."""
    world = stored_on_disk(keys)
    world.tier.straight.stop("a rank cannot")  # type: ignore[union-attr]
    world.look(keys)
    (read,) = world.take()
    assert read.kind is OpKind.DISK_READ
    return world, read


def test_blocks_whose_read_to_host_memory_fails_are_stored(
    reading: tuple[DiskWorld, TransferOp], keys: Keys
) -> None:
    world, read = reading
    planned = plan(world, keys)
    assert (planned.stored.tolist(), planned.known, planned.dropped) == ([0, 1, 2, 3], 0, 0)
    world.end(read, all_fail)
    end_store(world, planned, keys)
    assert leading_hit(world, keys) == BLOCKS
    assert world.tier.present(0, keys).all()


def test_blocks_of_a_disk_that_was_lost_under_their_read_are_stored_on_the_other(
    reading: tuple[DiskWorld, TransferOp], keys: Keys
) -> None:
    world, read = reading
    world.disk.lose(0)
    world.tier.lose(0)
    gone = [page for page, place in enumerate(read.places.tolist()) if place % 2 == 0]
    planned = plan(world, keys)
    assert planned.graph is not None
    to_disk, to_host = planned.graph.ops
    assert (to_disk.kind, to_host.kind) == (OpKind.GDS_WRITE, OpKind.D2H)
    assert planned.stored[: to_disk.pages].tolist() == gone
    world.end(read, all_fail)


class TakesReadsForStored(LocalCacheManager):
    """A broken manager that counts pages that are being read from disk as stored, although the read may fail."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.tables.ops.entries_read = lambda tier, group: NO_ENTRIES  # type: ignore[method-assign]


def test_control_a_manager_that_takes_reads_for_stored_is_caught() -> None:
    configs = narrow_configs(gds_loads=True, gds_stores=True)
    assert "were called known" in caught_by(configs, TakesReadsForStored)


def test_the_simulation_stores_what_is_being_read() -> None:
    configs = narrow_configs(gds_loads=True, gds_stores=True)
    assert any(Simulation(config).run().stored_while_read for config in configs)
