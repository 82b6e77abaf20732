"""`flexkv bench transfer --save`: measures for each run length how fast a GPU's kernel and its copy engine are, and
makes the table for `transfer.ways_file`.
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
"""The copy engine takes no multiprocessors from the inference engine's kernels. So it is used for loads of every run
length at which it reaches this share of the kernel's rate.
"""
KERNEL_STORES_FROM = 0.6
"""The kernel is used for stores of every run length at which it reaches this share of the copy engine's rate. It need
not be as fast as the copy engine, whose batches of stores slow down the inference engine's steps (docs/gpu.md). An
H200's kernel reaches 0.72.
"""

ROUNDS = 3
"""Rounds of measurement, some seconds apart; the best rate counts. On a shared machine, the link once reached only 0.6
of its usual rate at one run length, and a single wrong rate can change the table.
"""


class Rates(Protocol):
    """The one method of `TransferBench` that `way_rows` needs."""

    def one_way_gbps(self, run_bytes: int) -> dict[str, float] | None: ...


@dataclass(frozen=True, slots=True)
class WayRow:
    """Rates (1e9 bytes per second) of the kernel and the copy engine for one run length in one direction, "H2D" or
    "D2H"."""

    run_bytes: int
    direction: str
    kernel_gbps: float
    engine_gbps: float


def way_rows(bench_of: Callable[[CopyWays], Rates]) -> list[WayRow]:
    """Measures every run length with the kernel and with the copy engine.

    Args:
        bench_of: takes a table, and makes a measurement whose lane copies as the table says.
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
    """Returns the table that follows from the measured rows. In each direction the kernel copies all runs shorter than
    a limit, and the copy engine all longer ones. The limit is the shortest run length from which on the copy engine is
    preferred at every measured length."""

    def below(direction: str) -> int:
        mine = sorted((row for row in rows if row.direction == direction), key=lambda row: -row.run_bytes)
        engines = [row.run_bytes for row in takewhile(_is_engines, mine)]
        return 0 if len(engines) == len(mine) else min(engines, default=ALL_RUNS)

    return CopyWays(below("H2D"), below("D2H"))


def _is_engines(row: WayRow) -> bool:
    if row.direction == "H2D":
        return row.engine_gbps >= ENGINE_LOADS_FROM * row.kernel_gbps
    return row.kernel_gbps < KERNEL_STORES_FROM * row.engine_gbps
