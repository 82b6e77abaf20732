"""The disk tier beside a bare loop: same ring, slab, huge pages, depth and syncs; no trailer, no digest, no index.

Each round runs every method once, so that noise falls on all alike; figures are medians of the rounds' payload GB/s.
`fill` is the first pass over a new slab, `write` the passes after it. A write counts when it is durable: for the tier
when the journal says so, for the loop after its fdatasync. CPU is user and system time of all threads of the process.
fio runs too where it is installed. `cold` is a start with 1M blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
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
from numpy.typing import NDArray

from build_support.preflight import compiler
from flexkv import c_ext
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.header import read_header
from flexkv.storage.index import DiskIndex
from flexkv.storage.tags import make_tags
from flexkv.storage.unit import DiskUnit
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 128 * MIB
BATCHES = 4
"""Of one measurement: the journal makes one batch durable while the next is written."""
SLAB_BYTES = 1024 * MIB
BLOCK_TOKENS = 16
DEPTH = 32
WAIT_S = 300.0
COLD_BLOCKS = 1_000_000
COLD_READ = 1000
IDENTITY = DiskIdentity("benchmark", bytes(32))


@functools.cache
def bare_loop() -> ctypes.CDLL:
    """bare_loop.cpp and the queues of csrc/io, compiled now: no part of the product."""
    root = Path(__file__).resolve().parents[1]
    library = Path(tempfile.mkdtemp()) / "bare_loop.so"
    sources = [root / "benchmarks/bare_loop.cpp"]
    sources += [root / f"csrc/io/{name}.cpp" for name in ("uring", "uring_queue", "thread_queue")]
    command = [*(compiler() or "g++").split(), "-std=c++20", "-O3", "-shared", "-fPIC", f"-I{root / 'csrc'}"]
    subprocess.run([*command, "-o", str(library), *map(str, sources), "-lpthread"], check=True)
    return ctypes.CDLL(str(library))


def group_of(page_bytes: int) -> DiskGroup:
    """16 layers of K and V."""
    run = page_bytes // 32
    runs = np.array([(i * run, run, i // 2) for i in range(32)], np.int64)
    return DiskGroup("benchmark", (page_bytes,), (runs,), BLOCK_TOKENS)


class Bench:
    """A tier of `slots` pages on one disk, a host pool of a batch, and an engine between."""

    def __init__(
        self, folder: Path, page_bytes: int, slots: int, batch: int, preallocate: bool = True
    ) -> None:
        self.page_bytes, self.slots, self.batch = page_bytes, slots, batch
        group = group_of(page_bytes)
        image = c_ext.PageCodec(list(group.stripe_bytes), list(group.runs)).image_bytes
        options = DiskOptions(slots * image, depth=DEPTH, preallocate=preallocate)
        self.unit = DiskUnit.open([folder], IDENTITY, [group], options)
        self.pool = HostPool(image, batch)
        assert self.pool.wait_ready(batch, WAIT_S)
        for slot in range(batch):
            self.pool.slot(slot)[:] = slot % 251
        self.engine = TransferEngine(lanes=[self.unit.lane([self.pool])])
        self.op_ids = itertools.count(1)
        self.rng = np.random.default_rng(0)
        self.generations = np.zeros(slots, np.uint64)
        self.keys = self.rng.integers(0, 256, (slots, 16), dtype=np.uint8)
        slab = next(folder.rglob("group0.slab"))
        header = read_header(str(slab))
        self.slab = c_ext.SlabFile(str(slab), header.header_bytes, image, slots, header.slab_id)

    def _run(self, kind: OpKind, places: NDArray[np.int32]) -> None:
        priority = Priority.LOAD if kind is OpKind.DISK_READ else Priority.STORE
        tags = make_tags(self.keys[places], self.unit.epoch, self.generations[places], BLOCK_TOKENS)
        slots = np.arange(len(places), dtype=np.int32)
        none = np.empty(0, np.int32)
        op = TransferOp(OpId(next(self.op_ids)), kind, 0, priority, none, slots, False, places, tags)
        ticket = self.engine.submit(TransferGraph((op,)))
        assert ticket is not None
        assert self.engine.wait(ticket, WAIT_S)
        (result,) = self.engine.poll()
        assert result.status is OpStatus.OK, result.reason

    def write(self, places: NDArray[np.int32]) -> None:
        """Writes a batch at a time; returns when all pages are durable."""
        self.generations[places] = self.unit.next_generations(len(places))
        for part in self.parts(places):
            self._run(OpKind.DISK_WRITE, part)
            tokens = np.full(len(part), BLOCK_TOKENS, np.int32)
            assert self.unit.record_publish(0, self.keys[part], part, self.generations[part], tokens)
        left, deadline = len(places), time.monotonic() + WAIT_S
        while left:
            events = self.unit.poll()
            assert not events.lost, events.lost
            left -= sum(len(pages.places) for pages in events.durable)
            assert time.monotonic() < deadline
            if left:
                time.sleep(0.0005)

    def parts(self, places: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """`places`, a batch at a time."""
        return [places[first : first + self.batch] for first in range(0, len(places), self.batch)]

    def read(self, places: NDArray[np.int32]) -> None:
        for part in self.parts(places):
            self._run(OpKind.DISK_READ, part)

    def bare(self, places: NDArray[np.int32], write: bool) -> None:
        for part in self.parts(places):
            self._bare(part, write)

    def _bare(self, places: NDArray[np.int32], write: bool) -> None:
        buffers = np.array([self.pool.slot(slot).ctypes.data for slot in range(len(places))], np.uint64)
        offsets = np.array([self.slab.offset(place) for place in places.tolist()], np.int64)
        addresses = (ctypes.c_void_p(buffers.ctypes.data), ctypes.c_void_p(offsets.ctypes.data))
        count, size = ctypes.c_int64(len(places)), ctypes.c_int64(self.page_bytes)
        assert bare_loop().bare_loop(self.slab.fd, *addresses, count, size, int(write), DEPTH) == 0
        if write:
            assert self.slab.sync() == 0

    def close(self) -> None:
        assert self.engine.close(WAIT_S)
        self.unit.close(WAIT_S)
        self.pool.close()


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    took = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, page_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians by method: payload GB/s, and cores a GB/s."""
    batch, slots = BATCH_BYTES // page_bytes, SLAB_BYTES // page_bytes
    ours, bare = (
        Bench(folder / "ours", page_bytes, slots, batch),
        Bench(folder / "bare", page_bytes, slots, batch),
    )
    samples: dict[str, list[tuple[float, float]]] = {}
    batch *= BATCHES
    batches = [np.arange(first, first + batch, dtype=np.int32) for first in range(0, slots, batch)]
    rng = np.random.default_rng(1)
    for places in batches:
        samples.setdefault("fill", []).append(timed(lambda p=places: ours.write(p)))  # type: ignore[misc]
        samples.setdefault("fill bare", []).append(timed(lambda p=places: bare.bare(p, True)))  # type: ignore[misc]
    for _ in range(rounds):
        places = rng.permutation(slots)[:batch].astype(np.int32)
        calls: dict[str, Callable[[], None]] = {
            "write": lambda p=places: ours.write(p),  # type: ignore[misc]
            "write bare": lambda p=places: bare.bare(p, True),  # type: ignore[misc]
            "read": lambda p=places: ours.read(p),  # type: ignore[misc]
            "read bare": lambda p=places: bare.bare(p, False),  # type: ignore[misc]
        }
        for name in rng.permutation(list(calls)).tolist():
            samples.setdefault(name, []).append(timed(calls[name]))
    ours.close()
    bare.close()
    payload = batch * page_bytes / 1e9
    return {
        name: {
            "gb_per_s": payload / statistics.median(took for took, _ in taken),
            "cores_per_gb_s": statistics.median(cpu for _, cpu in taken) / payload,
        }
        for name, taken in samples.items()
    }


def fio(folder: Path, page_bytes: int) -> dict[str, float] | None:
    """fio's GB/s on the same file system; None where it is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    found = {}
    for name in ("write", "read"):
        command = [
            program,
            "--name=x",
            f"--filename={folder / 'fio'}",
            f"--size={SLAB_BYTES}",
            f"--bs={page_bytes}",
        ]
        command += [f"--rw=rand{name}", "--ioengine=io_uring", f"--iodepth={DEPTH}", "--direct=1"]
        command += ["--end_fsync=1", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout)["jobs"][0][name]["bw_bytes"] / 1e9
    return found


def cold_start(folder: Path) -> dict[str, float]:
    """A start with an index of COLD_BLOCKS blocks of 4 KiB, of which the COLD_READ that are read were written."""
    bench = Bench(folder, 4 * KIB, COLD_BLOCKS, COLD_READ, preallocate=False)
    written = np.sort(np.random.default_rng(2).permutation(COLD_BLOCKS)[:COLD_READ]).astype(np.int32)
    bench.write(written)
    generations = bench.generations[written]
    bench.close()
    # The others are rows alone: what opening costs depends on them, what reading costs on the pages.
    index = DiskIndex(next(folder.rglob("index.sqlite")), [COLD_BLOCKS])
    others = np.setdiff1d(np.arange(COLD_BLOCKS), written)
    zeros = np.zeros(len(others), np.uint64)
    index.publish(
        0, others, bench.keys[others], zeros + np.uint64(1), zeros, np.full(len(others), 16, np.int32), 1
    )
    index.commit()
    index.close()
    start = time.perf_counter()
    bench = Bench(folder, 4 * KIB, COLD_BLOCKS, COLD_READ, preallocate=False)
    opened = time.perf_counter() - start
    rows = bench.unit.rows(0)
    known = time.perf_counter() - start
    assert len(rows) == COLD_BLOCKS
    bench.generations[written] = generations
    start = time.perf_counter()
    bench.read(written)
    took = time.perf_counter() - start
    bench.close()
    return {"open_s": opened, "all_rows_s": known, "verified_pages": COLD_READ, "read_s": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "rounds": arguments.rounds,
        "io": c_ext.uring_refusal() or "io_uring",
        "depth": DEPTH,
    }
    for page_bytes in (2 * MIB, 64 * KIB):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = measure(Path(folder), page_bytes, arguments.rounds)
            report[f"{page_bytes // KIB} KiB"] = found
            report[f"{page_bytes // KIB} KiB fio"] = fio(Path(folder), page_bytes)
        print(f"{page_bytes // KIB} KiB pages: payload GB/s, ratio, cores a GB/s")
        for name in ("fill", "write", "read"):
            ours, bare = found[name], found[f"{name} bare"]
            print(
                f"  {name:6} {ours['gb_per_s']:6.2f}  bare {bare['gb_per_s']:6.2f}  "
                f"{ours['gb_per_s'] / bare['gb_per_s']:5.2f}x  {ours['cores_per_gb_s']:.3f} "
                f"(bare {bare['cores_per_gb_s']:.3f})"
            )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        cold = cold_start(Path(folder))
    report["cold"] = cold
    print(
        f"cold start, {COLD_BLOCKS} blocks: open {cold['open_s']:.2f} s, all rows {cold['all_rows_s']:.2f} s, "
    )
    print(f"  {COLD_READ} pages verified in {cold['read_s']:.3f} s")
    report["load_after"] = os.getloadavg()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
