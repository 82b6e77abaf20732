"""Tests loads that read their rows from pages in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.sources import HostPages, PageInterior, load_layers
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S

LAYERS, HEADS, WIDTH, TOKENS = 4, 2, 16, 16
ROW_BYTES = HEADS * WIDTH * 4
PLANE_BYTES = TOKENS * ROW_BYTES


def interior(heads_first: bool) -> PageInterior:
    """Returns the positions of the rows in a page of LAYERS layers. Each layer has K and then V."""
    strides = (WIDTH * 4, TOKENS * WIDTH * 4, 4) if heads_first else (ROW_BYTES, WIDTH * 4, 4)
    offsets = tuple(((2 * n) * PLANE_BYTES, (2 * n + 1) * PLANE_BYTES) for n in range(LAYERS))
    return PageInterior(offsets, (TOKENS, HEADS, WIDTH), strides, np.dtype(np.int32))


@pytest.fixture
def host() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    assert device.close(GENEROUS_S)


class Paged:
    """Paged memory with two blocks more than needed, and a pipeline that loads chunks of 20 and 16 tokens into it."""

    def __init__(self, device: HostDevice) -> None:
        self.memory = np.full((LAYERS, 2, 5, TOKENS, HEADS, WIDTH), -1, np.int32)
        self.chunks = ChunkSet([Chunk(0, 20), Chunk(24, 40)])
        self.slots = np.random.default_rng(1).permutation(5 * TOKENS)[:40].astype(np.int64)
        paged = PagedLayers([list(layer) for layer in self.memory])
        self.pipeline = LoadPipeline(device, paged, self.slots, self.chunks, deadline_s=GENEROUS_S)

    def rows(self, layer: int, plane: int, first: int, end: int) -> np.ndarray:
        slots = self.slots[first:end]
        return self.memory[layer, plane, slots // TOKENS, slots % TOKENS]


SLOTS = [[3, 0], [2]]


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_in_host_memory(host: HostDevice, heads_first: bool) -> None:
    where = interior(heads_first)
    with_room = -(-2 * LAYERS * PLANE_BYTES // 4096) * 4096
    pool = HostPool(with_room, 4)
    assert pool.wait_ready(4, GENEROUS_S)
    wanted = np.random.default_rng(0).integers(0, 1000, (4, LAYERS, 2, TOKENS, HEADS, WIDTH)).astype(np.int32)
    for slot in range(4):
        for layer in range(LAYERS):
            for plane, view in enumerate(where.planes(pool.slot(slot), layer)):
                view[:] = wanted[slot, layer, plane]
    paged = Paged(host)
    report = load_layers(paged.pipeline, HostPages(pool, where, SLOTS).take)
    assert report.failed == {}
    for layer in range(LAYERS):
        for plane in range(2):
            first = np.concatenate([wanted[3, layer, plane], wanted[0, layer, plane]])[:20]
            assert np.array_equal(paged.rows(layer, plane, 0, 20), first)
            assert (paged.rows(layer, plane, 20, 24) == 0).all(), "the gap"
            assert np.array_equal(paged.rows(layer, plane, 24, 40), wanted[2, layer, plane])
    pool.close()
