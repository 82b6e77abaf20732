"""Loads cached keys and values for a second sequence, at other positions, without an engine: `python -m
examples.moved_prefix`.

The keys and values of a sequence are in paged memory, as an engine keeps them. `StorePipeline` copies them to pages of
a host pool, layer by layer. `LoadPipeline` loads them for a second sequence, in which they are 16 positions later. It
transforms the keys of each layer while the previous layer is scattered to paged memory. For a real model, the transform
is a rotation (RoPE) of the keys. This example only adds the distance, so that the result is easy to check.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import RowPositions
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.rows import PageRows
from flexkv.transfer.layerwise.sources import HostPages, PageInterior, load_layers
from flexkv.transfer.layerwise.store import StorePipeline

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH = 4, 8, 16, 2, 8
TOKENS, MOVED = 40, 16
ROW_BYTES = HEADS * WIDTH * 4
PLANE_BYTES = BLOCK_TOKENS * ROW_BYTES
WAIT_S = 30.0

INTERIOR = PageInterior(
    offsets=tuple((2 * n * PLANE_BYTES, (2 * n + 1) * PLANE_BYTES) for n in range(LAYERS)),
    shape=(BLOCK_TOKENS, HEADS, WIDTH),
    strides=(ROW_BYTES, WIDTH * 4, 4),
    dtype=np.dtype(np.float32),
)
"""The order of bytes in a page: K, then V, of each layer in turn."""


def turn(layer: int, keys: Any, positions: RowPositions) -> None:
    keys += (positions.new - positions.old)[:, None, None].astype(np.float32)


def main() -> None:
    random = np.random.default_rng(0)
    memory = random.random((LAYERS, 2, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH), np.float32)
    paged = PagedLayers([list(layer) for layer in memory])
    first, second = np.split(random.permutation(BLOCKS * BLOCK_TOKENS)[: 2 * TOKENS], 2)
    stored_at, loaded_at = ChunkSet([Chunk(0, TOKENS)]), ChunkSet([Chunk(MOVED, MOVED + TOKENS, old_start=0)])
    pool = HostPool(slot_bytes=2 * LAYERS * PLANE_BYTES, slots=3)
    assert pool.wait_ready(3, WAIT_S)
    device = HostDevice()

    pages = [pool.slot(slot) for slot in (2, 0, 1)]
    steps = StorePipeline(device, paged, first, stored_at, WAIT_S).run()
    next(steps)
    for layer in range(LAYERS):
        steps.send([PageRows([INTERIOR.planes(page, layer) for page in pages])])
    stored = next(steps)
    steps.close()
    assert stored is not None
    assert not stored.failed

    load = LoadPipeline(device, paged, second, loaded_at, turn, WAIT_S)
    report = load_layers(load, HostPages(pool, INTERIOR, [[2, 0, 1]]).take)
    assert not report.failed
    assert device.close(WAIT_S)
    old, new = (memory[:, :, at // BLOCK_TOKENS, at % BLOCK_TOKENS] for at in (first, second))
    assert np.array_equal(new[:, 1], old[:, 1])
    assert np.array_equal(new[:, 0], old[:, 0] + np.float32(MOVED))
    pool.close()
    print(f"{TOKENS} tokens of {LAYERS} layers stored, moved by {MOVED} positions and loaded")


if __name__ == "__main__":
    main()
