"""Compares the disk tier with fio and with a raw I/O loop ("bare"). The loop uses the same kind of io_uring ring, slab
file and huge pages, and the same queue depth, but has no trailer, digest or index.

Each round runs every method once, in random order, so that noise affects all methods alike. Figures are medians of
payload GB/s. CPU time is user and system time of all threads of the process; fio reports its own CPU time. A write ends
when it is durable: for the tier when its journal reports it as durable, for the raw loop after one fdatasync at its
end.

- `fill` is the first pass of writes over a new slab, `ahead` a first pass after the idle disk has cleared the slots in
  advance, and `write` a later pass.
- `registered` is a tier whose host pool is registered with io_uring, which keeps the pool pinned.
- `durable` is the time from the end of a page's write until the page is durable, under continuous writes.
- `layerwise` loads 32,768 tokens at once, page by page and in ranges of layers.
- `streamed` loads each page to an engine's pool in plain memory as soon as the page has been read. It is compared with
  a load that begins after the last read.
- `cold` is the start of a tier with 1M blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.disk_rig import BLOCK_TOKENS, DEPTH, KIB, LAYERS, MIB, WAIT_S, Rig
from flexkv import c_ext
from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.storage.index import SlotIndex
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import (
    NO_READS,
    OpId,
    OpKind,
    OpStatus,
    Priority,
    ReadIds,
    TransferGraph,
    TransferOp,
)

PAGES = (2 * MIB, 64 * KIB)
FILLS = 3
"""Number of new slabs. Each slab is filled once, because a slab has only one first pass of writes."""
LAG_BYTES = 8 * MIB
LOAD_PAGES = 512
"""Number of pages of a layerwise load. They hold 32,768 tokens in blocks of 64. A token takes 32 KiB, as in a model of
16 layers with 8 KV heads of 64 elements of 16 bits.
"""
STREAM_BYTES = 256 * MIB
COLD_BLOCKS = 1_000_000
COLD_READ = 1000

Sample = tuple[float, float]
"""Wall seconds of a call, and CPU seconds of all threads during it."""


def timed(call: Callable[[], object]) -> Sample:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    took = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_fills(folder: Path, page_bytes: int, slots: int) -> dict[str, list[Sample]]:
    """Times the first pass of writes over new slabs: by the tier, by the raw loop, and by the tier after its idle disk
    has cleared the slots. Makes each of these three measurements FILLS times.
    """
    samples: dict[str, list[Sample]] = {"fill": [], "fill bare": [], "ahead": []}
    places = np.arange(slots, dtype=np.int32)
    for number in range(FILLS):
        for name in np.random.default_rng(number).permutation(list(samples)).tolist():
            with tempfile.TemporaryDirectory(dir=folder) as new:
                rig = Rig(Path(new), page_bytes, slots)
                if name == "ahead":
                    rig.clear_ahead()
                call = (
                    (lambda r=rig: r.bare(places, True))
                    if "bare" in name
                    else (lambda r=rig: r.write(places))
                )
                samples[name].append(timed(call))
                rig.close()
    return samples


def fio(folder: Path, page_bytes: int, kind: str, slots: int) -> Sample | None:
    """Runs fio's random reads or writes of `slots` pages. Returns None if fio is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [program, "--name=x", f"--filename={folder / 'fio'}", f"--size={slots * page_bytes}"]
    command += [f"--bs={page_bytes}", f"--rw=rand{kind}", "--ioengine=io_uring", f"--iodepth={DEPTH}"]
    command += ["--direct=1", "--end_fsync=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    took = slots * page_bytes / job[kind]["bw_bytes"]
    return took, took * (job["usr_cpu"] + job["sys_cpu"]) / 100


def measure(folder: Path, page_bytes: int, slots: int, rounds: int) -> dict[str, dict[str, float]]:
    """Runs all rounds. Returns for each method the medians of payload GB/s and of CPU cores per GB/s."""
    samples = first_fills(folder, page_bytes, slots)
    rig = Rig(folder / "steady", page_bytes, slots)
    other = Rig(folder / "bare", page_bytes, slots)
    registered = Rig(folder / "registered", page_bytes, slots, register_buffers=True)
    rng = np.random.default_rng(1)
    order = rng.permutation(slots).astype(np.int32)
    rig.write(order)
    other.bare(order, True)
    registered.write(order)
    calls: dict[str, Callable[[], Sample | None]] = {
        "write": lambda: timed(lambda: rig.write(order)),
        "write bare": lambda: timed(lambda: other.bare(order, True)),
        "write fio": lambda: fio(folder, page_bytes, "write", slots),
        "write registered": lambda: timed(lambda: registered.write(order)),
        "read": lambda: timed(lambda: rig.read(order)),
        "read registered": lambda: timed(lambda: registered.read(order)),
        "read bare": lambda: timed(lambda: other.bare(order, False)),
        "read fio": lambda: fio(folder, page_bytes, "read", slots),
    }
    calls["write fio"]()  # creates the file that fio reads
    for _ in range(rounds):
        order = rng.permutation(slots).astype(np.int32)
        for name in rng.permutation(list(calls)).tolist():
            sample = calls[name]()
            if sample is not None:
                samples.setdefault(name, []).append(sample)
    for used in (rig, other, registered):
        used.close()
    payload = slots * page_bytes / 1e9
    return {
        name: {
            "gb_per_s": payload / statistics.median(took for took, _ in taken),
            "cores_per_gb_s": statistics.median(cpu for _, cpu in taken) / payload,
        }
        for name, taken in samples.items()
    }


def durable(folder: Path, page_bytes: int, slots: int, rounds: int) -> dict[str, float]:
    """Measures the milliseconds from the end of a page's write until the page is durable, while pages are written
    without a pause. Pages are written in batches of LAG_BYTES.
    """
    rig = Rig(folder, page_bytes, slots)
    rig.batch = LAG_BYTES // page_bytes
    rng = np.random.default_rng(5)
    for _ in range(rounds):
        rig.write(rng.permutation(slots).astype(np.int32))
    lags_ms = np.concatenate(rig.lags_s) * 1e3
    rig.close()
    return {
        "pages": len(lags_ms),
        "median_ms": float(np.median(lags_ms)),
        "p99_ms": float(np.percentile(lags_ms, 99)),
        "most_ms": float(lags_ms.max()),
    }


def layerwise(folder: Path, rounds: int) -> dict[str, float]:
    """Returns the medians of three times in milliseconds: the time of a load page by page, the time of a load in ranges
    of layers, and the time until the first layer of the load in ranges has arrived. Also returns ratios of these times.
    """
    rig = Rig(folder, 2 * MIB, LOAD_PAGES, host_slots=LOAD_PAGES)
    places = np.random.default_rng(3).permutation(LOAD_PAGES).astype(np.int32)
    for first in range(0, LOAD_PAGES, rig.batch):
        rig.write(places[first : first + rig.batch])
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for by_layers in (False, True) if number % 2 else (True, False):
            taken[by_layers].append(rig.load(places, by_layers))
    rig.close()
    pages = statistics.median(total for _, total in taken[False])
    layers = statistics.median(total for _, total in taken[True])
    return {
        "layers": LAYERS,
        "pages_ms": pages * 1e3,
        "layers_ms": layers * 1e3,
        "first_layer_ms": statistics.median(first for first, _ in taken[True]) * 1e3,
        "first_layer_of_total": statistics.median(first / total for first, total in taken[True]),
        "layers_over_pages": layers / pages,
    }


def streamed(folder: Path, page_bytes: int, rounds: int) -> dict[str, float]:
    """Returns the median times in milliseconds of a streamed load from disk to an engine's pool, of a load that is not
    streamed, and of the copy alone.
    """
    count = STREAM_BYTES // page_bytes
    rig = Rig(folder, page_bytes, count, count)
    pages = np.arange(count, dtype=np.int32)
    rig.write(pages)
    memory = np.zeros((count, page_bytes), np.uint8)
    view = c_ext.KvView(np.array([[memory.ctypes.data, page_bytes, page_bytes, 0, 0]]), count, page_bytes)
    device = TransferEngine()
    device.attach_view(0, view, rig.pool, 0, owners=[memory])
    numbers = iter(range(1, 1_000_000))

    def copy(reads: ReadIds, read: Callable[[], object] = lambda: None) -> None:
        op = TransferOp(OpId(next(numbers)), OpKind.H2D, 0, Priority.LOAD, pages, pages, reads=reads)
        ticket = device.submit(TransferGraph((op,)))
        assert ticket is not None
        read()
        assert device.wait(ticket, WAIT_S)
        assert all(result.status is OpStatus.OK for result in device.poll())

    def read_all() -> None:
        rig.finish(rig.submit(OpKind.DISK_READ, pages, pages))

    def load_then() -> None:
        read_all()
        copy(NO_READS)

    def load_streamed() -> None:
        # The copy needs the read's op id before `read_all` submits the read. Op ids are consecutive, so the read gets
        # the id after the one that `next` returns here.
        copy(np.full(count, next(rig.op_ids) + 1, np.int64), read_all)

    methods: dict[str, Callable[[], None]] = {
        "whole": load_then,
        "streamed": load_streamed,
        "copy": lambda: copy(NO_READS),
    }
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name in methods if number % 2 else reversed(methods):
            start = time.perf_counter()
            methods[name]()
            taken[name].append(time.perf_counter() - start)
    assert device.close(WAIT_S)
    rig.close()
    # The first round does not count, because it is the first to touch the pool's memory.
    ratios = [s / w for s, w in zip(taken["streamed"][1:], taken["whole"][1:], strict=True)]
    times = {f"{name}_ms": statistics.median(seconds[1:]) * 1e3 for name, seconds in taken.items()}
    return {**times, "streamed_over_whole": statistics.median(ratios)}


def cold_start(folder: Path) -> dict[str, float]:
    """Times the start of a tier whose index has COLD_BLOCKS blocks of 4 KiB, and a read of COLD_READ of these blocks.
    Only the blocks that are read were written before.
    """
    rig = Rig(folder, 4 * KIB, COLD_BLOCKS, COLD_READ, preallocate=False)
    written = np.sort(np.random.default_rng(2).permutation(COLD_BLOCKS)[:COLD_READ]).astype(np.int32)
    rig.batch = COLD_READ // 2
    rig.write(written)
    generations = rig.generations[written]
    rig.close()
    # All other blocks are only rows of the index, without written pages. Rows are enough, because opening takes time
    # per row, and reading takes time only for the pages that are read.
    index = SlotIndex(next(folder.rglob("index.sqlite")), [COLD_BLOCKS])
    others = np.setdiff1d(np.arange(COLD_BLOCKS), written)
    zeros = np.zeros(len(others), np.uint64)
    tokens = np.full(len(others), 16, np.int32)
    index.publish(0, others, rig.keys[others], zeros + np.uint64(1), zeros, tokens, 1)
    index.commit()
    index.close()
    keys = rig.keys
    start = time.perf_counter()
    rig = Rig(folder, 4 * KIB, COLD_BLOCKS, COLD_READ, preallocate=False)
    opened = time.perf_counter() - start
    cached = LocalCacheManager([GroupSpec(BLOCK_TOKENS, COLD_READ)], tiers=unit_tiers(rig.unit))
    known = cached.present(0, keys)
    answered = time.perf_counter() - start
    assert known.all()
    rig.generations[written] = generations
    rig.batch = COLD_READ // 2
    start = time.perf_counter()
    rig.read(np.random.default_rng(4).permutation(written))
    took = time.perf_counter() - start
    rig.close()
    return {"open_s": opened, "all_keys_s": answered, "verified_pages": COLD_READ, "read_s": took}


def show(page_bytes: int, found: dict[str, dict[str, float]]) -> None:
    print(f"{page_bytes // KIB} KiB pages: payload GB/s, cores a GB/s; the raw I/O loop and fio; ratios")
    for name, base in (("fill", "fill"), ("ahead", "fill"), ("write", "write"), ("read", "read")):
        ours, bare = found[name], found[f"{base} bare"]
        line = f"  {name:6} {ours['gb_per_s']:5.2f} ({ours['cores_per_gb_s']:.3f})"
        line += f"  bare {bare['gb_per_s']:5.2f} ({bare['cores_per_gb_s']:.3f})"
        line += f"  {ours['gb_per_s'] / bare['gb_per_s']:4.2f}x"
        if peer := found.get(f"{name} fio"):
            line += f"  fio {peer['gb_per_s']:5.2f} ({peer['cores_per_gb_s']:.3f})"
            line += f"  {ours['gb_per_s'] / peer['gb_per_s']:4.2f}x"
        if pinned := found.get(f"{name} registered"):
            line += f"  registered {pinned['gb_per_s']:5.2f} ({pinned['cores_per_gb_s']:.3f})"
            line += f"  {pinned['gb_per_s'] / ours['gb_per_s']:4.2f}x"
        print(line)
    if "write fio" not in found:
        print("  no row of fio: it is not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to be measured")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--mib", type=int, default=1024, help="payload of one measurement")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "rounds": arguments.rounds,
        "mib": arguments.mib,
        "io": c_ext.uring_refusal() or "io_uring",
        "depth": DEPTH,
    }
    for page_bytes in PAGES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = measure(Path(folder), page_bytes, arguments.mib * MIB // page_bytes, arguments.rounds)
        report[f"{page_bytes // KIB} KiB"] = found
        show(page_bytes, found)
    for page_bytes in PAGES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            lag = durable(Path(folder), page_bytes, arguments.mib * MIB // page_bytes, arguments.rounds)
        report[f"durable {page_bytes // KIB} KiB"] = lag
        print(
            f"written to durable, {page_bytes // KIB} KiB pages: median {lag['median_ms']:.0f} ms, 99 of 100 within "
            f"{lag['p99_ms']:.0f} ms, {lag['most_ms']:.0f} ms at most"
        )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report["layerwise"] = loads = layerwise(Path(folder), arguments.rounds)
    print(
        f"load of {LOAD_PAGES} pages: {loads['pages_ms']:.0f} ms by pages, {loads['layers_ms']:.0f} ms by layers "
        f"({loads['layers_over_pages']:.2f}x), its first layer after {loads['first_layer_of_total']:.1%}"
    )
    for page_bytes in PAGES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found_streamed = streamed(Path(folder), page_bytes, arguments.rounds)
        report[f"streamed {page_bytes // KIB} KiB"] = found_streamed
        print(
            f"load to the engine's pool, {page_bytes // KIB} KiB pages: {found_streamed['whole_ms']:.0f} ms, streamed "
            f"{found_streamed['streamed_ms']:.0f} ms ({found_streamed['streamed_over_whole']:.2f}x)"
        )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report["cold"] = cold = cold_start(Path(folder))
    print(
        f"cold start, {COLD_BLOCKS} blocks: open {cold['open_s']:.2f} s, all keys answer after "
        f"{cold['all_keys_s']:.2f} s, {COLD_READ} pages verified in {cold['read_s']:.3f} s"
    )
    report["load_after"] = os.getloadavg()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
