"""Times loads with the GPU's own clock. So the times do not include the delay until this process notices that a load
has finished."""

from __future__ import annotations

from typing import Any

from flexkv.cli.bench.base import ComparisonRow
from flexkv.cli.bench.event_clock import EventClock
from flexkv.cli.bench.transfer_bench import TransferBench
from flexkv.cli.driver_calls import DriverRefused

WHAT = "load, by CUDA events"
RUNS = (32 << 10, 256 << 10, 1 << 20)
"""Run lengths to which goals in docs/gpu-results.md apply."""


def event_rows(device: int | None, bench: TransferBench) -> list[ComparisonRow]:
    """Returns a row for each of RUNS. If the GPU or the package extra `flexkv[gpu]` is missing, returns a single row
    that says so.
    """
    if device is None:
        return [ComparisonRow(WHAT, "H2D", 0, note="not measured: no GPU")]
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return [ComparisonRow(WHAT, "H2D", 0, note=f"cuda-bindings cannot be loaded: {error}")]
    return measure(driver, device, bench)


def measure(driver: Any, device: int, bench: TransferBench) -> list[ComparisonRow]:
    rows: list[ComparisonRow] = []
    try:
        with EventClock(driver, device) as clock:
            for run_bytes in RUNS:
                found = bench.loads_by_events(run_bytes, clock)
                if found is None:
                    continue  # one block has more bytes than the measurement moves
                gbps, path, multiprocessors = found
                rows.append(
                    ComparisonRow(
                        WHAT,
                        "H2D",
                        run_bytes,
                        gbps,
                        path=path,
                        multiprocessors=multiprocessors,
                        share=gbps / bench.limit_gbps["H2D"],
                        note="from the engine's last work before to its next behind; share of one contiguous copy",
                    )
                )
    except (DriverRefused, RuntimeError) as error:  # RuntimeError: the bindings found no libcuda
        rows.append(ComparisonRow(WHAT, "H2D", 0, note=str(error).strip()))
    return rows
