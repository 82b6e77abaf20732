"""Draws the picture of `flexkv bench transfer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexkv.cli.bench.base import ComparisonRow
from flexkv.cli.bench.transfer_bench import TransferRow

KIB = 1 << 10


def draw(rows: Sequence[TransferRow], compared: Sequence[ComparisonRow], path: Path) -> None:
    """Draws two charts of GB/s over run length: the lanes, and the methods with which the lanes are compared.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    axes, others = figure.subplots(1, 2)
    for direction in dict.fromkeys(row.direction for row in rows):
        chosen = [row for row in rows if row.direction == direction]
        axes.plot(
            [row.run_bytes / KIB for row in chosen], [row.gbps for row in chosen], marker="o", label=direction
        )
    for what, direction in dict.fromkeys((row.what, row.direction) for row in compared if row.gbps):
        same = [row for row in compared if (row.what, row.direction) == (what, direction) and row.gbps]
        others.plot(
            [row.run_bytes / KIB for row in same],
            [row.gbps for row in same],
            marker="o",
            label=f"{what}, {direction}",
        )
    for part, title in ((axes, "lanes"), (others, "beside them")):
        part.set_title(title)
        part.set_xscale("log", base=2)
        part.set_xlabel("run, KiB")
        part.set_ylabel("GB/s")
        part.set_ylim(bottom=0)
        part.legend(fontsize="small")
    figure.savefig(path)
