"""The load pipeline against a straight reference, its timing table, its edges, its faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flexkv.errors import BlockRangeError, ContractError, GeometryError
from flexkv.transfer.layerwise.base import Event, LostRows, PipelineError, Stream
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice, HostStream
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.rows import ArrayRows, NoRows

from .layer_world import GENEROUS_S, LayerWorld, ReorderingDevice, turn


@pytest.fixture(params=[True, False], ids=["one thread", "a thread for each stream"])
def host(request: pytest.FixtureRequest) -> Iterator[HostDevice]:
    device = HostDevice(one_thread=request.param)
    yield device
    assert device.close(GENEROUS_S), "a stream's thread did not end"


# --- the bytes ---


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_straight_reference(host: HostDevice, seed: int) -> None:
    world = LayerWorld(seed)
    report = world.load(world.pipeline(host))
    assert report.quiet
    assert report.failed == {}
    assert world.same(world.expected())


@pytest.mark.parametrize("layers", [1, 2, 3, 32, 80])
@pytest.mark.parametrize("planes", [1, 2])
def test_any_number_of_layers(host: HostDevice, layers: int, planes: int) -> None:
    world = LayerWorld(1000 + layers, layers, planes)
    world.load(world.pipeline(host))
    assert world.same(world.expected())


@pytest.mark.parametrize("seed", range(60))
def test_whatever_order_the_streams_run_in(seed: int) -> None:
    world = LayerWorld(seed, layers=6)
    world.load(world.pipeline(ReorderingDevice(seed)))
    assert world.same(world.expected())


# --- the edges: without one of them some order gives other bytes ---


class NoScatterToLoad(LoadPipeline):
    def _after_scatter(self, layer: int) -> None:
        pass


class NoTransformToScatter(LoadPipeline):
    def _after_transform(self, layer: int) -> None:
        pass


class NoLoadToTransform(LoadPipeline):
    def _after_load(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("broken", [NoScatterToLoad, NoTransformToScatter, NoLoadToTransform])
def test_a_missing_edge_is_found(broken: type[LoadPipeline]) -> None:
    wrong = 0
    for seed in range(30):
        world = LayerWorld(seed, layers=6)
        pipeline = world.pipeline(ReorderingDevice(seed), broken)
        report = world.load(pipeline)
        wrong += bool(report.failed) or not world.same(world.expected())
    assert wrong > 0


# --- the schedule ---


def test_layer_n_is_scattered_at_step_n_plus_2() -> None:
    world = LayerWorld(3, layers=32)
    device = ReorderingDevice(0)
    steps = world.pipeline(device).run()
    of_step: list[list[tuple[str, int]]] = []

    def took(step: Any) -> None:
        of_step.append(list(device.given))
        device.given.clear()

    took(next(steps))
    for layer in range(world.layers):
        took(steps.send(world.sources(layer)))
    took(next(steps))
    given = [work for step in of_step for work in step]
    table: list[tuple[str, int]] = []
    for step in range(world.layers + 2):
        table += [("scatter", step - 2)] if step > 1 else []
        table += [("transform", step - 1)] if 0 < step <= world.layers else []
        table += [("load", step)] if step < world.layers else []
    assert given == table
    # A send gives its layer's load, and then the next step up to where that wants its own layer.
    assert of_step[0] == []
    assert of_step[1] == [("load", 0), ("transform", 0)]
    assert of_step[2] == [("load", 1), ("scatter", 0), ("transform", 1)]
    assert of_step[-2] == [("load", 31), ("scatter", 30), ("transform", 31)]
    assert of_step[-1] == [("scatter", 31)]


def test_two_buffers_serve_all_layers() -> None:
    world = LayerWorld(4, layers=20)
    device = ReorderingDevice(0)
    world.load(world.pipeline(device))
    shape = (world.planes, world.chunks.rows, world.heads, world.width)
    assert [buffer.shape for buffer in device.buffers] == [shape, shape]


def test_one_layer_can_be_read_and_edited_and_is_gone_after_its_step(host: HostDevice) -> None:
    world = LayerWorld(5, layers=4, planes=2)
    pipeline = world.pipeline(host)
    steps = pipeline.run()
    next(steps)
    with pytest.raises(ContractError, match="is None"):
        pipeline.get_kv(0)
    for layer in range(4):
        steps.send(world.sources(layer))
        kv = pipeline.get_kv(layer)
        assert kv.shape == (2, world.chunks.rows, world.heads, world.width)
        first = world.stored[layer][0]
        assert np.array_equal(kv[1, : first.shape[1]], first[1]), "values are never transformed"
        kv[:, 0] = 4242 + layer
        with pytest.raises(ContractError, match=f"scatter is {layer}"):
            pipeline.get_kv(layer - 1)
    next(steps)
    with pytest.raises(ContractError):
        pipeline.get_kv(3)
    slot = int(world.slots[0])
    at = slot // world.block_tokens, slot % world.block_tokens
    for layer in range(4):
        assert pipeline.wait_scattered(layer)
        assert (world.memory[layer][:, at[0], at[1]] == 4242 + layer).all()


def test_loads_overlap_the_callers_work(host: HostDevice) -> None:
    """The load of a layer ends while the caller still works with the layer before."""
    world = LayerWorld(6, layers=2)
    loaded = threading.Event()

    class Telling(ArrayRows):
        def copy_to(self, rows: Any) -> None:
            super().copy_to(rows)
            loaded.set()

    steps = world.pipeline(host).run()
    next(steps)
    steps.send(world.sources(0))
    steps.send([Telling(rows) for rows in world.stored[1]])
    assert loaded.wait(GENEROUS_S), "nobody waited for layer 1, and it came"
    next(steps)


class DeviceWide(HostDevice):
    """Control: a caller waits for all that any stream was given, as a synchronisation of the whole device does."""

    def __init__(self) -> None:
        super().__init__(one_thread=False)
        self.given: list[Stream] = []

    def stream(self, name: str) -> HostStream:
        stream = super().stream(name)
        self.given.append(stream)
        return stream

    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        return all(stream.record().wait(deadline_s) for stream in self.given)


@pytest.mark.parametrize("device_wide", [False, True], ids=["events", "control"])
def test_who_waits_for_a_layer_does_not_wait_for_the_next_one(device_wide: bool) -> None:
    """Layer 1 does not come for as long as layer 0 is waited for."""
    device = DeviceWide() if device_wide else HostDevice(one_thread=False)
    world, go_on = LayerWorld(16, layers=2), threading.Event()

    class Hanging(ArrayRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    deadline_s = 0.2 if device_wide else GENEROUS_S
    pipeline = LoadPipeline(device, world.paged, world.slots, world.chunks, turn, deadline_s)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    pipeline.prefetch(lambda layer: [Hanging(rows) for rows in world.stored[layer]])
    if device_wide:
        with pytest.raises(PipelineError, match="was not there"):
            pipeline.get_kv(0)
    else:
        assert np.array_equal(pipeline.get_kv(0)[1:, : world.stored[0][0].shape[1]], world.stored[0][0][1:])
    go_on.set()
    steps.close()
    assert device.close(GENEROUS_S)


# --- faults ---


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_chunk_is_named_and_the_others_arrive(host: HostDevice, seed: int) -> None:
    world = LayerWorld(seed)
    lost, layer_of_loss = world.random.randrange(len(world.stored[0])), world.random.randrange(world.layers)
    steps = world.pipeline(host).run()
    next(steps)
    for layer in range(world.layers):
        sources = world.sources(layer)
        if layer == layer_of_loss:
            sources[lost] = NoRows("the disk said no")
        steps.send(sources)
    report = next(steps)
    assert report is not None
    assert report.failed == {lost: f"layer {layer_of_loss}: the disk said no"}
    assert world.same(world.expected({lost: layer_of_loss}))


@pytest.mark.parametrize("layer_of_fault", [0, 1, 4])
def test_a_transform_that_raises_fails_every_chunk(host: HostDevice, layer_of_fault: int) -> None:
    world = LayerWorld(8, layers=5)

    def bad(layer: int, keys: Any, positions: Any) -> None:
        if layer == layer_of_fault:
            raise ValueError("no table for this position")
        turn(layer, keys, positions)

    pipeline = LoadPipeline(host, world.paged, world.slots, world.chunks, bad, GENEROUS_S)
    report = world.load(pipeline)
    reason = f"transform of layer {layer_of_fault}: ValueError: no table for this position"
    assert report.failed == dict.fromkeys(range(len(world.stored[0])), reason)
    assert report.quiet
    for layer in range(layer_of_fault, 5):
        assert np.array_equal(world.memory[layer], world.before[layer]), "nothing came after the fault"


def test_a_source_that_raises_anything_else_fails_every_chunk(host: HostDevice) -> None:
    world = LayerWorld(9, layers=3)

    class Broken(ArrayRows):
        def copy_to(self, rows: Any) -> None:
            raise OSError("gone")

    steps = world.pipeline(host).run()
    next(steps)
    for layer in range(3):
        steps.send([Broken(rows) for rows in world.stored[layer]])
    report = next(steps)
    assert report is not None
    assert set(report.failed) == set(range(len(world.stored[0])))


def test_get_kv_says_what_failed(host: HostDevice) -> None:
    world = LayerWorld(10, layers=2)

    def bad(layer: int, keys: Any, positions: Any) -> None:
        raise LostRows("bad table")

    pipeline = LoadPipeline(host, world.paged, world.slots, world.chunks, bad, GENEROUS_S)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    with pytest.raises(PipelineError, match="bad table"):
        pipeline.get_kv(0)
    steps.close()


@pytest.mark.parametrize("sends", [0, 1, 2, 3])
def test_a_caller_may_stop_half_way(host: HostDevice, sends: int) -> None:
    world = LayerWorld(11, layers=4)
    pipeline = world.pipeline(host)
    steps = pipeline.run()
    next(steps)
    for layer in range(sends):
        steps.send(world.sources(layer))
    steps.close()
    assert pipeline.quiet(0.0), "what was begun has ended"
    expected = world.expected()
    for layer in range(world.layers):
        whole = expected if layer < sends - 1 else world.before
        assert np.array_equal(world.memory[layer], whole[layer])
    # The device serves the next one.
    other = LayerWorld(12)
    other.load(other.pipeline(host))
    assert other.same(other.expected())


class LeavesAtOnce(LoadPipeline):
    """Control: a close that waits for nothing."""

    def _end_early(self) -> None:
        pass


@pytest.mark.parametrize("kind", [LoadPipeline, LeavesAtOnce])
def test_a_caller_who_stops_waits_for_what_was_begun(host: HostDevice, kind: type[LoadPipeline]) -> None:
    world, go_on = LayerWorld(17, layers=4), threading.Event()

    class Hanging(ArrayRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    pipeline = world.pipeline(host, kind)
    steps = pipeline.run()
    next(steps)
    steps.send([Hanging(rows) for rows in world.stored[0]])
    waits = kind is LoadPipeline
    if waits:
        threading.Timer(0.05, go_on.set).start()
    steps.close()
    assert pipeline.quiet(0.0) is waits
    go_on.set()
    assert pipeline.quiet(GENEROUS_S)


def test_what_still_moves_at_the_deadline_is_said(host: HostDevice) -> None:
    world = LayerWorld(13, layers=1)
    go_on = threading.Event()

    class Hanging(ArrayRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    pipeline = LoadPipeline(host, world.paged, world.slots, world.chunks, turn, deadline_s=0.05)
    steps = pipeline.run()
    next(steps)
    steps.send([Hanging(rows) for rows in world.stored[0]])
    report = next(steps)
    assert report is not None
    assert not report.quiet
    assert set(report.failed) == set(range(len(world.stored[0])))
    assert not pipeline.quiet(0.0)
    go_on.set()
    assert pipeline.quiet(GENEROUS_S)
    assert world.same(world.expected()), "the deadline ended the wait and not the copy"


# --- misuse ---


def test_misuse_is_refused(host: HostDevice) -> None:
    world = LayerWorld(14, layers=2)
    slots = world.slots.copy()
    slots[-1] = world.blocks * world.block_tokens
    with pytest.raises(BlockRangeError, match="slot"):
        LoadPipeline(host, world.paged, slots, world.chunks)
    with pytest.raises(ContractError, match="rows"):
        LoadPipeline(host, world.paged, world.slots[:-1], world.chunks)
    two = ChunkSet([Chunk(0, 2)])
    with pytest.raises(ContractError, match="same slot"):
        LoadPipeline(host, world.paged, np.zeros(2, np.int64), two)
    for chunks in ([], [Chunk(3, 3)], [Chunk(0, 4), Chunk(2, 6)], [Chunk(5, 6), Chunk(0, 1)]):
        with pytest.raises(ContractError):
            ChunkSet(chunks)
    with pytest.raises(GeometryError, match="layer 1"):
        PagedLayers([[np.zeros((1, 2, 3, 4))], [np.zeros((1, 2, 3, 5))]])
    steps = world.pipeline(host).run()
    next(steps)
    with pytest.raises(ContractError, match="row sources"):
        steps.send([])
    pipeline = world.pipeline(host)
    world.load(pipeline)
    with pytest.raises(ContractError, match="once"):
        next(pipeline.run())
