"""Tests the store pipeline: where each row must arrive, the dependencies between streams, and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import LayerDevice, RowTarget
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import NoRows, PageRows
from flexkv.transfer.layerwise.store import StorePipeline
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, ReorderingDevice


@pytest.fixture
def host() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    assert device.close(GENEROUS_S)


class Storing:
    """A world, and a pipeline that stores the world's paged memory into arrays."""

    def __init__(
        self,
        seed: int,
        device: LayerDevice,
        layers: int | None = None,
        kind: type[StorePipeline] = StorePipeline,
    ) -> None:
        self.world = LayerWorld(seed, layers)
        self.out = [[np.zeros_like(rows) for rows in layer] for layer in self.world.stored]
        world = self.world
        self.pipeline = kind(device, world.paged, world.slots, world.chunks, GENEROUS_S)

    def targets(self, layer: int) -> list[RowTarget]:
        return [PageRows([rows]) for rows in self.out[layer]]

    def run(self) -> PipelineReport:
        steps = self.pipeline.run()
        next(steps)
        for layer in range(self.world.layers):
            steps.send(self.targets(layer))
        report = next(steps)
        steps.close()
        assert report is not None
        return report

    def right(self, skip: Sequence[int] = ()) -> bool:
        world = self.world
        for layer in range(world.layers):
            for number, chunk in enumerate(world.chunks.chunks):
                slots = world.slots[world.chunks.rows_of(chunk)]
                wanted = world.before[layer][:, slots // world.block_tokens, slots % world.block_tokens]
                if number not in skip and not np.array_equal(self.out[layer][number], wanted):
                    return False
        return True


@pytest.mark.parametrize("seed", range(20))
def test_every_row_arrives_and_the_pool_is_only_read(host: HostDevice, seed: int) -> None:
    storing = Storing(seed, host)
    assert storing.run() == PipelineReport({}, True)
    assert storing.right()
    assert storing.world.same(storing.world.before), "a store only reads"


@pytest.mark.parametrize("seed", range(30))
def test_whatever_order_the_streams_run_in(seed: int) -> None:
    device = ReorderingDevice(seed)
    storing = Storing(seed, device, layers=6)
    storing.run()
    assert storing.right()
    assert len(device.buffers) == 2


class NoStoreToGather(StorePipeline):
    def _after_store(self, layer: int) -> None:
        pass


class NoGatherToStore(StorePipeline):
    def _after_gather(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("broken", [NoStoreToGather, NoGatherToStore])
def test_a_missing_edge_is_found(broken: type[StorePipeline]) -> None:
    wrong = 0
    for seed in range(30):
        storing = Storing(seed, ReorderingDevice(seed), layers=6, kind=broken)
        storing.run()
        wrong += not storing.right()
    assert wrong > 0


def test_a_chunk_that_cannot_be_taken_is_named(host: HostDevice) -> None:
    storing = Storing(3, host, layers=4)
    steps = storing.pipeline.run()
    next(steps)
    for layer in range(4):
        targets = storing.targets(layer)
        if layer == 2:
            targets[0] = NoRows("full")
        steps.send(targets)
    assert next(steps) == PipelineReport({0: "layer 2: full"}, True)
    assert storing.right(skip=[0])


def test_a_target_that_breaks_fails_every_chunk(host: HostDevice) -> None:
    storing = Storing(4, host, layers=3)

    class Broken(PageRows):
        def copy_from(self, rows: Any) -> None:
            raise OSError("gone")

    steps = storing.pipeline.run()
    next(steps)
    for layer in range(3):
        steps.send([Broken([rows]) for rows in storing.out[layer]])
    report = next(steps)
    assert report is not None
    assert set(report.failed) == set(range(len(storing.out[0])))
    assert report.quiet


@pytest.mark.parametrize("sends", [0, 1, 3])
def test_a_caller_may_stop_half_way(host: HostDevice, sends: int) -> None:
    storing = Storing(5, host, layers=4)
    steps = storing.pipeline.run()
    next(steps)
    for layer in range(sends):
        steps.send(storing.targets(layer))
    steps.close()
    assert storing.pipeline.quiet(0.0)
    with pytest.raises(ContractError, match="once"):
        next(storing.pipeline.run())


def test_a_load_brings_back_what_a_store_took(host: HostDevice) -> None:
    storing = Storing(6, host, layers=5)
    storing.run()
    world = storing.world
    world.stored = storing.out
    world.load(world.pipeline(host))
    assert world.same(world.expected())
