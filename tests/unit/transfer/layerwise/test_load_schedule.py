"""Tests the schedule of the load pipeline: the step in which it submits each piece of work, and the events for which a
step waits.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import Event, PipelineError, Stream
from flexkv.transfer.layerwise.host_device import HostDevice, HostStream
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.rows import PageRows
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, ReorderingDevice, turn


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
    # A `send` submits the load of its layer, and then the part of the next step that can begin without the next layer.
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
    with pytest.raises(ContractError, match="scatter is None"):
        pipeline.get_kv(3)
    slot = int(world.slots[0])
    at = slot // world.block_tokens, slot % world.block_tokens
    for layer in range(4):
        assert pipeline.wait_scattered(layer)
        assert (world.memory[layer][:, at[0], at[1]] == 4242 + layer).all()


def test_loads_overlap_the_callers_work(host: HostDevice) -> None:
    """The load of a layer finishes while the caller still works on the previous layer."""
    world = LayerWorld(6, layers=2)
    loaded = threading.Event()

    class Telling(PageRows):
        def copy_to(self, rows: Any) -> None:
            super().copy_to(rows)
            loaded.set()

    steps = world.pipeline(host).run()
    next(steps)
    steps.send(world.sources(0))
    steps.send([Telling([rows]) for rows in world.stored[1]])
    assert loaded.wait(GENEROUS_S), "nobody waited for layer 1, and it came"
    next(steps)


class DeviceWide(HostDevice):
    """A control: a device on which a caller waits for all work of all streams, as after a synchronisation of the
    device."""

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
    """A caller that waits for a layer does not wait for the next layer: it gets layer 0 although the load of layer 1
    hangs."""
    device = DeviceWide() if device_wide else HostDevice(one_thread=False)
    world, go_on = LayerWorld(16, layers=2), threading.Event()

    class Hanging(PageRows):
        def copy_to(self, rows: Any) -> None:
            assert go_on.wait(GENEROUS_S)
            super().copy_to(rows)

    deadline_s = 0.2 if device_wide else GENEROUS_S
    pipeline = LoadPipeline(device, world.paged, world.slots, world.chunks, turn, deadline_s)
    steps = pipeline.run()
    next(steps)
    steps.send(world.sources(0))
    pipeline.prefetch(lambda layer: [Hanging([rows]) for rows in world.stored[layer]])
    if device_wide:
        with pytest.raises(PipelineError, match="was not there"):
            pipeline.get_kv(0)
    else:
        assert np.array_equal(pipeline.get_kv(0)[1:, : world.stored[0][0].shape[1]], world.stored[0][0][1:])
    go_on.set()
    steps.close()
    assert device.close(GENEROUS_S)
