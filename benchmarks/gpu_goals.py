"""The goals for a data-centre GPU, each with the figure that the rows of `flexkv bench transfer` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_engine_goals import beside_goals, latency_goals, processor_goals
from benchmarks.gpu_goal import Goal, Row, least

KIB, MIB = 1 << 10, 1 << 20
TRUE_GDS = "cuFile, GPUDirect Storage"
"""A row's note contains this text only if GPUDirect Storage was used. `GDSManager.describe` writes the text."""
FEW = 8
"""Maximum number of multiprocessors that a layout transform takes from the engine. This value is used for results that
do not state the number.
"""
ANY_LENGTH = 1 << 40


def goals(bench: Mapping[str, Any]) -> list[Goal]:
    """Returns every goal, with its figure from the JSON of `flexkv bench transfer`."""
    # Rows that are not pinned are left out: until the host pool is registered with the GPU, copies do not use
    # the kernel, so these rows measured a different path.
    rows: Sequence[Row] = [row for row in bench["rows"] if row.get("pinned", True)]
    beside: Sequence[Row] = bench["comparisons"]
    transforms = [row for row in beside if row["what"] == "layout transform"]
    few = bench["thresholds"].get("transform_multiprocessors", FEW)
    all_of_it = least(row["share"] for row in transforms if row["multiprocessors"] > few)
    beside_model = least(row["gbps"] for row in transforms if row["multiprocessors"] <= few)
    return [
        *beside_goals(bench["beside"]),
        *_rate_goals(rows),
        *latency_goals(bench["latency"], bench["limit_gbps"].get("H2D")),
        *processor_goals(bench["processor"]),
        Goal("layout transform with digests, full grid: of a device-to-device copy", 0.8, all_of_it),
        Goal(f"the same, at most {few} SMs, GB/s", 100.0, beside_model),
        *_disk_goals(beside),
    ]  # fmt: skip


def _rate_goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the goals for how close the lanes come to the rate of one contiguous copy."""

    def share(smallest: int, largest: int, direction: str) -> float | None:
        return least(
            row["share_of_limit"]
            for row in rows
            if smallest <= row["run_bytes"] <= largest and row["direction"] == direction
        )

    found = []
    for runs, smallest, largest, load, store in (
        ("4 KiB", 4 * KIB, 4 * KIB, 0.85, 0.65),
        ("16 KiB", 16 * KIB, 16 * KIB, 0.85, 0.78),
        ("32 and 64 KiB", 32 * KIB, 64 * KIB, 0.85, 0.82),
        ("256 KiB and more", 256 * KIB, ANY_LENGTH, 0.90, 0.85),
    ):
        found += [
            Goal(f"loads, runs of {runs}: of one contiguous copy", load, share(smallest, largest, "H2D")),
            Goal(f"stores, runs of {runs}: of one contiguous copy", store, share(smallest, largest, "D2H")),
        ]
    both = "both ways at once, runs of {}: of a contiguous copy each way"
    return [
        *found,
        Goal(both.format("less than 256 KiB"), 0.70, share(0, 256 * KIB - 1, "both")),
        Goal(both.format("256 KiB and more"), 0.80, share(256 * KIB, ANY_LENGTH, "both")),
    ]


def _disk_goals(beside: Sequence[Row]) -> list[Goal]:
    def of(what: str) -> dict[int, Row]:
        return {
            row["run_bytes"]: row
            for row in beside
            if row["what"] == f"disk to pool, {what}" and TRUE_GDS in row["note"]
        }

    staged, by_run = of("staged"), of("a call a run")
    shared = sorted(staged.keys() & by_run.keys())
    return [
        Goal("staged GDS, 80 layers: calls fewer than a call a run, times", 80.0,
             least(by_run[run]["calls"] / staged[run]["calls"] for run in shared)),
        Goal("staged GDS: of the disk's 2 MiB rate", 0.95, least(row["share"] for row in staged.values())),
        Goal("staged GDS, runs of at most 16 KiB: of a call a run, times", 3.0,
             least(staged[run]["gbps"] / by_run[run]["gbps"] for run in shared if run <= 16 * KIB)),
    ]  # fmt: skip
