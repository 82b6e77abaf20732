"""In a layerwise GDS_READ, the layers of a page arrive in ranges, into any kind of pool, and each range is verified
separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv.transfer.graph import NO_DIGESTS, FailureCause, OpKind, OpResult, OpStatus, TransferGraph
from tests.unit.gds.slab_world import SlabWorld
from tests.unit.storage.disk_world import GENEROUS_S

LAYERS, KV, RUN = 9, 2, 1000
RANGES = (0, 1, 3)
"""The first layer of each range of the nine layers. The last range has six layers."""


def load(world: SlabWorld, places: list[int], blocks: list[int], rank: int = 0) -> OpResult:
    """Runs a layerwise load and waits for each layer in turn. Returns the load's result."""
    engine = world.engines[rank]
    op = replace(world.op(OpKind.GDS_READ, places, blocks, (), NO_DIGESTS), layerwise=True)
    ticket = engine.submit(TransferGraph((op,)))
    assert ticket is not None
    for layer in range(world.ranks[rank].view.num_layers):
        assert engine.wait_layer(ticket, layer, GENEROUS_S).in_time
    assert engine.wait(ticket, GENEROUS_S)
    return engine.poll()[0]


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize(
    ("layers", "kv", "run", "ranks", "disks"),
    [(1, 1, 1, 1, 1), (2, 2, 4096, 1, 1), (LAYERS, KV, RUN, 2, 2), (33, 1, 18432, 1, 2), (80, 2, 4096, 1, 1)],
)
def test_every_byte_comes_back_and_no_other_changes(
    tmp_path: Path, layers: int, kv: int, run: int, ranks: int, disks: int, block_first: bool, staged: bool
) -> None:
    folders = [tmp_path / str(disk) for disk in range(disks)]
    world = SlabWorld(folders, layers, kv, run, ranks, block_first=block_first, staged=staged)
    places, blocks, targets = [9, 2, 17, 4, 0, 11, 6], [3, 11, 0, 7, 5, 1, 8], [2, 0, 9, 10, 4, 6, 11]
    world.store(places, blocks)
    for number, rank in enumerate(world.ranks):
        stored = rank.by_block[blocks].copy()
        rank.memory[:] = 0x5A
        expected = rank.by_block.copy()
        expected[targets] = stored
        result = load(world, places, targets, number)
        assert (result.status, result.reason) == (OpStatus.OK, "")
        np.testing.assert_array_equal(rank.by_block, expected)
        counts = world.lanes[number].counts()
        assert counts["read_pages"] == 7
        assert sum(counts["misses"].values()) == 0
    world.close()


@pytest.fixture(params=[False, True], ids=["layer-first", "block-first"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlabWorld]:
    made = SlabWorld([tmp_path], LAYERS, KV, RUN, block_first=request.param, staged=not request.param)
    made.store([0, 1, 2], [0, 1, 2])
    yield made
    made.close()


@pytest.mark.parametrize("run", range(LAYERS * KV))
def test_a_flipped_bit_in_any_run_is_found_and_ranges_before_it_are_good(world: SlabWorld, run: int) -> None:
    rank = world.ranks[0]
    stored = rank.by_block[[0, 1, 2]].copy()
    world.flip(1, run * RUN + RUN // 2)
    rank.memory[:] = 0
    result = load(world, [0, 1, 2], [5, 6, 7])
    assert (result.failed.tolist(), result.causes.tolist()) == ([1], [FailureCause.CONTENT])
    layer = run // KV
    assert f"digest mismatch in run {run} (layer {layer})" in result.reason
    good = max(first for first in RANGES if first <= layer) * KV
    np.testing.assert_array_equal(rank.by_block[[5, 7]], stored[[0, 2]])
    np.testing.assert_array_equal(rank.by_block[6][:good], stored[1][:good])
    assert world.lanes[0].counts()["misses"]["data"] == 1


@pytest.mark.parametrize("change", [{"key": 1}, {"later": 1}, {"epoch": 7}])
def test_another_page_is_refused_at_its_first_range(world: SlabWorld, change: dict[str, int]) -> None:
    before = world.ranks[0].memory.copy()
    op = world.op(OpKind.GDS_READ, [1], [6], (), NO_DIGESTS, **change)
    (result,) = world.run(world.engines[0], replace(op, layerwise=True))
    assert result.failed.tolist() == [0]
    assert result.causes.tolist() == [FailureCause.CONTENT]
    if world.lanes[0].totals["straight_pages"] == 0:
        np.testing.assert_array_equal(world.ranks[0].memory, before)


def test_ranges_read_the_trailer_each_and_little_else_twice(tmp_path: Path) -> None:
    """A layerwise read reads the trailer again for each range. It reads no other byte twice if the ranges begin and end
    at sector boundaries, as in this test.
    """
    read = {}
    for layerwise in (False, True):
        world = SlabWorld([tmp_path / str(layerwise)], 32, 2, 4096)
        world.store([0, 1], [0, 1])
        before = world.lanes[0].totals["io_bytes"]
        op = replace(world.op(OpKind.GDS_READ, [0, 1], [4, 5], (), NO_DIGESTS), layerwise=layerwise)
        (result,) = world.run(world.engines[0], op)
        assert result.reason == ""
        read[layerwise] = world.lanes[0].totals["io_bytes"] - before
        trailer = world.codec.image_bytes - 32 * 2 * 4096
        world.close()
    assert read[True] == read[False] + 2 * 3 * trailer
