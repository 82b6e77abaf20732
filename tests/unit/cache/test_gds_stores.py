"""Tests stores from engine blocks to disk that bypass host memory. Each rank writes its stripes. Then the manager's
lane writes the trailers (the seal). Each outcome of both steps is tested.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import ManagerLimits, StorePlan
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.simulation.symbolic_volumes import identities
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import NO_DIGESTS, OpKind, OpResult, OpStatus, TransferOp
from tests.unit.cache.disk_world import DiskWorld, chain, traffic

LIMITS = traffic(gds_loads=GdsUse.ALWAYS, gds_stores=True)
NONE = np.empty(0, np.int32)


def make_world(ranks: int = 1, limits: DiskTraffic = LIMITS, places: int = 32) -> DiskWorld:
    return DiskWorld(limits=limits, manager_limits=ManagerLimits(ranks=ranks), places=places)


def plan(world: DiskWorld, keys: np.ndarray, name: str = "w", tokens: int | None = None) -> StorePlan:
    planned = world.manager.begin_store(name, 0, keys, np.arange(len(keys), dtype=np.int32) + 10, 0, tokens)
    world.manager.check_integrity()
    return planned


def stripes(world: DiskWorld, op: TransferOp, rank: int = 0, failed: list[int] | None = None) -> None:
    """Reports that one rank has written its stripes. The digest that it reports for a page is 100 * rank + page."""
    digests = (100 * rank + np.arange(op.pages, dtype=np.uint64))[:, None]
    status = OpStatus.FAILED if failed else OpStatus.OK
    bad = np.array(failed or [], np.int32)
    if failed and len(failed) == op.pages:
        digests = NO_DIGESTS
    world.manager.complete(rank, OpResult(op.op_id, status, bad, "why" if failed else "", digests))
    world.manager.check_integrity()


def seals(world: DiskWorld) -> list[TransferOp]:
    ops = [op for _, graph in world.manager.work.poll() for op in graph.ops]
    assert all(op.kind is OpKind.DISK_SEAL for op in ops)
    return ops


def end_seal(
    world: DiskWorld, op: TransferOp, status: OpStatus = OpStatus.OK, failed: tuple[int, ...] = ()
) -> None:
    if status is OpStatus.OK:
        # Gives the simulated disk the content that a seal leaves on it.
        for place, identity in zip(op.places.tolist(), identities(op), strict=True):
            world.disk.content[0][place] = (identity, [])
    world.manager.work.complete(OpResult(op.op_id, status, np.array(failed, np.int32), "why"))
    world.manager.check_integrity()


def on_disk(world: DiskWorld, keys: np.ndarray) -> int:
    return len(world.tier.leading(0, keys))


def test_a_page_is_on_disk_when_its_seal_has_ended() -> None:
    world, keys = make_world(), chain(4)
    (op,) = plan(world, keys).graph.ops  # type: ignore[union-attr]
    assert (op.kind, op.blocks.tolist(), len(op.slots)) == (OpKind.GDS_WRITE, [10, 11, 12, 13], 0)
    assert on_disk(world, keys) == 0
    stripes(world, op)
    assert on_disk(world, keys) == 0
    (seal,) = seals(world)
    assert world.manager.work.moving
    np.testing.assert_array_equal(seal.places, op.places)
    np.testing.assert_array_equal(seal.tags, op.tags)
    end_seal(world, seal)
    assert on_disk(world, keys) == 4
    assert world.manager.cached_blocks() == 0
    assert not world.manager.work.moving
    assert world.manager.match("r", [keys], 0).blocks == 4


def test_digests_of_all_ranks_lie_side_by_side_in_their_order() -> None:
    world, keys = make_world(ranks=2), chain(3)
    (op,) = plan(world, keys).graph.ops  # type: ignore[union-attr]
    stripes(world, op, rank=1)
    assert seals(world) == [], "not every rank has written"
    stripes(world, op, rank=0, failed=[1])
    (seal,) = seals(world)
    assert seal.digests.tolist() == [[0, 100], [2, 102]]
    np.testing.assert_array_equal(seal.places, op.places[[0, 2]])
    end_seal(world, seal)
    assert world.tier.present(0, keys).tolist() == [True, False, True]
    assert world.tier.counts.failed_writes == 1


def test_a_store_that_failed_gives_its_places_back() -> None:
    world, keys = make_world(places=4), chain(4)
    (op,) = plan(world, keys).graph.ops  # type: ignore[union-attr]
    assert plan(world, chain(2, seed=1), "other").dropped == 2, "every place is being written"
    stripes(world, op, failed=[0, 1, 2, 3])
    assert seals(world) == []
    assert plan(world, chain(4, seed=2), "other").dropped == 0


@pytest.mark.parametrize("status", [OpStatus.FAILED, OpStatus.CANCELLED, OpStatus.LANE_DOWN])
def test_a_seal_that_failed_makes_no_page(status: OpStatus) -> None:
    world, keys = make_world(), chain(2)
    (op,) = plan(world, keys).graph.ops  # type: ignore[union-attr]
    stripes(world, op)
    (seal,) = seals(world)
    end_seal(world, seal, status, (0, 1))
    assert on_disk(world, keys) == 0
    assert world.disk.journal[0] == {}


def test_what_either_tier_has_is_not_stored_again() -> None:
    world, keys = make_world(), chain(4)
    (op,) = plan(world, keys[:2]).graph.ops  # type: ignore[union-attr]
    again = plan(world, keys, "other")
    assert (again.stored.tolist(), again.known) == ([2, 3], 2)
    assert again.graph is not None
    assert again.graph.ops[0].blocks.tolist() == [12, 13]
    stripes(world, op)
    stripes(world, again.graph.ops[0])
    for seal in seals(world):
        end_seal(world, seal)
    assert plan(world, keys).graph is None
    assert on_disk(world, keys) == 4


def test_stores_have_a_bound() -> None:
    limits = traffic(gds_loads=GdsUse.ALWAYS, gds_stores=True, write_pages=3)
    world, keys = make_world(limits=limits), chain(5)
    planned = plan(world, keys)
    assert (len(planned.stored), planned.dropped) == (3, 2)
    (op,) = planned.graph.ops  # type: ignore[union-attr]
    stripes(world, op)
    assert plan(world, keys[3:]).dropped == 2, "a page counts until it is sealed"
    (seal,) = seals(world)
    end_seal(world, seal)
    assert plan(world, keys[3:]).dropped == 0


def test_what_was_computed_from_a_failed_load_is_not_sealed() -> None:
    world, keys = make_world(), chain(6)
    (op,) = plan(world, keys[:4]).graph.ops  # type: ignore[union-attr]
    stripes(world, op)
    (seal,) = seals(world)
    end_seal(world, seal)
    assert world.manager.match("r", [keys], 0).blocks == 4
    graph = world.manager.begin_load("r", [np.arange(4, dtype=np.int32)])
    assert graph is not None
    stored = world.manager.begin_store("r", 0, keys[4:], np.array([8, 9], np.int32), 4)
    assert stored.graph is not None
    world.manager.complete(0, OpResult(graph.ops[0].op_id, OpStatus.FAILED, np.array([3], np.int32)))
    assert on_disk(world, keys) == 3
    # The first store was revoked, so its blocks may be stored again at once.
    again = world.manager.begin_store("r", 0, keys[4:], np.array([8, 9], np.int32), 4)
    assert again.stored.tolist() == [0, 1]
    stripes(world, stored.graph.ops[0])
    assert seals(world) == []


def test_a_reset_before_and_within_the_seal() -> None:
    world = make_world()
    first, second = chain(2), chain(2, seed=1)
    (early,) = plan(world, first, "a").graph.ops  # type: ignore[union-attr]
    (late,) = plan(world, second, "b").graph.ops  # type: ignore[union-attr]
    stripes(world, late)
    (seal,) = seals(world)
    world.manager.reset()
    world.manager.check_integrity()
    stripes(world, early)
    assert seals(world) == []
    world.manager.work.complete(OpResult(seal.op_id, OpStatus.OK, NONE))
    world.manager.check_integrity()
    assert on_disk(world, first) == on_disk(world, second) == 0
    assert world.disk.journal[0] == {}


def test_without_disks_stores_go_to_host_memory() -> None:
    world, keys = make_world(), chain(2)
    world.manager.work.take_down(DISK, "a test")
    (op,) = plan(world, keys).graph.ops  # type: ignore[union-attr]
    assert op.kind is OpKind.D2H


def test_a_tail_is_stored_with_its_tokens() -> None:
    world, keys = make_world(), chain(1)
    (op,) = plan(world, keys, tokens=2).graph.ops  # type: ignore[union-attr]
    stripes(world, op)
    (seal,) = seals(world)
    end_seal(world, seal)
    ((_, _, tokens, _),) = world.disk.journal[0].values()
    assert tokens == 2
