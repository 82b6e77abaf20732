"""Tests the ops GDS_READ, GDS_WRITE and DISK_SEAL, which move blocks between pools and slabs without a host slot."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.config import GdsConfig
from flexkv.errors import BlockRangeError, CapacityError, ContractError, GeometryError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from tests.unit.gds.slab_world import Rank, SlabWorld
from tests.unit.storage.disk_world import ids

TRAILER_FIELDS = range(0, 96, 8)
"""Offset of one byte in every 8-byte word of the trailer's head. The trailer's digest covers all these words."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SlabWorld]:
    made = SlabWorld([tmp_path])
    yield made
    made.close()


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize(
    ("layers", "kv", "run", "ranks", "disks"),
    [
        (1, 1, 1, 1, 1),
        (3, 2, 1000, 2, 2),
        (3, 2, 4096, 1, 2),
        (5, 1, 18432, 3, 1),
        (80, 2, 4096, 1, 1),
    ],
)
def test_every_byte_comes_back_and_no_other_changes(
    tmp_path: Path, layers: int, kv: int, run: int, ranks: int, disks: int, block_first: bool, staged: bool
) -> None:
    folders = [tmp_path / str(disk) for disk in range(disks)]
    world = SlabWorld(folders, layers, kv, run, ranks, block_first=block_first, staged=staged)
    # There are more pages than staging slots, and their order is random.
    places, blocks, targets = [9, 2, 17, 4, 0, 11, 6], [3, 11, 0, 7, 5, 1, 8], [2, 0, 9, 10, 4, 6, 11]
    world.store(places, blocks)
    for number, rank in enumerate(world.ranks):
        stored = rank.by_block[blocks].copy()
        rank.memory[:] = 0x5A
        expected = rank.by_block.copy()
        expected[targets] = stored
        result = world.load(number, places, targets)
        assert (result.status, result.reason) == (OpStatus.OK, "")
        np.testing.assert_array_equal(rank.by_block, expected)
        counts = world.lanes[number].counts()
        assert (counts["written_pages"], counts["read_pages"]) == (7, 7)
        assert sum(counts["misses"].values()) == 0
    world.close()


def test_pages_are_the_disk_lanes_pages(tmp_path: Path) -> None:
    world = SlabWorld([tmp_path], ranks=2)
    world.store([5, 6], [1, 2])
    read = world.run(world.manager, world.op(OpKind.DISK_READ, [5, 6], slots=[0, 1]))
    assert read[0].reason == ""
    for number, rank in enumerate(world.ranks):
        at = world.codec.stripe_offset(number)
        for slot, block in ((0, 1), (1, 2)):
            stripe = world.pool.slot(slot)[at : at + rank.runs * rank.run]
            np.testing.assert_array_equal(stripe, rank.by_block[block].reshape(-1))
    # The opposite combination works too: the manager writes pages from host slots, and the ranks load them directly.
    written = world.run(world.manager, world.op(OpKind.DISK_WRITE, [20, 21], slots=[1, 0]))
    assert written[0].reason == ""
    for number, rank in enumerate(world.ranks):
        stored = rank.by_block[[2, 1]].copy()
        rank.memory[:] = 0
        assert world.load(number, [20, 21], [7, 8]).reason == ""
        np.testing.assert_array_equal(rank.by_block[[7, 8]], stored)
    world.close()


def test_one_call_a_page_or_one_a_layer(tmp_path: Path) -> None:
    calls = {}
    for staged in (True, False):
        world = SlabWorld([tmp_path / str(staged)], layers=8, staged=staged)
        world.store([0, 1, 2], [0, 1, 2])
        before = world.lanes[0].totals["io_calls"]
        assert world.load(0, [0, 1, 2], [3, 4, 5]).reason == ""
        calls[staged] = world.lanes[0].totals["io_calls"] - before
        direct = bool(world.unit._volumes[0] and world.unit._volumes[0].slabs[0].direct)
        world.close()
    assert calls == {True: 3, False: 3 * (16 + 1) if direct else 3}


def test_a_page_is_there_when_it_is_sealed_and_not_before(world: SlabWorld) -> None:
    written = world.write_stripes([3], [0])
    unsealed = world.load(0, [3], [1])
    assert unsealed.status is OpStatus.FAILED
    assert "disk miss (trailer)" in unsealed.reason
    assert world.seal([3], written[0].digests).reason == ""
    assert world.load(0, [3], [1]).reason == ""
    # New stripes are written under the old trailer, so the slot has neither the new page nor the old one.
    world.write_stripes([3], [5])
    before = world.ranks[0].memory.copy()
    torn = world.load(0, [3], [2])
    assert "disk miss (data)" in torn.reason
    assert torn.failed.tolist() == [0]
    np.testing.assert_array_equal(
        np.delete(world.ranks[0].by_block, 2, 0), np.delete(before.transpose(1, 0, 2), 2, 0)
    )


def test_a_seal_over_other_digests_makes_no_page(world: SlabWorld) -> None:
    written = world.write_stripes([3], [0])
    wrong = written[0].digests.copy()
    wrong[0, 4] ^= np.uint64(1)
    assert world.seal([3], wrong).reason == ""
    assert "disk miss (data) on disk 0, slot 3: digest mismatch in run 4" in world.load(0, [3], [1]).reason


@pytest.mark.parametrize(
    ("change", "miss"),
    [({"key": 1}, "key"), ({"later": 1}, "generation"), ({"epoch": 9}, "epoch"), ({"tokens": 7}, "tokens")],
)
def test_another_page_than_was_asked_for_stays_out_of_the_pool(
    world: SlabWorld, change: dict[str, int], miss: str
) -> None:
    world.store([3, 4], [0, 1])
    before = world.ranks[0].memory.copy()
    result = world.load(0, [3, 4], [5, 6], **change)
    assert f"disk miss ({miss})" in result.reason
    assert result.failed.tolist() == [0, 1]
    assert world.lanes[0].counts()["misses"][miss] == 2
    np.testing.assert_array_equal(world.ranks[0].memory, before)


@pytest.mark.parametrize("part", ["stripe", "digests", *TRAILER_FIELDS])
@pytest.mark.parametrize("staged", [True, False])
def test_a_flipped_bit_costs_its_page_only(tmp_path: Path, part: str | int, staged: bool) -> None:
    world = SlabWorld([tmp_path], ranks=2, staged=staged)
    world.store([0, 1, 2], [0, 1, 2])
    offset = world.codec.stripe_offset(1) + 5000
    if part == "digests":
        offset = world.codec.digest_offset(1)
    elif isinstance(part, int):
        offset = world.codec.trailer_offset + part
    world.flip(1, offset)
    stored = world.ranks[1].by_block[[0, 2]].copy()
    result = world.load(1, [0, 1, 2], [9, 10, 11])
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [1])
    assert "disk miss" in result.reason
    np.testing.assert_array_equal(world.ranks[1].by_block[[9, 11]], stored)
    # The damage is in rank 1's stripe or in the trailer. Rank 0 can still load the page if only rank 1's stripe is
    # damaged.
    assert world.load(0, [1], [9]).status is (OpStatus.OK if part == "stripe" else OpStatus.FAILED)
    world.close()


def test_a_slab_that_ends_early_and_a_disk_that_is_lost(tmp_path: Path) -> None:
    world = SlabWorld([tmp_path / "a", tmp_path / "b"])
    world.store([0, 1, 2, 3], [0, 1, 2, 3])
    os.truncate(world.slabs.disks[0][0].path, world.image_at(2) + 4096)
    result = world.load(0, [0, 1, 2, 3], [4, 5, 6, 7])
    assert result.failed.tolist() == [2]
    assert "disk miss (short)" in result.reason
    world.unit._lose(1, "a test")
    lane = make_gds_lane(world.unit.slab_map(), 0, None, GdsConfig())
    engine = TransferEngine(lanes=[lane])
    engine.attach_view(0, world.ranks[0].view, world.pool, 0)
    (lost,) = world.run(engine, world.op(OpKind.GDS_READ, [0, 1], [4, 5]))
    assert lost.failed.tolist() == [1]
    assert "disk 1 was not there" in lost.reason
    assert lane.counts()["misses"]["disk_lost"] == 1
    world.engines.append(engine)
    world.close()


def test_a_view_of_other_runs_moves_nothing(world: SlabWorld) -> None:
    world.store([0], [0])
    lane = make_gds_lane(world.slabs, 0, None, GdsConfig())
    engine = TransferEngine(lanes=[lane])
    other = Rank(2, 3, 4096, 4, False, 0)
    engine.attach_view(0, other.view, world.pool, 0)
    before = other.memory.copy()
    (result,) = world.run(engine, world.op(OpKind.GDS_READ, [0], [0]))
    assert "the slabs have other runs" in result.reason
    np.testing.assert_array_equal(other.memory, before)
    world.engines.append(engine)


def test_what_cannot_run_is_refused_before_it_starts(world: SlabWorld) -> None:
    def refused(op: TransferOp, error: type[Exception], words: str, engine: TransferEngine) -> None:
        with pytest.raises(error, match=words):
            engine.submit(TransferGraph((op,)))

    rank, manager = world.engines[0], world.manager
    read = OpKind.GDS_READ
    refused(world.op(read, [32], [0]), BlockRangeError, r"place 32 .* \[0, 32\)", rank)
    refused(world.op(read, [-1], [0]), BlockRangeError, "place -1", rank)
    refused(world.op(read, [0], [12]), BlockRangeError, "block 12", rank)
    refused(world.op(read, [0, 1], [4, 4]), ContractError, "block 4 is a target of two", rank)
    refused(world.op(OpKind.GDS_WRITE, [1, 1], [4, 5]), ContractError, "place 1 is a target of two", rank)
    refused(world.op(read, [0], [0], slots=[0]), ContractError, "GDS_READ needs", rank)
    refused(world.op(read, [0, 1], [0]), ContractError, "1 blocks for 2 places", rank)
    digests = np.zeros((1, 6), np.uint64)
    refused(world.op(read, [0], [0], digests=digests), ContractError, "DISK_SEAL only", rank)
    layerwise = world.op(OpKind.GDS_WRITE, [0], [0])
    object.__setattr__(layerwise, "layerwise", True)
    refused(layerwise, ContractError, "never layerwise", rank)
    refused(world.op(OpKind.DISK_SEAL, [0]), ContractError, "0 run digests for 1 pages of 6 runs", manager)
    refused(world.op(OpKind.DISK_SEAL, [0, 1], digests=digests), ContractError, "6 run digests", manager)
    refused(world.op(read, [0], [0]), ContractError, "no view attached|no lane for GDS_READ", manager)


def test_one_place_may_be_read_into_several_blocks(world: SlabWorld) -> None:
    world.store([3], [0])
    assert world.load(0, [3, 3, 3], [5, 6, 7]).reason == ""
    stored = world.ranks[0].by_block[0]
    for block in (5, 6, 7):
        np.testing.assert_array_equal(world.ranks[0].by_block[block], stored)


def test_a_page_that_was_promised_is_loaded_though_it_has_expired_since(tmp_path: Path) -> None:
    world = SlabWorld([tmp_path])
    world.store([0, 1], [2, 3], expiry=1)
    wanted = world.ranks[0].by_block[[2, 3]].copy()
    assert world.load(0, [0, 1], [4, 5]).reason == ""
    assert np.array_equal(world.ranks[0].by_block[[4, 5]], wanted)
    # The control: a fetch to host memory was not promised to a request. So the fetch treats the page as expired.
    (fetched,) = world.run(world.manager, world.op(OpKind.DISK_READ, [0], (), [3]))
    assert "expired" in fetched.reason
    world.close()


def test_staging_is_bounded_and_arguments_win(tmp_path: Path) -> None:
    world = SlabWorld([tmp_path], staging_blocks=2)
    world.store(list(range(10)), list(range(10)))
    assert world.load(0, list(range(10)), list(range(10))).reason == ""
    assert world.lanes[0].staging_bytes == 2 * world.codec.image_bytes
    config = GdsConfig(max_staging_blocks=64, use_staged_transfer=True)
    lane = make_gds_lane(world.slabs, 0, None, config, use_staged_transfer=False, max_staging_blocks=1)
    engine = TransferEngine(lanes=[lane])
    engine.attach_view(0, world.ranks[0].view, world.pool, 0)
    world.engines.append(engine)
    assert world.run(engine, world.op(OpKind.GDS_READ, [0, 1], [0, 1]))[0].reason == ""
    assert lane.staging_bytes <= world.codec.image_bytes
    world.close()


def test_staging_is_taken_when_the_lane_is_opened(tmp_path: Path) -> None:
    world = SlabWorld([tmp_path])
    (lane,) = world.lanes
    assert lane.totals["transfers"] == 0
    assert lane.staging_bytes == 3 * world.codec.image_bytes
    world.store([0], [0])
    assert lane.staging_bytes == 3 * world.codec.image_bytes
    with pytest.raises(CapacityError, match=r"raise gds.max_staging_bytes"):
        make_gds_lane(world.slabs, 0, None, GdsConfig(max_staging_bytes=4096), views=[world.ranks[0].view])
    with pytest.raises(GeometryError, match="the slabs have other runs"):
        make_gds_lane(world.slabs, 0, None, GdsConfig(), views=[Rank(2, 3, 4096, 4, False, 0).view])
    with pytest.raises(ContractError, match=r"group 1: the gds lane has groups \[0, 1\)"):
        make_gds_lane(world.slabs, 0, None, GdsConfig(), views=[world.ranks[0].view] * 2)
    world.close()


def test_staging_holds_no_more_than_a_lane_moves_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = SlabWorld([tmp_path], run=1 << 20, blocks=2, staging_blocks=None)
    (lane,) = world.lanes
    image = world.codec.image_bytes
    assert (lane.staging_slots, lane.staging_slot_bytes) == ((40 << 20) // image + 1, image)
    assert lane.staging_bytes == lane.staging_slots * image
    (line,) = [r.message for r in caplog.records if "max_staging" in r.message]
    assert line.startswith(f"slabs of group 0: {lane.staging_slots} staging slots of 6.0 MiB")
    assert "gds.max_staging_blocks = 64 asks for" in line
    assert "what a lane moves at once takes no more" in line
    world.store([0, 1], [0, 1])
    assert world.load(0, [1, 0], [0, 1]).reason == ""
    world.close()


def test_cancelled_loads_and_reused_blocks(world: SlabWorld) -> None:
    world.store(list(range(12)), list(range(12)))
    engine, rank = world.engines[0], world.ranks[0]
    stored = rank.by_block[:6].copy()
    dropped = 0
    for _ in range(100):  # repeats until a cancel comes before the disk read begins
        ops = [world.op(OpKind.GDS_READ, list(range(6)), list(range(6))) for _ in range(12)]
        ops.append(world.op(OpKind.GDS_READ, list(range(6, 12)), list(range(6, 12))))
        tickets = [ticket for op in ops if (ticket := engine.submit(TransferGraph((op,))))]
        assert len(tickets) == len(ops)
        dropped = engine.cancel(tickets[-1])
        assert engine.wait(tickets[-1], 60.0)
        # The cancelled op's blocks belong to the engine again, although other ops are still in flight. No op may
        # overwrite the bytes that the engine writes to these blocks.
        rank.by_block[6:] = 0x11
        for ticket in tickets:
            assert engine.wait(ticket, 60.0)
        results = {result.op_id: result for result in engine.poll()}
        assert all(results[op.op_id].status is OpStatus.OK for op in ops[:-1])
        assert len(results[ops[-1].op_id].failed) == dropped
        assert (rank.by_block[6:] == 0x11).all()
        np.testing.assert_array_equal(rank.by_block[:6], stored)
        if dropped:
            break
    assert dropped, "nothing was ever cancelled before it had moved"
    # The control: a load that is not cancelled does write to these blocks.
    assert world.load(0, list(range(6, 12)), list(range(6, 12))).reason == ""
    assert not (rank.by_block[6:] == 0x11).all(axis=(1, 2)).any()


def test_an_op_travels_with_its_digests() -> None:
    digests = np.arange(12, dtype=np.uint64).reshape(2, 6)
    tags = np.zeros((2, 40), np.uint8)
    op = TransferOp(
        OpId(7), OpKind.DISK_SEAL, 0, Priority.STORE, ids([]), ids([]), False, ids([3, 4]), tags, digests
    )
    back = pickle.loads(pickle.dumps(op))
    assert (back.kind, back.pages) == (OpKind.DISK_SEAL, 2)
    np.testing.assert_array_equal(back.digests, digests)
