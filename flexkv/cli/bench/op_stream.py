"""A stream of loads or stores that keeps flexkv's lanes busy while something else is measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.transfer.base import Ticket
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp

OUTSTANDING = 3
"""Ops in flight per direction: one is being copied, one follows it at once, and one is being planned."""
DRAIN_S = 30.0
"""Seconds for which `OpStream.drain` waits for the last op."""


class OpStream:
    """Keeps `OUTSTANDING` ops per direction in flight, if the caller calls `keep` often enough.

    The caller calls `keep` between two of its own measurements, in its own thread. A second Python thread would
    sometimes hold the interpreter's lock while the measurement waits for that lock. This wait would look like a cost of
    the lane.

    Args:
        engine: a transfer engine that has a view of group 0 with `blocks` blocks, and as many host slots.
        kinds: H2D, D2H or both.
        blocks: number of blocks in the engine's pool. Ops in flight share no block.
        page_bytes: bytes of a block in all layers.
        layerwise: whether loads are moved layer by layer.
        stream: the CUDA stream whose earlier work each op waits for; None for plain memory.
    """

    def __init__(
        self,
        engine: TransferEngine,
        kinds: Sequence[OpKind],
        blocks: int,
        page_bytes: int,
        layerwise: bool = False,
        stream: int | None = None,
    ) -> None:
        parts = np.array_split(
            np.random.default_rng(0).permutation(blocks).astype(np.int32), OUTSTANDING * len(kinds)
        )
        self._engine, self._layerwise, self._stream = engine, layerwise, stream
        self._page_bytes = page_bytes
        self._ids = itertools.count(1)
        self._parts = {
            kind: [part for part in parts[number :: len(kinds)] if len(part)]
            for number, kind in enumerate(kinds)
        }
        self._turn = dict.fromkeys(kinds, 0)
        self._in_flight: dict[OpId, tuple[OpKind, int, Ticket]] = {}
        self._ended: dict[OpKind, list[tuple[float, int]]] = {
            kind: [(time.perf_counter(), 0)] for kind in kinds
        }

    @property
    def ended_ops(self) -> int:
        """Number of finished ops; with two directions, the smaller of their two numbers."""
        return min(len(ended) for ended in self._ended.values()) - 1

    def keep(self) -> None:
        """Polls finished ops, then submits new ones until `OUTSTANDING` per direction are in flight, or fewer if the
        pool has too few blocks.

        Raises:
            ContractError: a copy failed, or a queue was full.
        """
        self._count()
        for kind, parts in self._parts.items():
            missing = len(parts) - sum(in_flight is kind for in_flight, _, _ in self._in_flight.values())
            for _ in range(missing):
                self._submit(kind, parts)

    def drain(self) -> None:
        """Waits until all submitted ops have finished.

        Raises:
            ContractError: an op has not finished after `DRAIN_S` seconds, or a copy failed.
        """
        ends_s = time.monotonic() + DRAIN_S
        for _, _, ticket in list(self._in_flight.values()):
            if not self._engine.wait(ticket, max(0.0, ends_s - time.monotonic())):
                raise ContractError(f"a copy did not end in {DRAIN_S:.0f} s")
        while self._in_flight:
            if time.monotonic() > ends_s:
                raise ContractError(f"{len(self._in_flight)} copies have no result after {DRAIN_S:.0f} s")
            self._count()

    def wait_one(self, deadline_s: float) -> None:
        """Sleeps until the oldest op in flight has finished. Returns at once if none is in flight.

        Raises:
            ContractError: the op has not finished after `deadline_s` seconds.
        """
        for _, _, ticket in self._in_flight.values():
            if not self._engine.wait(ticket, deadline_s):
                raise ContractError(f"a copy did not end in {deadline_s:.0f} s")
            return

    def gbps(self, kind: OpKind, begin_s: float, end_s: float) -> float | None:
        """Returns the rate in 1e9 bytes per second between two readings of `time.perf_counter`; None for a direction
        that does not run.

        An op's bytes count as moved evenly between the end of the op before it and its own end. Call this after
        `drain`, so that the last op counts.
        """
        if kind not in self._ended:
            return None
        times, moved = zip(*self._ended[kind], strict=True)
        begin, end = np.interp((begin_s, end_s), times, moved)
        return float(end - begin) / (end_s - begin_s) / 1e9

    def _submit(self, kind: OpKind, parts: list[NDArray[np.int32]]) -> None:
        ids = parts[self._turn[kind] % len(parts)]
        self._turn[kind] += 1
        load = kind is OpKind.H2D
        op_id = OpId(next(self._ids))
        op = TransferOp(
            op_id,
            kind,
            0,
            Priority.LOAD if load else Priority.STORE,
            ids.copy(),
            ids.copy(),
            self._layerwise and load,
        )
        ticket = self._engine.submit(TransferGraph((op,), ()), stream=self._stream)
        if ticket is None:
            raise ContractError("an op found its queue full")
        self._in_flight[op_id] = kind, len(ids), ticket

    def _count(self) -> None:
        for result in self._engine.poll():
            if result.status is not OpStatus.OK:
                raise ContractError(f"a copy failed: {result.reason}")
            kind, pages, _ = self._in_flight.pop(result.op_id)
            ended = self._ended[kind]
            ended.append((time.perf_counter(), ended[-1][1] + pages * self._page_bytes))
