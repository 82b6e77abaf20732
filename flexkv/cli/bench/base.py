"""The comparisons of `flexkv bench transfer`: one row per comparison, including those that cannot run on a machine."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_LAYERS = 80
"""Number of layers of the pages that the measurements of the disk and of the layout transform move."""

PAGE_RUN_BYTES = (4096, 16384, 65536)
"""Run lengths, in bytes, of the pages that the measurements of the disk and of the layout transform move. A run is one
block's K or V in one layer."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One comparison.

    Attributes:
        what: the measured method.
        run_bytes: length of a run in bytes; 0 if the method did not run.
        gbps: median rate in 1e9 bytes per second; None if the method did not run or has no rate.
        calls: I/O or driver calls per round; None if they are not counted.
        p99_ms: 99th percentile of single copies in milliseconds; None if the method does not time single copies.
        path: name of the copy path that moved the bytes; empty if nothing ran.
        multiprocessors: number of multiprocessors that the method takes from the engine's kernels; 0 if it takes none.
        share: ratio of this rate to the rate that `note` describes; None if there is no rate to compare with.
        note: the conditions of the measurement, or why there is none.
    """

    what: str
    direction: str
    run_bytes: int
    gbps: float | None = None
    calls: int | None = None
    p99_ms: float | None = None
    path: str = ""
    multiprocessors: int = 0
    share: float | None = None
    note: str = ""
