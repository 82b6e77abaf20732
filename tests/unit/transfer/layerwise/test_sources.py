"""Rows out of pages in host memory and on disk; asking ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.storage.header import read_header
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import RowSource
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.sources import DiskPages, HostPages, LayerSource, PageInterior, load_layers
from tests.unit.storage.damage import flip
from tests.unit.storage.disk_world import BLOCK_TOKENS, DiskWorld, ids, keys_of, make_group
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld

LAYERS, HEADS, WIDTH, TOKENS = 4, 2, 16, 16
ROW_BYTES = HEADS * WIDTH * 4
PLANE_BYTES = TOKENS * ROW_BYTES


def interior(heads_first: bool) -> PageInterior:
    """Pages of LAYERS layers, K and V one after the other."""
    strides = (WIDTH * 4, TOKENS * WIDTH * 4, 4) if heads_first else (ROW_BYTES, WIDTH * 4, 4)
    offsets = tuple(((2 * n) * PLANE_BYTES, (2 * n + 1) * PLANE_BYTES) for n in range(LAYERS))
    return PageInterior(offsets, (TOKENS, HEADS, WIDTH), strides, np.dtype(np.int32))


@pytest.fixture
def host() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    assert device.close(GENEROUS_S)


class Paged:
    """Paged memory of two blocks more than needed, and a pipeline that loads chunks of 20 and 16 tokens into it."""

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
    report = load_layers(paged.pipeline, HostPages(pool, where, SLOTS))
    assert report.failed == {}
    for layer in range(LAYERS):
        for plane in range(2):
            first = np.concatenate([wanted[3, layer, plane], wanted[0, layer, plane]])[:20]
            assert np.array_equal(paged.rows(layer, plane, 0, 20), first)
            assert (paged.rows(layer, plane, 20, 24) == 0).all(), "the gap"
            assert np.array_equal(paged.rows(layer, plane, 24, 40), wanted[2, layer, plane])
    pool.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_pages_on_disk_give_their_rows_or_are_named(host: HostDevice, tmp_path: Path, damaged: bool) -> None:
    group = make_group(LAYERS, PLANE_BYTES)
    folder = tmp_path / "disk"
    folder.mkdir()
    world = DiskWorld([folder], group)
    numbers, places = [5, 6, 7], [1, 2, 3]
    result, generations = world.write(numbers, places)
    assert not len(result.failed)
    if damaged:
        # A byte of layer 2 of the second chunk's page; layers 0 and 1 of it are whole.
        slab = world.folder / "group0.slab"
        header = read_header(str(slab))
        flip(slab, header.header_bytes + 3 * header.slot_bytes + 4 * PLANE_BYTES)
    tags = make_tags(keys_of(numbers), world.unit.epoch, generations, BLOCK_TOKENS)
    op = TransferOp(
        OpId(10_000), OpKind.DISK_READ, 0, Priority.LOAD, ids([]), ids([3, 0, 2]), True, ids(places), tags
    )
    ticket = world.engine.submit(TransferGraph((op,)))
    assert ticket is not None
    paged = Paged(host)
    source = DiskPages(world.engine, ticket, world.pool, interior(False), SLOTS, GENEROUS_S)
    report = load_layers(paged.pipeline, source)
    assert set(report.failed) == ({1} if damaged else set())
    for layer in range(LAYERS):
        for plane in range(2):
            at = (2 * layer + plane) * PLANE_BYTES
            pages = [
                world.payload(number)[at : at + PLANE_BYTES].view(np.int32).reshape(TOKENS, HEADS, WIDTH)
                for number in numbers
            ]
            assert np.array_equal(paged.rows(layer, plane, 0, 20), np.concatenate(pages[:2])[:20])
            wanted = np.zeros_like(pages[2]) if damaged and layer >= 2 else pages[2]
            seen = paged.rows(layer, plane, 24, 40)
            assert np.array_equal(seen, wanted) or (damaged and not seen.any()), f"layer {layer}"
    assert world.engine.wait(ticket, GENEROUS_S)
    world.engine.poll()
    world.close()


class Noting(LayerSource):
    def __init__(self, world: LayerWorld) -> None:
        self.world = world
        self.begun: list[int] = []
        self.ahead: list[int] = []

    def begin(self, layer: int) -> None:
        self.begun.append(layer)

    def take(self, layer: int) -> Sequence[RowSource]:
        assert layer in self.begun
        self.ahead.append(self.begun[-1] - layer)
        return self.world.sources(layer)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, 50])
def test_the_source_is_asked_so_many_layers_ahead(host: HostDevice, prefetch: int) -> None:
    world = LayerWorld(1, layers=8)
    source = Noting(world)
    report = load_layers(world.pipeline(host), source, prefetch)
    assert report.failed == {}
    assert source.begun == list(range(8))
    assert source.ahead == [min(prefetch, 7 - layer) for layer in range(8)]
    assert world.same(world.expected())


def test_a_negative_depth_is_refused(host: HostDevice) -> None:
    world = LayerWorld(1)
    with pytest.raises(ContractError, match="prefetch_layers"):
        load_layers(world.pipeline(host), Noting(world), -1)
