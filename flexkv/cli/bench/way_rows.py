"""`flexkv bench transfer --save`: measures which way is faster for runs of each length on a GPU, and makes the table
from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from flexkv.cli.bench.transfer_bench import RUN_BYTES
from flexkv.transfer.ways_file import ALL_RUNS, CopyWays

BY_KERNEL, BY_ENGINE = CopyWays(ALL_RUNS, ALL_RUNS), CopyWays(0, 0)
ENGINE_LOADS_FROM = 0.95
"""The copy engine, which costs the engine's kernels nothing, loads runs where it reaches this much of the kernel's
rate."""
KERNEL_STORES_FROM = 0.6
"""The kernel stores runs where it reaches this much of the copy engine's rate: beside batches of stores an engine's
steps take longer (docs/gpu.md). An H200's reaches 0.72."""

ROUNDS = 3
"""The best of this many rounds counts, some seconds apart: on a shared machine the link was seen to go at 0.6 of its
rate for one length, and one such length decides the table."""


class Rates(Protocol):
    """The one method of `TransferBench` that this needs."""

    def one_way_gbps(self, run_bytes: int) -> dict[str, float] | None: ...


@dataclass(frozen=True, slots=True)
class WayRow:
    """GB/s (1e9 bytes per second) of runs of one length in one direction, "H2D" or "D2H"."""

    run_bytes: int
    direction: str
    kernel_gbps: float
    engine_gbps: float


def way_rows(bench_of: Callable[[CopyWays], Rates]) -> list[WayRow]:
    """Measures every length of run by the kernel and by the copy engine.

    Args:
        bench_of: makes the measurement of a lane with these ways.
    """
    kernel, engine = bench_of(BY_KERNEL), bench_of(BY_ENGINE)
    best: dict[tuple[int, str], WayRow] = {}
    for _ in range(ROUNDS):
        for run_bytes in RUN_BYTES:
            of_kernel, of_engine = kernel.one_way_gbps(run_bytes), engine.one_way_gbps(run_bytes)
            if of_kernel is None or of_engine is None:
                continue
            for way in ("H2D", "D2H"):
                before = best.get((run_bytes, way), WayRow(run_bytes, way, 0.0, 0.0))
                best[run_bytes, way] = WayRow(
                    run_bytes,
                    way,
                    max(before.kernel_gbps, of_kernel[way]),
                    max(before.engine_gbps, of_engine[way]),
                )
    return list(best.values())


def chosen_ways(rows: Sequence[WayRow]) -> CopyWays:
    """The table: the copy engine gets all lengths from the smallest one from which on it is always the faster way."""

    def below(direction: str) -> int:
        mine = sorted((row for row in rows if row.direction == direction), key=lambda row: -row.run_bytes)
        engines = [row.run_bytes for row in takewhile(_is_engines, mine)]
        return 0 if len(engines) == len(mine) else min(engines, default=ALL_RUNS)

    return CopyWays(below("H2D"), below("D2H"))


def _is_engines(row: WayRow) -> bool:
    if row.direction == "H2D":
        return row.engine_gbps >= ENGINE_LOADS_FROM * row.kernel_gbps
    return row.kernel_gbps < KERNEL_STORES_FROM * row.engine_gbps
