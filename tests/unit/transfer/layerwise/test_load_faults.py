"""Tests how the load pipeline behaves if chunks are lost, if stages raise or hang, and if the caller stops early or
misuses the pipeline.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

from flexkv.errors import BlockRangeError, ContractError, GeometryError
from flexkv.transfer.layerwise.base import LostRows, PipelineError
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.rows import NoRows, PageRows
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, turn


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

    class Broken(PageRows):
        def copy_to(self, rows: Any) -> None:
            raise OSError("gone")

    steps = world.pipeline(host).run()
    next(steps)
    for layer in range(3):
        steps.send([Broken([rows]) for rows in world.stored[layer]])
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
    # After the fault, the device still works for the next pipeline.
    other = LayerWorld(12)
    other.load(other.pipeline(host))
    assert other.same(other.expected())


class LeavesAtOnce(LoadPipeline):
    """A control: a pipeline whose close does not wait for work in flight."""

    def _end_early(self) -> None:
        pass


@pytest.mark.parametrize("kind", [LoadPipeline, LeavesAtOnce])
def test_a_caller_who_stops_waits_for_what_was_begun(host: HostDevice, kind: type[LoadPipeline]) -> None:
    world, go_on = LayerWorld(17, layers=4), threading.Event()

    class Hanging(PageRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    pipeline = world.pipeline(host, kind)
    steps = pipeline.run()
    next(steps)
    steps.send([Hanging([rows]) for rows in world.stored[0]])
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

    class Hanging(PageRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    pipeline = LoadPipeline(host, world.paged, world.slots, world.chunks, turn, deadline_s=0.05)
    steps = pipeline.run()
    next(steps)
    steps.send([Hanging([rows]) for rows in world.stored[0]])
    report = next(steps)
    assert report is not None
    assert not report.quiet
    assert set(report.failed) == set(range(len(world.stored[0])))
    assert not pipeline.quiet(0.0)
    go_on.set()
    assert pipeline.quiet(GENEROUS_S)
    assert world.same(world.expected()), "the deadline ended the wait and not the copy"


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
    with pytest.raises(ContractError, match="at least one chunk"):
        ChunkSet([])
    for chunks in ([Chunk(3, 3)], [Chunk(0, 4), Chunk(2, 6)], [Chunk(5, 6), Chunk(0, 1)]):
        last = f"[{chunks[-1].start}, {chunks[-1].end}) after position"
        with pytest.raises(ContractError, match=re.escape(last)):
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
