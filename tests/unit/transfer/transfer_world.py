"""A small world for tests of data transfers: an engine's pool in plain memory, a host pool, and a transfer engine
between them.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.transfer.base import Ticket
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import (
    Edge,
    EdgeKind,
    OpId,
    OpKind,
    OpResult,
    Priority,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool
from tests import testing_ext

GENEROUS_S = 30.0
"""Time limit, in seconds, for every wait for an event that must happen: far more than a busy machine needs."""

FAIL, DELAY, STALL, CORRUPT = range(4)
"""Actions of a `testing_ext.FaultRule`."""


def ids(values: Sequence[int]) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, dtype=np.int32)


class World:
    """A transfer engine between a host pool and an inference engine's layer-first pool of one KV group. The pool is
    `memory`, uint8 [layers, blocks, run_bytes]; the page of block b is memory[:, b].
    """

    def __init__(
        self,
        layers: int = 4,
        blocks: int = 32,
        run_bytes: int = 1024,
        slots: int = 32,
        shared: bool = False,
        rules: Sequence[testing_ext.FaultRule] = (),
        **engine_options: float,
    ) -> None:
        self.layers, self.blocks, self.run_bytes = layers, blocks, run_bytes
        self.memory = np.zeros((layers, blocks, run_bytes), dtype=np.uint8)
        rows = [
            [self.memory[layer].ctypes.data, run_bytes, run_bytes, layer * run_bytes, layer]
            for layer in range(layers)
        ]
        self.view = c_ext.KvView(np.array(rows, dtype=np.int64), blocks, layers * run_bytes)
        slot_bytes = -(-layers * run_bytes // 4096) * 4096
        self.pool = HostPool(slot_bytes, slots, shared=shared)
        assert self.pool.wait_ready(slots, GENEROUS_S), self.pool.stopped_reason
        self.counter = testing_ext.CountingMover(c_ext.HostMover())
        self.mover = testing_ext.FaultyMover(self.counter, list(rules))
        self.engine = TransferEngine(self.mover, **engine_options)  # type: ignore[arg-type]
        self.engine.attach_view(0, self.view, self.pool, 0, owners=[self.memory])
        self.op_ids = itertools.count(1)

    def scribble(self, seed: int = 0) -> NDArray[np.uint8]:
        """Fills the inference engine's pool with random bytes. Returns a copy of them."""
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(0, 256, self.memory.shape, dtype=np.uint8)
        return self.memory.copy()

    def page(self, block: int) -> NDArray[np.uint8]:
        """Returns the bytes of a block, in the order in which a page has them."""
        return self.memory[:, block, :].reshape(-1)

    def stored(self, slot: int) -> NDArray[np.uint8]:
        return self.pool.slot(slot)[: self.layers * self.run_bytes]

    def op(
        self,
        kind: OpKind,
        blocks: Sequence[int],
        slots: Sequence[int] | None = None,
        layerwise: bool = False,
        priority: Priority | None = None,
    ) -> TransferOp:
        usual = Priority.LOAD if kind is OpKind.H2D else Priority.STORE
        chosen = usual if priority is None else priority
        given = blocks if slots is None else slots
        return TransferOp(OpId(next(self.op_ids)), kind, 0, chosen, ids(blocks), ids(given), layerwise)

    def submit(self, *ops: TransferOp, edges: Sequence[tuple[int, int, EdgeKind]] = ()) -> Ticket:
        ticket = self.engine.submit(TransferGraph(ops, tuple(Edge(*edge) for edge in edges)))
        assert ticket is not None, "BUSY"
        return ticket

    def run(self, *ops: TransferOp, edges: Sequence[tuple[int, int, EdgeKind]] = ()) -> dict[OpId, OpResult]:
        """Submits the ops as one graph, waits until they end, and returns their results. Asserts that no other result
        comes."""
        ticket = self.submit(*ops, edges=edges)
        assert self.engine.wait(ticket, GENEROUS_S)
        return self.results(len(ops))

    def results(self, count: int) -> dict[OpId, OpResult]:
        """Waits on the event descriptor until `count` results have come, and returns them by op id. Asserts that no op
        reports twice.
        """
        found: list[OpResult] = []
        while len(found) < count:
            readable, _, _ = select.select([self.engine.event_fd], [], [], GENEROUS_S)
            assert readable, f"{len(found)} of {count} results came"
            found += self.engine.poll(count - len(found))
        assert len({result.op_id for result in found}) == len(found)
        return {result.op_id: result for result in found}

    def close(self) -> None:
        self.mover.release()
        assert self.engine.close(GENEROUS_S)
        self.pool.close()
