"""Tests loads of layers that begin before the layers' own steps. The bytes are right even if the caller edits a layer,
and the pipeline uses exactly the requested number of buffers.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import LayerDevice, RowSource
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import NoRows, PageRows
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, ReorderingDevice

EDIT = 5000


def load_with_edits(world: LayerWorld, pipeline: LoadPipeline) -> PipelineReport:
    """Loads all layers. In each layer, after the loads of the next layers have begun, sets the first row to EDIT plus
    the layer's number.
    """
    steps = pipeline.run()
    next(steps)
    for layer in range(world.layers):
        steps.send(() if layer < pipeline.begun_layers else world.sources(layer))
        pipeline.prefetch(world.sources)
        assert pipeline.begun_layers == min(layer + pipeline.prefetch_layers, world.layers)
        pipeline.get_kv(layer)[:, 0] = EDIT + layer
    report = next(steps)
    steps.close()
    assert report is not None
    return report


def edited(world: LayerWorld) -> list[Any]:
    expected, slot = world.expected(), int(world.slots[0])
    for layer, paged in enumerate(expected):
        paged[:, slot // world.block_tokens, slot % world.block_tokens] = EDIT + layer
    return expected


def devices(seed: int) -> list[LayerDevice]:
    return [HostDevice(one_thread=True), HostDevice(one_thread=False), ReorderingDevice(seed)]


@pytest.mark.parametrize("prefetch_layers", [2, 3, 5, 16])
@pytest.mark.parametrize("seed", range(15))
def test_the_same_bytes(seed: int, prefetch_layers: int) -> None:
    for device in devices(seed):
        world = LayerWorld(seed)
        report = load_with_edits(world, world.pipeline(device, LoadPipeline, prefetch_layers))
        assert report.failed == {}
        assert world.same(edited(world))
        if isinstance(device, HostDevice):
            assert device.close(GENEROUS_S)
        elif isinstance(device, ReorderingDevice):
            assert len(device.buffers) == prefetch_layers


class NoScatterToLoad(LoadPipeline):
    def _after_scatter(self, layer: int) -> None:
        pass


def test_a_missing_edge_is_found() -> None:
    wrong = 0
    for seed in range(30):
        world = LayerWorld(seed, layers=8)
        load_with_edits(world, world.pipeline(ReorderingDevice(seed), NoScatterToLoad, 3))
        wrong += not world.same(edited(world))
    assert wrong > 0


@pytest.mark.parametrize("one_thread", [True, False])
def test_the_next_layer_is_there_while_this_one_is_in_hand(one_thread: bool) -> None:
    device, world, loaded = HostDevice(one_thread), LayerWorld(6, layers=2), threading.Event()

    class Telling(PageRows):
        def copy_to(self, rows: Any) -> None:
            super().copy_to(rows)
            loaded.set()

    pipeline = world.pipeline(device)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    pipeline.prefetch(lambda layer: [Telling([rows]) for rows in world.stored[layer]])
    kv = pipeline.get_kv(0)
    assert loaded.wait(GENEROUS_S)
    kv[:, 0] = EDIT
    steps.send(())
    pipeline.get_kv(1)[:, 0] = EDIT + 1
    next(steps)
    assert world.same(edited(world))
    assert device.close(GENEROUS_S)


def test_misuse_is_refused() -> None:
    world = LayerWorld(1, layers=4)
    for number in (-1, 0, 1, 17):
        with pytest.raises(ContractError, match="prefetch_layers"):
            world.pipeline(ReorderingDevice(0), LoadPipeline, number)
    pipeline = world.pipeline(ReorderingDevice(0))
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    pipeline.prefetch(world.sources)
    with pytest.raises(ContractError, match="ahead of its step"):
        steps.send(world.sources(1))


@pytest.mark.parametrize("one_thread", [True, False])
def test_the_streams_of_a_host_device(one_thread: bool) -> None:
    device = HostDevice(one_thread)
    threads: list[int] = []
    for name in ("load", "compute", "store"):
        stream = device.stream(name)
        stream.run(lambda: threads.append(threading.get_ident()), name, 0)
        assert stream.record().wait(GENEROUS_S)
    assert len(set(threads)) == (1 if one_thread else 3)
    assert threading.get_ident() not in threads
    assert device.close(GENEROUS_S)


@pytest.mark.parametrize("one_thread", [True, False])
def test_the_caller_stops_half_way(one_thread: bool) -> None:
    device, world = HostDevice(one_thread), LayerWorld(9, layers=8)
    pipeline = world.pipeline(device, LoadPipeline, 4)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    pipeline.prefetch(world.sources)
    steps.send(())
    steps.close()
    assert pipeline.quiet(0.0), "what was begun ahead has ended too"
    assert device.close(GENEROUS_S)


def test_a_chunk_lost_ahead_of_its_step_is_named() -> None:
    device, world = HostDevice(), LayerWorld(10, layers=4)

    def take(layer: int) -> list[RowSource]:
        return [
            NoRows("the disk said no") if layer == 1 else world.sources(layer)[0],
            *world.sources(layer)[1:],
        ]

    pipeline = world.pipeline(device)
    steps = pipeline.run()
    next(steps)
    for layer in range(world.layers):
        steps.send(() if layer < pipeline.begun_layers else take(layer))
        pipeline.prefetch(take)
    report = next(steps)
    assert report is not None
    assert report.failed == {0: "layer 1: the disk said no"}
    assert world.same(world.expected({0: 1}))
    assert device.close(GENEROUS_S)
