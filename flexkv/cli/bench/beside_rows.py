"""Measures how much flexkv's copies slow down the engine's own work: `flexkv bench transfer --part beside`.

A round measures each kind of work first alone and then during each kind of copies. A measurement alone and one during
copies of the same round form a pair, so clock rates and temperatures are similar in a pair. A row is the median over
its pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.cli.bench.engine_work import LAUNCH, STEP, WORKS, EngineWork, Window, make_engine_work
from flexkv.cli.bench.op_stream import DRAIN_S, OpStream
from flexkv.cli.bench.transfer_bench import chosen_path, path_bytes, pooled_engine
from flexkv.config import TransferConfig
from flexkv.errors import ContractError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpKind

RUN_BYTES = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
LAYERS = 32
POOL_BYTES = 512 << 20
"""Size in bytes of the smallest pool on a GPU. Up to six ops are in flight and share no block, so each op moves 85 MiB:
the KV of a prompt of a few thousand tokens."""
PAIRS = 5
SECONDS = 40.0
"""Seconds for all rows together, if the caller does not choose them."""
SHARES = {"decoding step": 0.4, "large product": 0.25, "small D2H": 0.2, "small H2D": 0.15}
"""Share of each kind of work in the time of a set of windows (a set has one window per kind). A kind whose 99th
percentile needs more samples has a larger share.
"""
PAUSE_SHARE = 0.12
"""Share of the time of a set of windows in which nothing is measured: until the set's first copy has finished, and
while its last copies finish."""


@dataclass(frozen=True, slots=True)
class CopyKind:
    """One kind of copies that are made at the same time as the engine's work."""

    direction: str
    kinds: tuple[OpKind, ...]
    layerwise: bool = False


COPY_KINDS = (
    CopyKind("D2H", (OpKind.D2H,)),
    CopyKind("H2D", (OpKind.H2D,)),
    CopyKind("H2D", (OpKind.H2D,), layerwise=True),
    CopyKind("both", (OpKind.H2D, OpKind.D2H)),
)


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One kind of work during one kind of copies.

    Attributes:
        direction: "H2D", "D2H" or "both" at once.
        layerwise: whether loads were moved layer by layer.
        run_bytes: length of a run in bytes; 0 if nothing was measured.
        path: the path that copied most of the bytes. `path_bytes` contains the bytes of every path.
        multiprocessors: number of multiprocessors that the path takes.
        alone_p50_ms, alone_p99_ms, beside_p50_ms, beside_p99_ms: percentiles of the work's time over all windows, alone
            and during copies, in milliseconds; None if nothing was measured.
        factor: the work's median time during copies divided by its median time alone: the median over all pairs; None
            if nothing was measured. `factor_least` and `factor_most` are the smallest and the largest factor of a pair.
        load_gbps, store_gbps: rate of the copies in 1e9 bytes per second, median over all pairs; None for a direction
            that did not run.
        pairs: number of pairs of measurements.
        pinned: whether the GPU had registered all host memory; True for plain memory.
        note: why nothing was measured, or that plain memory was measured.
    """

    work: str
    direction: str
    layerwise: bool
    run_bytes: int
    path: str = ""
    multiprocessors: int = 0
    alone_p50_ms: float | None = None
    alone_p99_ms: float | None = None
    beside_p50_ms: float | None = None
    beside_p99_ms: float | None = None
    factor: float | None = None
    factor_least: float | None = None
    factor_most: float | None = None
    load_gbps: float | None = None
    store_gbps: float | None = None
    pairs: int = 0
    pinned: bool = True
    note: str = ""
    path_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Pairs:
    """The times of one kind of work: in the windows during one kind of copies (`beside`), and in the windows without
    copies that came before them (`alone`).
    """

    alone: list[NDArray[np.float64]] = field(default_factory=list)
    beside: list[NDArray[np.float64]] = field(default_factory=list)
    load_gbps: list[float] = field(default_factory=list)
    store_gbps: list[float] = field(default_factory=list)


def beside_rows(
    device: int | None, total_bytes: int, settings: TransferConfig, seconds: float
) -> Iterator[list[BesideRow]]:
    """Yields the rows of each run length in turn, and takes about `seconds` for all of them.

    Args:
        device: the CUDA device; None for plain memory and work on the CPU.
        total_bytes: size of the pool. A pool on a GPU has at least `POOL_BYTES`.

    Raises:
        CapacityError: there is not enough memory.
        ContractError: a copy failed.
    """
    ends_s = time.monotonic() + seconds
    work = make_engine_work(device)
    if isinstance(work, str):
        yield [
            BesideRow(name, kind.direction, kind.layerwise, 0, note=f"not measured: {work}")
            for kind in COPY_KINDS
            for name in (*WORKS, LAUNCH)
        ]
        return
    with work:
        size = total_bytes if device is None else max(total_bytes, POOL_BYTES)
        memory = np.zeros(size, np.uint8) if device is None else c_ext.DeviceMemory(device, size)
        base = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.address
        lengths = [run for run in RUN_BYTES if size // (run * LAYERS) >= 1]
        for number, run_bytes in enumerate(lengths):
            blocks = size // (run_bytes * LAYERS)
            until_s = time.monotonic() + (ends_s - time.monotonic()) / (len(lengths) - number)
            with pooled_engine(device, settings, base, run_bytes, LAYERS, blocks) as (engine, pinned):
                yield _rows_of(engine, work, run_bytes, blocks, pinned, until_s)


def _rows_of(
    engine: TransferEngine, work: EngineWork, run_bytes: int, blocks: int, pinned: bool, until_s: float
) -> list[BesideRow]:
    kinds = [kind for kind in COPY_KINDS if blocks >= len(kind.kinds)]
    pairs = {(kind, name): _Pairs() for kind in kinds for name in (*WORKS, LAUNCH)}
    moved: dict[CopyKind, dict[str, int]] = {kind: {} for kind in kinds}
    sets = PAIRS * (1 + len(kinds))
    for name in WORKS:  # not measured, because the first run of each kind of work is slow
        work.run(name, 0.0, _nothing)
    for done in range(PAIRS):
        set_s = _share_s(until_s, sets - done * (1 + len(kinds)))
        alone = {name: work.run(name, SHARES[name] * set_s, _nothing) for name in WORKS}
        for number, kind in enumerate(kinds):
            set_s = _share_s(until_s, sets - done * (1 + len(kinds)) - 1 - number)
            before = path_bytes(engine)
            copies = OpStream(
                engine, kind.kinds, blocks, run_bytes * LAYERS, kind.layerwise, stream=work.stream
            )
            beside = _measure_beside(copies, work, set_s)
            for path, count in path_bytes(engine).items():
                moved[kind][path] = moved[kind].get(path, 0) + count - before[path]
            for name in WORKS:
                _add(pairs[kind, name], alone[name].times_ms, beside[name].times_ms, copies, beside[name])
            _add(pairs[kind, LAUNCH], alone[STEP].launch_ms, beside[STEP].launch_ms, copies, beside[STEP])
    note = "" if engine.device is not None else "plain memory: a CPU computes and copies"
    return [
        _row(found, kind, name, run_bytes, moved[kind], pinned, note) for (kind, name), found in pairs.items()
    ]


def _measure_beside(copies: OpStream, work: EngineWork, set_s: float) -> dict[str, Window]:
    """Measures every kind of work while the copies run, then waits for the copies to finish."""
    ends_s = time.monotonic() + DRAIN_S
    while copies.ended_ops < 1:
        copies.keep()
        if time.monotonic() > ends_s:
            raise ContractError(f"no copy ended in {DRAIN_S:.0f} s")
    try:
        return {name: work.run(name, SHARES[name] * set_s, copies.keep) for name in WORKS}
    finally:
        copies.drain()


def _share_s(until_s: float, sets: int) -> float:
    """Returns the seconds for the windows of one set if `sets` sets remain until `until_s`."""
    return max(0.0, until_s - time.monotonic()) / sets * (1.0 - PAUSE_SHARE)


def _add(
    pair: _Pairs,
    alone_ms: NDArray[np.float64],
    beside_ms: NDArray[np.float64],
    copies: OpStream,
    window: Window,
) -> None:
    pair.alone.append(alone_ms)
    pair.beside.append(beside_ms)
    for kind, rates in ((OpKind.H2D, pair.load_gbps), (OpKind.D2H, pair.store_gbps)):
        if (rate := copies.gbps(kind, window.begin_s, window.end_s)) is not None:
            rates.append(rate)


def _row(
    found: _Pairs, kind: CopyKind, work: str, run_bytes: int, moved: dict[str, int], pinned: bool, note: str
) -> BesideRow:
    alone, beside = np.concatenate(found.alone), np.concatenate(found.beside)
    factors = pair_factors(found.alone, found.beside)
    path, multiprocessors = chosen_path(moved, kind.direction)
    return BesideRow(
        work,
        kind.direction,
        kind.layerwise,
        run_bytes,
        path,
        multiprocessors,
        alone_p50_ms=float(np.percentile(alone, 50)),
        alone_p99_ms=float(np.percentile(alone, 99)),
        beside_p50_ms=float(np.percentile(beside, 50)),
        beside_p99_ms=float(np.percentile(beside, 99)),
        factor=statistics.median(factors),
        factor_least=min(factors),
        factor_most=max(factors),
        load_gbps=statistics.median(found.load_gbps) if found.load_gbps else None,
        store_gbps=statistics.median(found.store_gbps) if found.store_gbps else None,
        pairs=len(factors),
        pinned=pinned,
        note=note,
        path_bytes={name: count for name, count in moved.items() if count},
    )


def pair_factors(alone: Sequence[NDArray[np.float64]], beside: Sequence[NDArray[np.float64]]) -> list[float]:
    """Returns for each pair the median time during copies divided by the median time alone."""
    return [
        float(np.median(with_copies) / np.median(without))
        for without, with_copies in zip(alone, beside, strict=True)
    ]


def _nothing() -> None:
    """Does nothing. Passed to `EngineWork.run` as `between` for work that runs alone, without copies."""
