"""Tests loads from disk to the engine that bypass host memory (GDS): each of their outcomes, and when the manager
chooses them.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import NO_BLOCK, ManagerLimits, TailCandidates
from flexkv.cache.ledger.cost import MIN_SAMPLES, RELIABLE_S, CostModel
from flexkv.cache.tiers.disk.load_route import REST_S, GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.simulation.world import DISK
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import FailureCause, OpKind, OpResult, OpStatus
from tests.unit.cache import disk_world
from tests.unit.cache.disk_world import BLOCK_TOKENS, NONE, DiskWorld, chain, traffic

ALWAYS = traffic(gds_loads=GdsUse.ALWAYS)
FASTER = traffic(gds_loads=GdsUse.WHERE_FASTER)


def written(keys: Keys, limits: DiskTraffic = ALWAYS, **kwargs: object) -> DiskWorld:
    """Returns a world that uses GDS loads, in which `keys` are on disk and not in host memory."""
    return disk_world.written(keys, limits=limits, **kwargs)


def test_what_is_on_disk_is_promised_and_loaded_where_it_lies() -> None:
    keys = chain(6)
    world = written(keys)
    world.store(keys[:2])
    result = world.look(keys)
    assert (result.blocks, result.reads, len(result.groups[0].slots)) == (6, 0, 2)
    assert world.take() == [], "nothing is read to host memory"
    in_host, from_disk = world.begin([10, 11, 12, 13, 14, 15]).ops
    assert (in_host.kind, in_host.blocks.tolist()) == (OpKind.H2D, [10, 11])
    assert (from_disk.kind, from_disk.blocks.tolist()) == (OpKind.GDS_READ, [12, 13, 14, 15])
    assert len(from_disk.slots) == 0
    assert [bytes(key) for key in tag_fields(from_disk.tags)["key"]] == [bytes(key) for key in keys[2:]]
    # The op's disk slots contain exactly these pages.
    for place, key in zip(from_disk.places.tolist(), keys[2:], strict=True):
        content = world.disk.content[0][place]
        assert content[0][0] == bytes(key)
    world.end_load(in_host)
    assert world.end_load(from_disk).failed_blocks.tolist() == []
    assert world.tier.counts.gds_read == 4
    assert world.tier.counts.read == 0


def test_a_page_that_failed_bars_the_stores_of_what_follows_and_no_other() -> None:
    """If a load fails at a page, the stores of the request's later blocks are revoked, and no others. The first two
    blocks come from host memory, so page 1 of the GDS load is block 3 of the promise.
    """
    keys = chain(6)
    world = written(keys)
    world.store(keys[:2])
    world.look(keys)
    _, from_disk = world.begin([10, 11, 12, 13, 14, 15]).ops
    others = chain(6, seed=1)
    plan = world.manager.begin_store("r", 0, others, np.arange(6, dtype=np.int32) + 30, 0)
    assert plan.graph is not None
    (store,) = plan.graph.ops
    world.end_load(from_disk, failed=[1])
    barred = world.manager.tables.ops.get(store.op_id).revoked  # type: ignore[attr-defined]
    assert barred.tolist() == [False] * 3 + [True] * 3


def test_a_page_that_did_not_verify_is_named_and_forgotten() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    assert world.end_load(world.load(4), failed=[2]).failed_blocks.tolist() == [2]
    assert len(world.tier) == 3
    counts = world.tier.counts
    assert (counts.gds_read, counts.failed_reads) == (3, 1)
    assert world.look(keys, "other").blocks == 2


@pytest.mark.parametrize("cause", list(FailureCause))
def test_only_a_page_whose_content_failed_is_forgotten(cause: FailureCause) -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    op = world.load(4)
    failed = np.array([1, 2, 3], np.int32)
    causes = np.array([cause, cause, FailureCause.NOT_EXECUTED], np.uint8)
    result = OpResult(op.op_id, OpStatus.FAILED, failed, "why", causes=causes)
    done = world.manager.complete(0, result)
    assert done is not None
    assert done.failed_blocks.tolist() == [1, 2, 3]
    forgotten = 2 if cause in (FailureCause.UNKNOWN, FailureCause.CONTENT) else 0
    assert len(world.tier) == 4 - forgotten
    # A page that the disk does not deliver is counted like a page with wrong content, for GDS loads and for reads to
    # host memory.
    counted = 2 if cause <= FailureCause.SOURCE else 0
    counts = world.tier.counts
    assert (counts.failed_reads, counts.unread) == (counted, 3 - counted)
    # If a GDS load would fail again, or the disk may be at fault, the page is read to host memory, where it is
    # verified.
    reads = 1 if cause in (FailureCause.SOURCE, FailureCause.TRANSPORT) else 0
    assert world.look(keys[:1], "next").reads == reads


def test_blames_that_do_not_fit_the_failed_pages_are_refused() -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    op = world.load(4)
    result = OpResult(
        op.op_id, OpStatus.FAILED, np.array([1, 2], np.int32), "why", causes=np.ones(1, np.uint8)
    )
    with pytest.raises(ContractError, match="1 causes for 2 failed pages"):
        world.manager.complete(0, result)


@pytest.mark.parametrize("status", [OpStatus.CANCELLED, OpStatus.LANE_DOWN])
def test_what_was_never_read_is_no_damage(status: OpStatus) -> None:
    keys = chain(4)
    world = written(keys)
    world.look(keys)
    assert len(world.end_load(world.load(4), failed=[0, 1, 2, 3], status=status).failed_blocks) == 4
    assert len(world.tier) == 4
    assert world.tier.counts.failed_reads == 0


@pytest.mark.parametrize("status", [OpStatus.FAILED, OpStatus.LANE_DOWN])
def test_after_a_lane_brought_nothing_pages_go_through_host_memory_for_a_while(status: OpStatus) -> None:
    keys, others = chain(4), chain(4, 100)
    world = written(np.concatenate((keys, others)))
    # A lane that delivered some pages of a load stays in use.
    world.look(others)
    world.end_load(world.load(4), failed=[3], status=OpStatus.FAILED)
    assert world.look(others[:3], "still").reads == 0
    world.manager.release("still")
    world.manager.end_request("r")
    world.look(keys)
    world.end_load(world.load(4), failed=[0, 1, 2, 3], status=status)
    keys = others[:3] if status is OpStatus.FAILED else keys
    assert world.look(keys, "soon").reads == 1
    world.run()
    world.manager.release("soon")
    world.drop_host()
    world.now_s += REST_S + 1
    result = world.look(keys, "later")
    assert (result.blocks, result.reads) == (len(keys), 0)


def test_places_are_kept_until_every_rank_has_reported() -> None:
    keys = chain(6)
    world = written(keys, places=6, manager_limits=ManagerLimits(ranks=2))
    world.look(keys)
    op = world.load(6)

    def left_after(seed: int) -> int:
        """Writes two more pages to disk. Returns how many of `keys` are still on disk."""
        world.drop_host()
        world.store(chain(2, seed), name=f"other {seed}")
        world.run()
        on_disk = {row[0] for row in world.disk.journal[0].values()}
        return len({bytes(key) for key in keys} & on_disk)

    assert left_after(5) == 6, "no place is free, and none may be taken"
    assert world.manager.complete(1, OpResult(op.op_id, OpStatus.OK, NONE)) is None
    assert left_after(6) == 6, "the other rank still reads"
    world.end_load(op)
    assert left_after(7) == 4


def test_a_promise_that_is_dropped_or_taken_in_part_lets_its_places_go() -> None:
    keys = chain(6)
    world = written(keys)
    world.look(keys)
    world.manager.release("r")
    world.manager.check_integrity()
    world.look(keys)
    (op,) = world.begin([5, NO_BLOCK, 7]).ops
    assert op.blocks.tolist() == [5, 7]
    world.end_load(op)
    assert world.tier.straight is not None
    assert world.tier.straight.pages == 0


def test_promises_share_the_room_for_loads() -> None:
    keys = chain(6)
    world = written(keys, manager_limits=ManagerLimits(inflight_load_pages=8))
    assert world.look(keys, "one").blocks == 6
    assert world.look(keys, "two").blocks == 2
    world.manager.release("one")
    assert world.look(keys, "three").blocks == 6


def test_a_store_waits_for_the_load_that_it_was_computed_from() -> None:
    keys = chain(6)
    world = written(keys[:4])
    world.look(keys)
    op = world.load(4)
    plan = world.manager.begin_store("r", 0, keys[4:], np.array([8, 9], np.int32), 4)
    assert plan.graph is not None
    world.end_load(op, failed=[3])
    done = world.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, np.empty(0, np.int32)))
    assert done is not None
    assert done.published.tolist() == []


def test_what_the_disks_have_only_a_part_of_comes_up() -> None:
    keys = chain(5)
    world = written(np.delete(keys, 3, axis=0))
    world.store(keys[3:4], first=3)
    for _, graph in world.manager.work.poll():
        for op in graph.ops:
            world.lane.submit(op)
    # Block 3 is only in host memory, because its write to disk has not finished.
    world.manager.work.poll()
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 1)


def test_a_tail_comes_up_when_the_blocks_before_it_are_with_the_engine() -> None:
    keys = chain(4)
    world = written(keys[:3])
    world.store(keys[3:], first=3, tokens=2)
    world.run()
    world.drop_host()
    tail = TailCandidates(keys[3:], np.array([2], np.int32), 3)
    result = world.manager.match("r", [keys[:3]], 0, [tail])
    assert (result.blocks, result.tail_tokens, result.reads) == (3, 0, 0), (
        "blocks in place come without a tail"
    )
    result = world.manager.match("r", [keys[:3]], 3 * BLOCK_TOKENS, [tail])
    assert (result.blocks, result.tail_tokens, result.reads) == (0, 0, 1)
    assert world.run() == [OpKind.DISK_READ]
    assert world.manager.match("r", [keys[:3]], 3 * BLOCK_TOKENS, [tail]).tail_tokens == 2


# --- GDS loads or loads through host memory ---


def through(world: DiskWorld, keys: np.ndarray, seconds: float) -> bool:
    """Loads `keys` in `seconds`, by a GDS load or through host memory as the manager chooses. Returns whether it was a
    GDS load.
    """
    world.drop_host()
    result = world.look(keys)
    if result.reads:
        (read,) = world.take()
        world.now_s += seconds / 2
        world.end(read)
        result = world.look(keys)
    assert result.blocks == len(keys)
    op = world.load(len(keys))
    by_gds = op.kind is OpKind.GDS_READ
    world.now_s += seconds if by_gds else seconds / 2
    world.end_load(op)
    return by_gds


def test_both_ways_are_tried_then_the_faster_is_taken() -> None:
    keys = chain(4)
    for gds_s, through_s in ((0.1, 0.4), (0.4, 0.1)):
        world = written(keys, FASTER)
        for _ in range(MIN_SAMPLES):
            assert through(world, keys, gds_s)
        for _ in range(MIN_SAMPLES):
            assert not through(world, keys, through_s)
        for _ in range(3):
            assert through(world, keys, min(gds_s, through_s)) == (gds_s < through_s)


def test_the_slower_way_is_tried_again_when_nothing_was_heard_of_it_for_long() -> None:
    keys = chain(4)
    world = written(keys, FASTER)
    for seconds in [0.4] * MIN_SAMPLES + [0.1] * MIN_SAMPLES:
        through(world, keys, seconds)
    ways = []
    for _ in range(12):
        # A GDS load is now faster than a load through host memory.
        ways.append(through(world, keys, 0.05))
        world.now_s += RELIABLE_S / 6
    assert not ways[0]
    assert ways.count(True) >= 1


def test_what_is_computed_sooner_is_left_to_the_engine() -> None:
    keys = chain(4)
    world = written(keys, FASTER)
    for _ in range(MIN_SAMPLES):
        through(world, keys, 1.0)
        world.manager.cost.compute.see(100, 0.01, world.now_s)
    for _ in range(MIN_SAMPLES):
        through(world, keys, 5.0)
        world.manager.cost.compute.see(100, 0.01, world.now_s)
    world.drop_host()
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 0)
    assert world.tier.counts.left_pages >= 4
    world.manager.check_integrity()


def test_a_choice_counts_what_is_queued_before() -> None:
    rates = CostModel()
    for _ in range(MIN_SAMPLES):
        rates.straight(DISK).see(10, 0.10, 0.0)
        rates.fetch(DISK).see(10, 0.09, 0.0)
        rates.load.see(10, 0.02, 0.0)
    assert rates.straight_is_faster(DISK, 10, 0, 0, 0.0)
    assert not rates.straight_is_faster(DISK, 10, 40, 0, 0.0)
    assert rates.straight_is_faster(DISK, 10, 40, 80, 0.0)
