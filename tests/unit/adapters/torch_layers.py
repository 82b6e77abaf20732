"""Runs the layerwise pipelines on one of torch's devices, and compares the results with a simple reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flexkv.adapters.torch_tensors.device import TensorRows, TorchDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.store import StorePipeline
from tests.unit.blend.turned_world import TurnedWorld
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld


def turn(layer: int, keys: torch.Tensor, positions: Any) -> None:
    """Rotates `keys` in place, as `layer_world.turn` does for arrays."""
    by = torch.from_numpy(positions.new - positions.old + layer + 1).to(keys.device, keys.dtype)
    keys.copy_(keys * 3 + by[:, None, None])


def check_load_and_store(seed: int, where: str) -> None:
    """Loads the rows of a random `LayerWorld` into tensors on the device `where`, then stores them from there. Checks
    the loaded and the stored bytes. Loads prefetch if `seed` is odd.
    """
    world = LayerWorld(seed)
    device = TorchDevice(where)
    memory = [torch.from_numpy(layer).to(where) for layer in world.memory]
    paged = PagedLayers([list(layer) for layer in memory])
    pinned = where != "cpu"

    def source(rows: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(rows)
        return tensor.pin_memory() if pinned else tensor

    stored = [[source(rows) for rows in layer] for layer in world.stored]

    def rows_of(layer: int) -> list[TensorRows]:
        return [TensorRows(rows) for rows in stored[layer]]

    load = LoadPipeline(device, paged, world.slots, world.chunks, turn, GENEROUS_S, 2 + seed % 3)
    steps = load.run()
    next(steps)
    for layer in range(world.layers):
        steps.send(() if layer < load.begun_layers else rows_of(layer))
        if seed % 2:
            load.prefetch(rows_of)
        assert load.get_kv(layer).shape[1] == world.chunks.rows
    assert next(steps) == PipelineReport({}, True)
    for layer, wanted in enumerate(world.expected()):
        assert np.array_equal(memory[layer].cpu().numpy(), wanted), f"layer {layer} after the load"

    out = [[torch.zeros_like(rows, pin_memory=pinned) for rows in layer] for layer in stored]
    storing = StorePipeline(device, paged, world.slots, world.chunks, GENEROUS_S).run()
    next(storing)
    for layer in range(world.layers):
        storing.send([TensorRows(rows) for rows in out[layer]])
    assert next(storing) == PipelineReport({}, True)
    for layer, wanted in enumerate(world.expected()):
        for rows, chunk in zip(out[layer], world.chunks.chunks, strict=True):
            slots = world.slots[world.chunks.rows_of(chunk)]
            want = wanted[:, slots // world.block_tokens, slots % world.block_tokens]
            assert np.array_equal(rows.numpy(), want), f"layer {layer} after the store"


def check_turned_load(seed: int, where: str) -> None:
    """Loads the rows of a random `TurnedWorld`, whose keys are rotated, into tensors on the device `where` with the
    fused scatter. Compares every bit.
    """
    world = TurnedWorld(seed)
    device = TorchDevice(where)
    pinned = where != "cpu"

    def tensor(array: np.ndarray) -> torch.Tensor:
        bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
        return bits.view(getattr(torch, world.dtype))

    # The device tensors have the same strides as the world's arrays.
    memory = [tensor(layer) if where == "cpu" else _like(tensor(layer), where) for layer in world.memory]
    stored = [[tensor(rows) for rows in layer] for layer in world.stored]
    if pinned:
        stored = [[rows.pin_memory() for rows in layer] for layer in stored]
    pipeline = world.pipeline(device, memory)
    steps = pipeline.run()
    next(steps)
    for layer in range(world.layers):
        steps.send([TensorRows(rows) for rows in stored[layer]])
    assert next(steps) == PipelineReport({}, True)
    for layer, wanted in enumerate(world.expected()):
        found = memory[layer].cpu().view(getattr(torch, f"int{8 * wanted.itemsize}")).numpy()
        assert np.array_equal(found, wanted.view(found.dtype)), f"layer {layer}"


def _like(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Copies a tensor to a device. The copy has the same values and strides."""
    whole = torch.empty(
        tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device=where
    )
    moved = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return moved.copy_(tensor)
