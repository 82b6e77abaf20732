"""Measures how long single loads and stores take, and how much CPU time many of them take: `flexkv bench transfer
--part latency`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flexkv import c_ext
from flexkv.cli.bench.op_stream import OpStream
from flexkv.cli.bench.transfer_bench import (
    LAYERS,
    NULL_STREAM,
    WAIT_S,
    chosen_path,
    path_bytes,
    pooled_engine,
)
from flexkv.config import TransferConfig
from flexkv.errors import ContractError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp

RUN_BYTES = (4 << 10, 32 << 10)
BLOCKS = (1, 16, 256, 1024)
POOL_BYTES = 512 << 20
"""Size in bytes of the smallest pool on a GPU. With the longer runs it has twice as many blocks as the largest op
(1,024), so that an op's blocks are scattered."""
TIMES = 60
"""Measurements of each op, after `WARM_UP` repetitions that do not count."""
WARM_UP = 5
LONGEST_S = 1.0
"""Seconds after which a row ends, even if it has fewer than `TIMES` measurements."""
BUSY_S = 0.5
"""Seconds over which CPU time is measured, while copies run without a pause or while the process is idle."""
BUSY_KINDS = (("loads", OpKind.H2D), ("stores", OpKind.D2H))
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One kind of op, repeated while nothing else runs. All times begin when `submit` is called.

    Attributes:
        what: "load by layer" or "store".
        path: the path that copied most of the bytes.
        multiprocessors: number of multiprocessors that the path takes.
        p50_us, p99_us: median and 99th percentile of the microseconds until `wait` returned.
        submit_us: microseconds until `submit` returned, median.
        first_layer_us: microseconds until `wait_layer` returned for the first layer, median; None for stores.
        gbps: rate in 1e9 bytes per second, computed from `p50_us`.
        times: number of measurements.
        pinned: whether the GPU had registered all host memory; True for plain memory.
    """

    what: str
    run_bytes: int
    blocks: int
    path: str
    multiprocessors: int
    p50_us: float
    p99_us: float
    submit_us: float
    first_layer_us: float | None
    gbps: float
    times: int
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """CPU time of the whole process.

    Attributes:
        what: "loads" or "stores" that follow each other without a pause, or "idle", which is measured after them.
        path: the path that copied most of the bytes; empty if idle.
        cores: CPU seconds per second, all threads together.
        gbps: rate of the copies in 1e9 bytes per second; 0.0 if idle.
        pinned: whether the GPU had registered all host memory; True for plain memory.
    """

    what: str
    run_bytes: int
    path: str
    cores: float
    gbps: float
    pinned: bool = True


def latency_rows(
    device: int | None, total_bytes: int, settings: TransferConfig
) -> Iterator[tuple[list[LatencyRow], list[ProcessorRow]]]:
    """Yields the rows of each run length in turn.

    Args:
        total_bytes: size of the pool. A pool on a GPU has at least `POOL_BYTES`. Ops with more blocks than the pool are
            left out.

    Raises:
        CapacityError: there is not enough memory.
        ContractError: a copy failed.
    """
    size = total_bytes if device is None else max(total_bytes, POOL_BYTES)
    memory = np.zeros(size, np.uint8) if device is None else c_ext.DeviceMemory(device, size)
    base = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.address
    for run_bytes in RUN_BYTES:
        blocks = size // (run_bytes * LAYERS)
        if blocks < 1:
            continue
        with pooled_engine(device, settings, base, run_bytes, LAYERS, blocks) as (engine, pinned):
            rows = [
                _latency(engine, what, kind, run_bytes, blocks, taken, pinned)
                for what, kind in (("load by layer", OpKind.H2D), ("store", OpKind.D2H))
                for taken in BLOCKS
                if taken <= blocks
            ]
            used = [_busy(engine, what, kind, run_bytes, blocks, pinned) for what, kind in BUSY_KINDS]
            used.append(_idle(run_bytes, pinned))
        yield rows, used


def _latency(
    engine: TransferEngine, what: str, kind: OpKind, run_bytes: int, blocks: int, taken: int, pinned: bool
) -> LatencyRow:
    stream = None if engine.device is None else NULL_STREAM
    before = path_bytes(engine)
    ends: list[float] = []
    submits: list[float] = []
    firsts: list[float] = []
    draw = np.random.default_rng(taken)
    stops_s = time.monotonic() + LONGEST_S
    for number in range(1, WARM_UP + TIMES + 1):
        ids = draw.permutation(blocks)[:taken].astype(np.int32)
        load = kind is OpKind.H2D
        op = TransferOp(
            OpId(number), kind, 0, Priority.LOAD if load else Priority.STORE, ids, ids.copy(), load
        )
        graph = TransferGraph((op,), ())
        start_s = time.perf_counter()
        ticket = engine.submit(graph, stream=stream)
        submitted_s = time.perf_counter()
        if ticket is None:
            raise ContractError(f"a {what} found its queue full")
        if load:
            if not engine.wait_layer(ticket, 0, WAIT_S, stream=stream).ok:
                raise ContractError(f"the first layer of a {what} did not arrive")
            first_s = time.perf_counter()
        if not engine.wait(ticket, WAIT_S):
            raise ContractError(f"a {what} did not end in {WAIT_S:.0f} s")
        end_s = time.perf_counter()
        for result in engine.poll():
            if result.status is not OpStatus.OK:
                raise ContractError(f"a {what} failed: {result.reason}")
        if number <= WARM_UP:
            continue
        ends.append(end_s - start_s)
        submits.append(submitted_s - start_s)
        if load:
            firsts.append(first_s - start_s)
        if time.monotonic() > stops_s:
            break
    moved = {name: count - before[name] for name, count in path_bytes(engine).items()}
    path, multiprocessors = chosen_path(moved, "H2D" if load else "D2H")
    p50_us = _us(ends, 50)
    return LatencyRow(
        what,
        run_bytes,
        taken,
        path,
        multiprocessors,
        p50_us,
        _us(ends, 99),
        _us(submits, 50),
        _us(firsts, 50) if firsts else None,
        taken * run_bytes * LAYERS / p50_us / 1e3,
        len(ends),
        pinned,
    )


def _busy(
    engine: TransferEngine, what: str, kind: OpKind, run_bytes: int, blocks: int, pinned: bool
) -> ProcessorRow:
    """Measures CPU time while ops follow each other without a pause. This thread sleeps until an op has finished, then
    submits the next one."""
    before = path_bytes(engine)
    copies = OpStream(
        engine,
        [kind],
        blocks,
        run_bytes * LAYERS,
        stream=None if engine.device is None else NULL_STREAM,
    )
    copies.keep()
    copies.wait_one(WAIT_S)
    copies.keep()
    begin_s, used_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin_s < BUSY_S:
        copies.wait_one(WAIT_S)
        copies.keep()
    end_s, used_s = time.perf_counter(), time.process_time() - used_s
    copies.drain()
    moved = {name: count - before[name] for name, count in path_bytes(engine).items()}
    path, _ = chosen_path(moved, kind.name)
    gbps = copies.gbps(kind, begin_s, end_s)
    assert gbps is not None
    return ProcessorRow(what, run_bytes, path, used_s / (end_s - begin_s), gbps, pinned)


def _idle(run_bytes: int, pinned: bool) -> ProcessorRow:
    """Measures the process's CPU time while its transfer engine has nothing to do."""
    begin_s, used_s = time.perf_counter(), time.process_time()
    time.sleep(BUSY_S)
    seconds, used_s = time.perf_counter() - begin_s, time.process_time() - used_s
    return ProcessorRow(IDLE, run_bytes, "", used_s / seconds, 0.0, pinned)


def _us(seconds: list[float], share: float) -> float:
    return float(np.percentile(np.array(seconds), share) * 1e6)
