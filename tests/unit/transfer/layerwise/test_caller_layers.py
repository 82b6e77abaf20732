"""Tests loads whose caller takes each layer from the pipeline's buffer and writes it to the caller's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import LayerDevice
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import CallerLayers, PagedLayers
from flexkv.transfer.layerwise.rows import NoRows
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, ReorderingDevice, turn


def taking(world: LayerWorld, device: LayerDevice, kind: type[LoadPipeline] = LoadPipeline) -> LoadPipeline:
    layers = CallerLayers(world.layers, world.planes, world.heads, world.width, np.dtype(np.int32))
    numbers = np.arange(world.chunks.rows, dtype=np.int64)
    return kind(device, layers, numbers, world.chunks, turn, GENEROUS_S)


def load(
    world: LayerWorld,
    pipeline: LoadPipeline,
    lost: int | None = None,
    see: Callable[[Any], None] | None = None,
) -> dict[int, str]:
    """Acts as the caller: writes the chunks' rows of each layer to the slots of `world.memory`, and then takes the next
    step. The loads of the next layers begin before the caller writes. Returns the failed chunks, with reasons.

    Args:
        lost: the number of a chunk whose rows are missing from layer 1 on; None if no rows are missing.
        see: called with each layer's buffer.
    """

    def take(layer: int) -> list[Any]:
        sources = world.sources(layer)
        if lost is not None and layer == 1:
            sources[lost] = NoRows("gone")
        return sources

    blocks, tokens = world.paged.split(world.slots)
    steps = pipeline.run()
    next(steps)
    for layer in range(world.layers):
        steps.send(() if layer < pipeline.begun_layers else take(layer))
        pipeline.prefetch(take)
        rows = pipeline.get_kv(layer)
        if see is not None:
            see(rows)
        for number, chunk in enumerate(world.chunks.chunks):
            if layer and number == lost:
                assert number in pipeline.failed, "the caller knows it with the layer"
                continue
            at = world.chunks.rows_of(chunk)
            world.paged.write(layer, blocks[at], tokens[at], rows[:, at])
    report = next(steps)
    assert report is not None
    assert report.quiet
    return report.failed


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    "device_of", [lambda seed: HostDevice(True), lambda seed: HostDevice(False), ReorderingDevice]
)
def test_the_caller_gets_the_rows_of_chunks_that_a_scatter_writes(
    seed: int, device_of: Callable[[int], LayerDevice]
) -> None:
    world, device = LayerWorld(seed), device_of(seed)
    assert load(world, taking(world, device)) == {}
    assert world.same(expected(world))
    if isinstance(device, HostDevice):
        assert device.close(GENEROUS_S)


def expected(world: LayerWorld, lost_from: dict[int, int] | None = None) -> list[Any]:
    """Returns the content of the world's memory that is expected after a load. The caller does not write some rows, so
    these keep their content: the rows in gaps, and the rows of a lost chunk in the first layer in which it is lost and
    in all later layers.
    """
    found = world.expected()
    for layer, paged in enumerate(found):
        gaps = list(world.chunks.gaps)
        for number, first in (lost_from or {}).items():
            at = world.chunks.rows_of(world.chunks.chunks[number])
            gaps += range(at.start, at.stop) if layer >= first else ()
        blocks, tokens = world.paged.split(world.slots[gaps])
        paged[:, blocks, tokens] = world.before[layer][:, blocks, tokens]
    return found


def test_a_lost_chunk_is_named_with_its_layer(host: HostDevice) -> None:
    world = gapped_world()
    assert load(world, taking(world, host), lost=0) == {0: "layer 1: gone"}
    assert world.same(expected(world, {0: 1}))


def gapped_world() -> LayerWorld:
    return next(world for seed in range(30) if len((world := LayerWorld(seed, 4, planes=2)).chunks.gaps))


def values_of_gaps(world: LayerWorld, layers: CallerLayers | PagedLayers) -> set[int]:
    """Returns the values in the gaps of a load's buffers. When the device allocates memory, it fills the memory with
    77.
    """
    numbers = np.arange(world.chunks.rows, dtype=np.int64)
    slots = numbers if isinstance(layers, CallerLayers) else world.slots
    pipeline = LoadPipeline(ReorderingDevice(0), layers, slots, world.chunks, turn, GENEROUS_S)
    seen: set[int] = set()
    load(world, pipeline, see=lambda rows: seen.update(np.unique(rows[1, world.chunks.gaps]).tolist()))
    return seen


def test_rows_that_nobody_reads_are_not_zeroed() -> None:
    world = gapped_world()
    layers = CallerLayers(world.layers, 2, world.heads, world.width, np.dtype(np.int32))
    assert values_of_gaps(world, layers) == {77}


def test_control_paged_memory_gets_zeros() -> None:
    world = gapped_world()
    assert values_of_gaps(world, world.paged) == {0}


class NoScatterToLoad(LoadPipeline):
    """A control: a pipeline that refills a layer's buffer without waiting until the caller has taken the layer from
    it."""

    def _buffer_is_leaving(self, layer: int) -> bool:
        return True

    def _after_scatter(self, layer: int) -> None:
        pass


def test_control_a_buffer_that_is_filled_again_too_early_is_seen() -> None:
    world = LayerWorld(8, layers=6)
    device = HostDevice(one_thread=True)
    pipeline = taking(world, device, NoScatterToLoad)
    of_kv = pipeline.get_kv

    def late(layer: int) -> Any:
        buffer = of_kv(layer)
        assert pipeline.quiet(GENEROUS_S)
        return buffer

    pipeline.get_kv = late  # type: ignore[method-assign]
    load(world, pipeline)
    assert not world.same(expected(world))
    assert device.close(GENEROUS_S)


def test_nothing_is_written_for_the_caller(host: HostDevice) -> None:
    world = LayerWorld(9, layers=4)
    assert world.load(taking(world, host)).failed == {}
    assert world.same(world.before)


def test_a_layer_is_gone_after_its_step(host: HostDevice) -> None:
    world = LayerWorld(10, layers=3)
    pipeline = taking(world, host)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    steps.send(world.sources(1))
    with pytest.raises(ContractError, match="scatter is 1"):
        pipeline.get_kv(0)
    steps.close()
