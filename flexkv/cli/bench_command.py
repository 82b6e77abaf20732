"""`flexkv bench`: measures the data plane on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from flexkv import c_ext
from flexkv.cli.bench.base import ComparisonRow
from flexkv.cli.bench.beside_rows import SECONDS, beside_rows
from flexkv.cli.bench.disk_rows import disk_rows
from flexkv.cli.bench.event_rows import event_rows
from flexkv.cli.bench.latency_rows import latency_rows
from flexkv.cli.bench.picture import draw
from flexkv.cli.bench.result_file import ResultFile
from flexkv.cli.bench.tables import (
    LEGEND,
    beside_table,
    comparison_table,
    lane_table,
    latency_table,
    processor_table,
)
from flexkv.cli.bench.torch_baseline import both_ways_limit_gbps, index_select_rows, small_copy_rows
from flexkv.cli.bench.transfer_bench import LAYERS, RUN_BYTES, WAIT_S, TransferBench, engine_of
from flexkv.cli.bench.transform_rows import transform_rows
from flexkv.cli.bench.way_rows import BY_KERNEL, chosen_ways, way_rows
from flexkv.config import TransferConfig, load_config
from flexkv.transfer.ways_file import this_key, write_ways

PARTS = ("lanes", "latency", "beside", "torch", "small", "transform", "events", "disk")
"""Parts of the measurement, in the order in which they run: the lanes, what the lanes cost the engine, then the methods
with which the lanes are compared."""
MAX_DEVICE = (1 << 31) - 1
"""Largest device number that the native core accepts."""


@click.group()
def command() -> None:
    """Measure how fast this machine copies."""


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Returns `path` if it is None or a file can be written there. This is checked first, because the measurement takes
    minutes.

    Raises:
        BadParameter: no file can be written at `path`, or a picture's name does not end in .png.
    """
    if path is None:
        return None
    if path.is_dir():
        raise click.BadParameter(f"{path} is a folder; name a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise click.BadParameter(f"no permission to write {path}")
    if parameter.name == "png_file" and path.suffix != ".png":
        raise click.BadParameter(f"{path}: a picture's name ends in .png")
    return path


@command.command("transfer", short_help="Measure copies between an engine's pool and a host pool.")
@click.option(
    "--device",
    type=click.IntRange(max=MAX_DEVICE),
    default=None,
    help="Number of the CUDA device. Default: the first device, or plain memory if there is none.",
)
@click.option(
    "--megabytes",
    default=64,
    show_default=True,
    type=click.IntRange(1, 4096),
    help="MiB that each measurement moves.",
)
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Repetitions of each measurement. Their median is printed.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    help="Folder on a disk. Also measures, on every path, how fast pages are read from it to the pool.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Measure only this part. May be given several times. Default: all parts. lanes: copies between pool and host; "
    "latency: single loads and stores, and their CPU time; beside: how much copies slow down an engine's step (needs "
    "torch); torch, small, transform: other methods, to compare the lanes with; events: loads, timed by the GPU's "
    "clock; disk: reads from disk (needs --folder).",
)
@click.option(
    "--seconds",
    default=SECONDS,
    show_default=True,
    type=click.FloatRange(1.0, 600.0),
    help="Approximate duration of --part beside.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Also write the rows to this file while they are measured. An existing file is replaced.",
)
@click.option(
    "--save",
    "ways_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Measure whether the kernel or the copy engine of this GPU copies runs of each length faster, and write the "
    "table for transfer.ways_file to this file. Without --part, nothing else is measured.",
)
@click.option(
    "--png",
    "png_file",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Also draw the rows as a picture in this file (needs matplotlib).",
)
def transfer(
    device: int | None,
    megabytes: int,
    repeats: int,
    folder: Path | None,
    parts: tuple[str, ...],
    seconds: float,
    json_file: Path | None,
    ways_file: Path | None,
    png_file: Path | None,
) -> None:
    """Measure copies of blocks between an engine's pool and a host pool, and compare them with torch and with one
    contiguous copy.

    A GPU's copies follow the settings transfer.batch_copies, transfer.copy_kernel and transfer.ways_file. A run length
    is left out if a single block with runs of this length is larger than what one measurement moves.
    """
    if "disk" in parts and folder is None:
        raise click.UsageError("--part disk needs --folder, on the disk to measure")
    if folder is not None and parts and "disk" not in parts:
        raise click.UsageError(f"--folder is for --part disk, which is not among {', '.join(parts)}")
    settings = load_config().transfer
    console = Console(width=160)
    if png_file is not None:
        _need_matplotlib()
    found = c_ext.cuda_info()
    if device is None and found["device_count"]:
        device = 0
    if device is None:
        console.print(
            f"No GPU ({found['reason']}): these are the lanes of plain memory, and say nothing of a GPU."
        )
    total_bytes = megabytes << 20
    if ways_file is not None:
        _save_ways(console, ways_file, device, total_bytes, repeats, settings)
        if not parts:
            return
    wanted = parts or PARTS
    bench = TransferBench(device, total_bytes, repeats, settings)
    if device is not None and "lanes" in wanted:
        both = both_ways_limit_gbps(device, total_bytes, repeats)
        bench.limit_gbps |= {} if both is None else {"both": both}
    copies = bench.copies
    facts = {
        "device": device,
        "megabytes": megabytes,
        "repeats": repeats,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "limit_gbps": bench.limit_gbps,
        "thresholds": c_ext.CUDA_THRESHOLDS,
        "copies": copies,
    }
    results = ResultFile(json_file, facts)
    if "lanes" in wanted:
        with _doing(console, "copying"):
            for rows in bench.run():
                results.add_rows(rows)
        results.part_ended("lanes")
        console.print(lane_table(results.rows, bench.limit_gbps))
        console.print(LEGEND, highlight=False)
    if "latency" in wanted:
        with _doing(console, "timing single loads and stores"):
            for latency, processor in latency_rows(device, total_bytes, settings):
                results.add_latency(latency, processor)
        results.part_ended("latency")
        console.print(latency_table(results.latency))
        console.print(processor_table(results.processor))
    if "beside" in wanted:
        with _doing(console, "copying beside an engine's work"):
            for beside_copies in beside_rows(device, total_bytes, settings, seconds):
                results.add_beside(beside_copies)
        results.part_ended("beside")
        console.print(beside_table(results.beside))
    beside = {
        "torch": lambda: index_select_rows(device, RUN_BYTES, LAYERS, total_bytes, repeats),
        "small": lambda: _small_copies(device, bench),
        "transform": lambda: transform_rows(device, bench.multiprocessors, total_bytes, repeats),
        "events": lambda: event_rows(device, bench),
    }
    if chosen := [part for part in beside if part in wanted]:
        with _doing(console, "comparing"):
            for part in chosen:
                results.compare(beside[part]())
                results.part_ended(part)
    if folder is not None and "disk" in wanted:
        try:
            with _doing(console, "reading from disk"):
                from_disk = disk_rows(device, bench.multiprocessors, folder, total_bytes, repeats, settings)
                results.compare(from_disk)
        except OSError as error:
            raise click.ClickException(f"--folder {folder}: {error}") from error
        results.part_ended("disk")
    if results.compared:
        console.print(comparison_table(results.compared))
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", highlight=False)
    if device is not None:
        for name, value in c_ext.CUDA_THRESHOLDS.items():
            console.print(f"{name} = {value}", highlight=False)
    for direction, ways in copies.items():
        console.print(f"{direction}: {ways}", highlight=False)
    if png_file is not None:
        draw(results.rows, results.compared, png_file)


def _save_ways(
    console: Console, path: Path, device: int | None, total_bytes: int, repeats: int, settings: TransferConfig
) -> None:
    if device is None:
        raise click.UsageError("--save measures a GPU's ways, and there is none")
    if not settings.copy_kernel:
        raise click.UsageError("--save compares with the kernel, which transfer.copy_kernel switches off")
    engine = engine_of(device, settings, ways=BY_KERNEL)
    lane = engine.cuda_lane
    notes = lane.notes if lane is not None and "kernel" not in lane.ways["h2d"] else ""
    engine.close(WAIT_S)
    if notes:
        raise click.UsageError(f"--save compares with the kernel, which cannot be used here: {notes}")
    key = this_key(device)
    with _doing(console, "comparing the kernel with the copy engine"):
        rows = way_rows(lambda ways: TransferBench(device, total_bytes, repeats, settings, ways))
    ways = chosen_ways(rows)
    try:
        write_ways(path, key, ways, [asdict(row) for row in rows])
    except OSError as error:
        raise click.ClickException(f"--save {path}: {error}") from error
    for row in rows:
        rates = f"kernel {row.kernel_gbps:.1f} GB/s, copy engine {row.engine_gbps:.1f}"
        console.print(f"{row.direction} {row.run_bytes} bytes: {rates}", highlight=False)
    console.print(f"{path}: the ways of {key}; transfer.ways_file names it", highlight=False)


def _small_copies(device: int | None, bench: TransferBench) -> list[ComparisonRow]:
    with bench.storing() as store:
        return small_copy_rows(device, store)


@contextmanager
def _doing(console: Console, what: str) -> Iterator[None]:
    """Shows `what`, the current step: beside a spinner on a terminal, and as a line elsewhere, for example in a log."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} ...", highlight=False)
        yield


def _need_matplotlib() -> None:
    """Raises UsageError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--png needs matplotlib: pip install matplotlib") from error
