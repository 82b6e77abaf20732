"""Tests the layerwise pipelines on torch tensors in CPU memory, where work on torch's streams runs in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexkv.adapters.torch_tensors.device import TorchDevice, TorchEvent
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from tests.unit.adapters.torch_layers import check_load_and_store, check_turned_load
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld


@pytest.mark.parametrize("seed", range(12))
def test_loads_and_stores_equal_the_reference(seed: int) -> None:
    check_load_and_store(seed, "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_turned_as_they_are_scattered(seed: int) -> None:
    check_turned_load(seed, "cpu")


def test_what_cannot_be_enqueued_fails_every_chunk() -> None:
    world = LayerWorld(3, layers=3)

    def bad(layer: int, keys: Any, positions: Any) -> None:
        raise ValueError("no table")

    memory = [torch.from_numpy(layer) for layer in world.memory]
    paged = PagedLayers([list(layer) for layer in memory])
    pipeline = LoadPipeline(TorchDevice("cpu"), paged, world.slots, world.chunks, bad, GENEROUS_S)
    steps = pipeline.run()
    next(steps)
    for layer in range(3):
        steps.send(world.sources(layer))
    report = next(steps)
    assert report is not None
    assert set(report.failed) == set(range(len(world.stored[0])))
    assert world.same(world.before)


class Broken:
    """Stands for an event of a device whose context is broken."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access")


class Never:
    def query(self) -> bool:
        return False


def test_waits_end_at_the_deadline_or_with_the_devices_error() -> None:
    assert not TorchEvent(Never(), "").wait(0.01)
    broken = TorchEvent(Broken(), "")
    assert broken.wait(GENEROUS_S)
    assert "illegal memory access" in broken.error
