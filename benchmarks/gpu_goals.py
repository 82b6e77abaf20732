"""The goals of a data-centre GPU, and what the rows of `flexkv bench transfer` say of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
TRUE_GDS = "cuFile, GPUDirect Storage"
"""In the note of a row: how `GDSManager.describe` names it, and nothing else."""
FEW = 8
"""Multiprocessors that a transform takes beside the engine, where no row says otherwise."""
COPY_ENGINE = ("batch", "pitched", "single")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached.

    Attributes:
        found: what was measured, the worst of its rows; None where nothing was.
        at_most: `reach` is an upper bound.
    """

    what: str
    reach: float
    found: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        good = self.found <= self.reach if self.at_most else self.found >= self.reach
        return "reached" if good else "**missed**"


def goals(bench: Mapping[str, Any]) -> list[Goal]:
    """Each goal, by the JSON of `flexkv bench transfer`: `rows`, `comparisons` and `thresholds` of it."""
    # Before the GPU has taken the host pool there is no kernel, which would be another path than is meant.
    rows: Sequence[Row] = [row for row in bench["rows"] if row.get("pinned", True)]
    beside: Sequence[Row] = bench["comparisons"]
    one_way = [row for row in rows if row["direction"] in ("H2D", "D2H")]

    def of_limit(smallest: int, largest: int, paths: Iterable[str] | None = None) -> float | None:
        return _least(
            row["share_of_limit"]
            for row in one_way
            if smallest <= row["run_bytes"] <= largest and (paths is None or row["path"] in paths)
        )

    both = _least(
        row["share_of_one_way"]
        for row in rows
        if row["direction"] not in ("H2D", "D2H") and row["run_bytes"] == 2 * MIB
    )
    small = [row["p99_ms"] for row in beside if row["p99_ms"] is not None]
    transforms = [row for row in beside if row["what"] == "layout transform"]
    few = bench["thresholds"].get("transform_multiprocessors", FEW)
    all_of_it = _least(row["share"] for row in transforms if row["multiprocessors"] > few)
    beside_model = _least(row["gbps"] for row in transforms if row["multiprocessors"] <= few)
    return [
        Goal("H2D, D2H, runs of 1 MiB and more, copy engine alone: of one contiguous copy", 0.93,
             of_limit(MIB, 1 << 40, COPY_ENGINE)),
        Goal("the same, 256 KiB", 0.88, of_limit(256 * KIB, 256 * KIB)),
        Goal("the same, 32 KiB", 0.65, of_limit(32 * KIB, 32 * KIB)),
        Goal("both at once, 2 MiB: of one way", 1.6, both),
        Goal("p99 of a 4 KiB D2H while a store streams, more than alone, ms", 0.3,
             small[1] - small[0] if len(small) == 2 else None, at_most=True),
        Goal("layout transform with digests, full grid: of a device-to-device copy", 0.8, all_of_it),
        Goal(f"the same, at most {few} SMs, GB/s", 100.0, beside_model),
        *_disk_goals(beside),
    ]  # fmt: skip


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
             _least(by_run[run]["calls"] / staged[run]["calls"] for run in shared)),
        Goal("staged GDS: of the disk's 2 MiB rate", 0.95, _least(row["share"] for row in staged.values())),
        Goal("staged GDS, runs of at most 16 KiB: of a call a run, times", 3.0,
             _least(staged[run]["gbps"] / by_run[run]["gbps"] for run in shared if run <= 16 * KIB)),
    ]  # fmt: skip


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
