"""The comparisons of `flexkv bench transfer`: one row per comparison, including those that cannot run here."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_LAYERS = 80
"""Layers of the pages that are moved from disk, and through the layout transform."""

PAGE_RUN_BYTES = (4096, 16384, 65536)
"""Lengths of one layer's K or V of one block of these pages."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One comparison.

    Attributes:
        what: the method measured. gbps: 1e9 bytes per second, median; None if the method did not run or has no rate.
        calls: I/O or driver calls of one round; None if they are not counted.
        p99_ms: 99th percentile of single copies, milliseconds; None for other methods.
        path: what moved the bytes; empty if nothing ran.
        multiprocessors: multiprocessors that it takes from the engine's kernels.
        share: share of the rate that `note` names; None if there is none to compare with.
        note: the conditions of the number, or why there is none.
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
