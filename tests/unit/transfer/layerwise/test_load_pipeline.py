"""Tests that compare the load pipeline with a straightforward reference, while its streams run in random orders. The
tests must notice if a dependency between streams is missing.
"""

from __future__ import annotations

import pytest

from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from tests.unit.transfer.layerwise.layer_world import LayerWorld, ReorderingDevice


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


# Each of the following pipelines lacks one dependency between streams, so some order of the streams gives wrong bytes.


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
