"""The tables that `flexkv bench transfer` prints."""

from __future__ import annotations

from rich.table import Table

from flexkv.cli.bench.base import ComparisonRow
from flexkv.cli.bench.beside_rows import BesideRow
from flexkv.cli.bench.latency_rows import LatencyRow, ProcessorRow
from flexkv.cli.bench.transfer_bench import TransferRow
from flexkv.config.sizes import format_size

LEGEND = """\
Each block has one run per layer in the engine's pool. All rows copy the same number of bytes, in runs of the given
length. H2D: from host memory to the pool (a load). D2H: from the pool to host memory (a store). both: both directions
at the same time, with their rates added up.
of one copy: rate divided by that of one contiguous copy; above 1 if the lane is faster than that copy.
both / one way: rate divided by that of the faster direction alone.
one call per run: rate with a separate driver call for each run."""


def lane_table(rows: list[TransferRow], limit_gbps: dict[str, float]) -> Table:
    limits = ", ".join(f"{name} {rate:.1f}" for name, rate in limit_gbps.items())
    table = Table(title=f"GB/s, median; one contiguous copy: {limits}")
    for heading in (
        "run",
        "direction",
        "path",
        "multiprocessors",
        "GB/s",
        "of one copy",
        "both / one way",
        "one call per run",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            format_size(row.run_bytes),
            row.direction,
            row.path,
            str(row.multiprocessors),
            f"{row.gbps:.1f}",
            _number(row.share_of_limit, ".2f"),
            _number(row.share_of_one_way, ".2f"),
            _number(row.single_calls_gbps, ".1f"),
        )
    return table


def comparison_table(rows: list[ComparisonRow]) -> Table:
    table = Table(title="other methods and measurements, median")
    for heading in ("what", "direction", "run", "GB/s", "calls", "p99 ms", "share", "path", "SMs", "note"):
        table.add_column(heading, justify="left" if heading in ("what", "path", "note") else "right")
    for row in rows:
        table.add_row(
            row.what,
            row.direction,
            format_size(row.run_bytes) if row.run_bytes else "-",
            _number(row.gbps, ".2f"),
            _number(row.calls, "d"),
            _number(row.p99_ms, ".3f"),
            _number(row.share, ".2f"),
            row.path,
            str(row.multiprocessors),
            row.note,
        )
    return table


def beside_table(rows: list[BesideRow]) -> Table:
    """Returns the table that shows how much copies slow down an engine's work."""
    pairs = max((row.pairs for row in rows), default=0)
    notes = "; ".join(dict.fromkeys(row.note for row in rows if row.note))
    title = f"an engine's work alone and beside copies, median of {pairs} pairs of measurements"
    table = Table(title=title, caption=notes or None)
    headings = (
        "work",
        "copies",
        "run",
        "path",
        "SMs",
        "alone p50 ms",
        "p99",
        "beside p50 ms",
        "p99",
        "factor",
    )
    for heading in (*headings, "of pairs", "load GB/s", "store GB/s"):
        left = heading in ("work", "copies")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        spread = "-"
        if row.factor_least is not None and row.factor_most is not None:
            spread = f"{row.factor_least:.2f}-{row.factor_most:.2f}"
        table.add_row(
            row.work,
            row.direction + (" by layer" if row.layerwise else ""),
            format_size(row.run_bytes) if row.run_bytes else "-",
            row.path,
            str(row.multiprocessors),
            _number(row.alone_p50_ms, ".4f"),
            _number(row.alone_p99_ms, ".4f"),
            _number(row.beside_p50_ms, ".4f"),
            _number(row.beside_p99_ms, ".4f"),
            _number(row.factor, ".3f"),
            spread,
            _number(row.load_gbps, ".1f"),
            _number(row.store_gbps, ".1f"),
        )
    return table


def latency_table(rows: list[LatencyRow]) -> Table:
    """Returns the table of single loads and stores."""
    table = Table(title="time from submission to end in us, with nothing else running")
    headings = ("op", "run", "blocks", "path", "p50", "p99", "submit", "first layer", "GB/s", "times")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for row in rows:
        table.add_row(
            row.what,
            format_size(row.run_bytes),
            str(row.blocks),
            row.path,
            f"{row.p50_us:.1f}",
            f"{row.p99_us:.1f}",
            f"{row.submit_us:.1f}",
            _number(row.first_layer_us, ".1f"),
            f"{row.gbps:.2f}",
            str(row.times),
        )
    return table


def processor_table(rows: list[ProcessorRow]) -> Table:
    """Returns the table of the process's CPU time."""
    table = Table(title="CPU time of the process while copies follow each other without a pause")
    for heading in ("copies", "run", "path", "cores", "GB/s"):
        table.add_column(heading, justify="left" if heading == "copies" else "right")
    for row in rows:
        table.add_row(row.what, format_size(row.run_bytes), row.path, f"{row.cores:.3f}", f"{row.gbps:.1f}")
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
