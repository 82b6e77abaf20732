"""The layerwise pipeline rotates and scatters rows in one pass. The resulting bits are the same as with two passes, in
whatever order copies and layers are finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.blend.turned_scatter import TurnedScatter
from flexkv.errors import BlockRangeError, ContractError, GeometryError
from flexkv.transfer.layerwise.base import PipelineError, RowSource
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import NoRows, PageRows
from tests.unit.blend.turned_world import TurnedWorld
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, ReorderingDevice


@pytest.fixture(params=[True, False], ids=["one thread", "a thread for each stream"])
def host(request: pytest.FixtureRequest) -> Iterator[HostDevice]:
    device = HostDevice(one_thread=request.param)
    yield device
    assert device.close(GENEROUS_S)


def load(world: TurnedWorld, pipeline: LoadPipeline, lost: dict[int, int] | None = None) -> PipelineReport:
    """Runs the load of `world`. `lost` gives, for some chunks, the first layer whose rows do not arrive."""

    def take(layer: int) -> Sequence[RowSource]:
        return [
            NoRows("gone") if lost is not None and lost.get(number) == layer else PageRows([rows])
            for number, rows in enumerate(world.stored[layer])
        ]

    steps = pipeline.run()
    next(steps)
    for layer in range(world.layers):
        steps.send(take(layer))
    report = next(steps)
    assert report is not None
    return report


@pytest.mark.parametrize("seed", range(40))
def test_the_bits_of_two_passes(host: HostDevice, seed: int) -> None:
    world = TurnedWorld(seed)
    assert load(world, world.pipeline(host, world.memory)) == PipelineReport({}, True)
    assert world.same(world.expected())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_order_the_streams_run_in(seed: int) -> None:
    world = TurnedWorld(seed, layers=6)
    load(world, world.pipeline(ReorderingDevice(seed), world.memory))
    assert world.same(world.expected())


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_lost_chunk_become_zeros(host: HostDevice, seed: int) -> None:
    world = TurnedWorld(seed)
    chunk = seed % len(world.chunks.chunks)
    report = load(world, world.pipeline(host, world.memory), {chunk: 2})
    assert report.failed == {chunk: "layer 2: gone"}
    assert world.same(world.expected({chunk: 2}))


class NoLoadToScatter(LoadPipeline):
    def _after_transform(self, layer: int) -> None:
        pass


class NoScatterToLoad(LoadPipeline):
    def _after_scatter(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("broken", [NoLoadToScatter, NoScatterToLoad])
def test_a_missing_edge_is_found(broken: type[LoadPipeline]) -> None:
    wrong = 0
    for seed in range(30):
        world = TurnedWorld(seed, layers=6)
        report = load(world, world.pipeline(ReorderingDevice(seed), world.memory, broken))
        wrong += bool(report.failed) or not world.same(world.expected())
    assert wrong > 0


def test_control_values_or_positions_that_are_swapped_are_found(host: HostDevice) -> None:
    world = TurnedWorld(3)
    positions = world.chunks.positions()
    paged = PagedLayers([list(layer) for layer in world.memory])
    backwards = replace(positions, old=positions.new, new=positions.old)
    scatter = TurnedScatter(host, world.rotation, backwards, paged, world.slots)
    load(world, LoadPipeline(host, paged, world.slots, world.chunks, None, GENEROUS_S, scatter=scatter))
    assert not world.same(world.expected())


def test_a_layer_is_read_and_edited_in_paged_memory_once_it_is_scattered(host: HostDevice) -> None:
    world = TurnedWorld(5)
    pipeline = world.pipeline(host, world.memory)
    steps = pipeline.run()
    next(steps)
    expected = world.expected()
    steps.send([PageRows([rows]) for rows in world.stored[0]])
    with pytest.raises(ContractError, match="changes keys as it scatters"):
        pipeline.get_kv(0)
    for layer in range(1, world.layers):
        steps.send([PageRows([rows]) for rows in world.stored[layer]])
        assert pipeline.wait_scattered(layer - 1)
        np.testing.assert_array_equal(world.memory[layer - 1], expected[layer - 1])
        world.memory[layer - 1][:] = 0
    next(steps)
    for layer in range(world.layers - 1):
        assert not world.memory[layer].any(), "nothing comes after a layer was scattered"
    np.testing.assert_array_equal(world.memory[-1], expected[-1])


def test_what_breaks_is_said_to_who_waits(host: HostDevice) -> None:
    world = TurnedWorld(6)

    class Broken(PageRows):
        def copy_to(self, rows: np.ndarray) -> None:
            raise OSError("gone")

    pipeline = world.pipeline(host, world.memory)
    steps = pipeline.run()
    next(steps)
    for layer in range(2):
        steps.send([Broken([rows]) for rows in world.stored[layer]])
    with pytest.raises(PipelineError, match="OSError: gone"):
        pipeline.wait_scattered(0)
    steps.close()
    assert world.same(world.before)


def test_misuse_is_refused(host: HostDevice) -> None:
    world = TurnedWorld(7)
    paged = PagedLayers([list(layer) for layer in world.memory])
    positions, rotation = world.chunks.positions(), world.rotation
    scatter = TurnedScatter(host, rotation, positions, paged, world.slots)
    with pytest.raises(ContractError, match="and not both"):
        LoadPipeline(host, paged, world.slots, world.chunks, lambda *_: None, scatter=scatter)
    far = world.slots.copy()
    far[-1] = world.memory[0].shape[1] * world.block_tokens
    with pytest.raises(BlockRangeError, match="slot"):
        TurnedScatter(host, rotation, positions, paged, far)
    other = KeyRotation(rotation.spec, rotation.heads + 1, rotation.dtype)
    with pytest.raises(GeometryError, match="heads"):
        TurnedScatter(host, other, positions, paged, world.slots)
    backwards = PagedLayers([[plane[..., ::-1] for plane in layer] for layer in world.memory])
    with pytest.raises(GeometryError, match="strides"):
        TurnedScatter(host, rotation, positions, backwards, world.slots)


def test_tables_are_checked_before_they_go_to_a_device() -> None:
    rotation = TurnedWorld(1).rotation
    head_bytes = rotation.row_bytes // rotation.heads
    keys, target = np.zeros((2, 4 * rotation.row_bytes), np.uint8)
    places = RowPlaces(np.arange(4, dtype=np.int64) * rotation.row_bytes, head_bytes)
    table = rotation.table(np.arange(4), np.arange(4) + 1)
    rotation.check(keys, places, target, places, table)
    assert not target.any(), "no byte moved"
    beyond = RowPlaces(places.offsets + rotation.element_bytes, head_bytes)
    with pytest.raises(BlockRangeError, match="row 3"):
        rotation.check(keys, places, target, beyond, table)
    with pytest.raises(BlockRangeError, match="row 0 takes turn 9"):
        rotation.check(keys, places, target, places, TurnTable(np.full(4, 9, np.int32), table.turns))
