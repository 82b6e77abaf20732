"""Layers are copied to an engine's pool while later layers of the same pages are still being read from disk. One
transfer engine runs a layerwise DISK_READ, and another runs a layerwise load whose pages depend on that read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.transfer.base import Ticket
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import (
    NO_READS,
    OpId,
    OpKind,
    OpResult,
    OpStatus,
    Priority,
    TransferGraph,
    TransferOp,
)
from tests import testing_ext
from tests.unit.storage.disk_world import CORRUPT, GENEROUS_S, STALL, MakeDisks, ids, make_group
from tests.unit.storage.layered_pages import LAYERS, PAGES, READ, begin_read

LOAD = OpId(901)
SLOTS = range(40, 40 + PAGES)


class Streaming:
    """A disk tier with PAGES pages, and an inference engine's pool into which a load copies them."""

    def __init__(self, make_disks: MakeDisks, run_bytes: int = 4096) -> None:
        self.faults = testing_ext.IoFaults([])
        self.run_bytes = run_bytes
        self.world = make_disks(group=make_group(layers=LAYERS, run_bytes=run_bytes), faults=self.faults)
        _, self.generations = self.world.write(range(PAGES), range(PAGES))
        self.slab = self.world.unit._volumes[0].slabs[0]  # type: ignore[union-attr]
        # Until the read fills them, the slots have wrong bytes, so that a test notices a copy made too early.
        for slot in SLOTS:
            self.world.pool.slot(slot)[:] = 0xEE
        page_bytes = self.world.group.stripe_bytes[0]
        self.memory = np.zeros((LAYERS * 2, PAGES, run_bytes), np.uint8)
        rows = [
            [self.memory[run].ctypes.data, run_bytes, run_bytes, run * run_bytes, run // 2]
            for run in range(LAYERS * 2)
        ]
        view = c_ext.KvView(np.array(rows, np.int64), PAGES, page_bytes)
        self.engine = TransferEngine()
        self.engine.attach_view(0, view, self.world.pool, 0, owners=[self.memory])

    def offset(self, page: int, layer: int) -> int:
        """Returns the offset in the slab of layer `layer` of page `page`."""
        return self.slab.offset(page) + layer * 2 * self.run_bytes

    def read(self, layerwise: bool = True) -> Ticket:
        return begin_read(self.world, SLOTS, self.generations, layerwise)

    def load(self, waits: bool = True) -> Ticket:
        """Submits a layerwise load of all pages. With `waits`, each page of the load waits for op READ."""
        op = TransferOp(LOAD, OpKind.H2D, 0, Priority.LOAD, ids(range(PAGES)), ids(SLOTS), layerwise=True)
        op = replace(op, reads=np.full(PAGES, READ, np.int64) if waits else NO_READS)
        ticket = self.engine.submit(TransferGraph((op,)))
        assert ticket is not None
        return ticket

    def result(self, ticket: Ticket) -> OpResult:
        assert self.engine.wait(ticket, GENEROUS_S)
        (result,) = self.engine.poll()
        return result

    def holds(self, page: int, layer: int) -> bool:
        """Whether layer `layer` of block `page` in the engine's pool has the right bytes."""
        size = 2 * self.run_bytes
        wanted: NDArray[np.uint8] = self.world.payload(page)[layer * size : (layer + 1) * size]
        return bool((self.memory[2 * layer : 2 * layer + 2, page].reshape(-1) == wanted).all())

    def close(self) -> None:
        self.faults.release()
        assert self.engine.close(GENEROUS_S)


@pytest.fixture
def make_streaming(make_disks: MakeDisks) -> Iterator[Callable[..., Streaming]]:
    made: list[Streaming] = []

    def make(run_bytes: int = 4096) -> Streaming:
        made.append(Streaming(make_disks, run_bytes))
        return made[-1]

    yield make
    for streaming in made:
        streaming.close()


@pytest.mark.parametrize("run_bytes", [4096, 2304])
def test_layers_are_in_the_engines_pool_while_later_ones_are_on_disk(
    make_streaming: Callable[..., Streaming], run_bytes: int
) -> None:
    s = make_streaming(run_bytes)
    s.faults.add(testing_ext.IoFaultRule(STALL, write=False, offset=s.offset(1, 14) + 8192))
    load = s.load()
    s.read()
    assert s.faults.wait_stalled(1, GENEROUS_S)
    for layer in (0, 1, 2, 5, 6, 13):
        assert s.engine.wait_layer(load, layer, GENEROUS_S).ok, layer
        assert all(s.holds(page, layer) for page in range(PAGES))
    assert not s.engine.wait_layer(load, 14, 0.05).in_time
    assert not s.holds(1, 14)
    s.faults.release()
    assert s.result(load).status is OpStatus.OK
    assert all(s.holds(page, layer) for page in range(PAGES) for layer in range(LAYERS))


def test_a_read_by_pages_holds_every_layer_back(make_streaming: Callable[..., Streaming]) -> None:
    """If pages are read as a whole, a load gets no layer of a page until the page is complete. This shows the benefit
    of a layerwise read."""
    s = make_streaming()
    s.faults.add(testing_ext.IoFaultRule(STALL, write=False, offset=s.offset(1, 14) + 8192))
    load = s.load()
    s.read(layerwise=False)
    assert s.faults.wait_stalled(1, GENEROUS_S)
    assert not s.engine.wait_layer(load, 0, 0.05).in_time
    s.faults.release()
    assert s.result(load).status is OpStatus.OK
    assert all(s.holds(page, layer) for page in range(PAGES) for layer in range(LAYERS))


def test_control_a_load_that_does_not_wait_takes_what_lies_there(
    make_streaming: Callable[..., Streaming],
) -> None:
    s = make_streaming()
    s.faults.add(testing_ext.IoFaultRule(STALL, write=False, offset=s.offset(1, 14) + 8192))
    s.read()
    assert s.faults.wait_stalled(1, GENEROUS_S)
    assert s.result(s.load(waits=False)).status is OpStatus.OK, "nothing tells it"
    assert not s.holds(1, 14)
    assert (s.memory[2 * 14 + 1, 1] == 0xEE).all()


def test_a_page_that_fails_in_a_later_range_is_named(make_streaming: Callable[..., Streaming]) -> None:
    s = make_streaming()
    s.faults.add(testing_ext.IoFaultRule(CORRUPT, write=False, offset=s.offset(2, 6), bytes=100, times=1))
    load = s.load()
    s.read()
    assert s.engine.wait_layer(load, 5, GENEROUS_S).in_time
    others = [page for page in range(PAGES) if page != 2]
    assert all(s.holds(page, 5) for page in others)
    result = s.result(load)
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [2])
    assert f"read {READ}" in result.reason
    assert not s.holds(2, 6)
    assert all(s.holds(page, layer) for page in others for layer in range(LAYERS))
