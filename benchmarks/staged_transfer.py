"""Measures staged reads from a file to a layer-first pool in plain memory: CPU time per GB, and I/O calls.

The baseline is the cost that cannot be avoided: a bare O_DIRECT read of the same blocks into a buffer, and one flat
copy of each block. Every round runs the staged read and the baseline once, over the same blocks in the same order. CPU
time is that of all threads of the process. Prints medians; `--json PATH` writes them to a file. The path without
staging makes one I/O call per contiguous run of bytes; it is timed once to show the cost of these calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.gather import huge_buffer
from flexkv.config import GdsConfig, IoBackend
from flexkv.transfer.raw.gds_worker import GDSTransferWorker, RawFileLayout, RawPool

KIB, MIB = 1 << 10, 1 << 20
KV = 2
SLOTS = 16
GOAL_RATIO = 1.3
"""The CPU time of a staged read may be at most this multiple of the CPU time of a bare read and one copy."""
GOAL_ROUNDS = 9
"""Minimum number of interleaved rounds for a verdict. On a shared machine single rounds differ by a third."""


@dataclass
class Case:
    """Blocks in a pool [layer][kv][block][chunk], and in one file in which each block is contiguous. A block has
    `chunk` bytes of K and as many of V in each layer.
    """

    layers: int
    chunk: int
    blocks: int
    folder: Path
    io: IoBackend = "auto"

    def __post_init__(self) -> None:
        self.block_bytes = self.layers * KV * self.chunk
        self.pool = huge_buffer(self.block_bytes * self.blocks)
        self.slots = huge_buffer(self.block_bytes * SLOTS)
        self.path = self.folder / "blocks"
        self.path.write_bytes(np.random.default_rng(0).integers(0, 256, self.pool.size, np.uint8).tobytes())
        self.gpu = np.random.default_rng(1).permutation(self.blocks).astype(np.int64)
        self.ssd = np.random.default_rng(2).permutation(self.blocks).astype(np.int64)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        layer = KV * self.blocks * self.chunk
        address = self.pool.ctypes.data
        self.geometry = RawPool(
            gpu_block_type=0,
            layer_ptrs=tuple(address + i * layer for i in range(self.layers)),
            block_stride=self.chunk,
            kv_stride=self.blocks * self.chunk,
        )
        self.layout = RawFileLayout.dense(self.layers, self.chunk, blocks_per_file=self.blocks)

    def worker(self, staged: bool, threads: int) -> GDSTransferWorker:
        config = GdsConfig(threads_per_disk=threads, max_staging_blocks=SLOTS)
        return GDSTransferWorker(
            self.geometry, self.layout, {0: [str(self.path)]}, config, use_staged_transfer=staged, io=self.io
        )

    def bare(self) -> None:
        """The baseline: reads every block from the file into a buffer with one call, and copies it to the pool once."""
        size = self.block_bytes
        pool, slots = self.pool.ctypes.data, self.slots.ctypes.data
        views = [self.slots[i * size : (i + 1) * size].data for i in range(SLOTS)]
        for i, (gpu, ssd) in enumerate(zip(self.gpu.tolist(), self.ssd.tolist(), strict=True)):
            slot = i % SLOTS
            if os.preadv(self.fd, [views[slot]], ssd * size) != size:
                raise OSError(f"a short read of block {ssd} of {self.path}")
            ctypes.memmove(pool + gpu * size, slots + slot * size, size)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(methods: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns (CPU seconds, wall seconds) of each method in each round, without the first round, which warms up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name, method in methods.items():
            cpu, wall = cpu_seconds(), time.perf_counter()
            method()
            if number:
                taken[name].append((cpu_seconds() - cpu, time.perf_counter() - wall))
    return taken


def run(case: Case, rounds: int, threads: int) -> dict[str, Any]:
    """Measures one geometry. Before it times anything, compares the bytes that the staged path reads with the file."""
    staged, runs = case.worker(True, threads), case.worker(False, threads)
    staged.read(case.gpu, case.ssd)
    content = np.fromfile(case.path, np.uint8).reshape(case.blocks, case.layers, KV, case.chunk)
    pool = case.pool[: case.block_bytes * case.blocks].reshape(case.layers, KV, case.blocks, case.chunk)
    for gpu, ssd in zip(case.gpu.tolist(), case.ssd.tolist(), strict=True):
        if not np.array_equal(pool[:, :, gpu], content[ssd]):
            raise AssertionError(f"block {gpu} is not block {ssd} of the file")
    del content
    methods: dict[str, Callable[[], None]] = {
        "bare read + copy": case.bare,
        "staged": lambda: staged.read(case.gpu, case.ssd),
    }
    before = staged.manager.totals["io_calls"]
    taken = measure(methods, rounds)
    taken |= measure({"a call a run": lambda: runs.read(case.gpu, case.ssd)}, 1)
    calls = {
        "bare read + copy": case.blocks,
        "staged": (staged.manager.totals["io_calls"] - before) // (rounds + 1),
        "a call a run": runs.manager.totals["io_calls"] // 2,
    }
    gigabytes = case.block_bytes * case.blocks / 1e9
    ratios = [s[0] / b[0] for s, b in zip(taken["staged"], taken["bare read + copy"], strict=True)]
    rows = {
        name: {
            "cpu_s_per_gb": statistics.median(cpu for cpu, _ in times) / gigabytes,
            "gb_per_s": gigabytes / statistics.median(wall for _, wall in times),
            "io_calls": calls[name],
        }
        for name, times in taken.items()
    }
    described = staged.manager.describe()
    staged.close()
    runs.close()
    return {
        "layers": case.layers,
        "chunk_kib": case.chunk / KIB,
        "block_mib": case.block_bytes / MIB,
        "blocks": case.blocks,
        "io": described,
        "methods": rows,
        "cpu_ratio_median": statistics.median(ratios),
        "cpu_ratio_range": [min(ratios), max(ratios)],
        "calls_saved": calls["a call a run"] / calls["staged"],
    }


def verdict(result: dict[str, Any], rounds: int) -> str:
    """Returns a line with the goal, what was measured in how many rounds, and whether the goal is reached."""
    ratio, (low, high) = result["cpu_ratio_median"], result["cpu_ratio_range"]
    said = "reached" if ratio <= GOAL_RATIO else "MISSED"
    if rounds < GOAL_ROUNDS:
        said = f"no verdict, that needs {GOAL_ROUNDS} rounds"
    return (
        f"CPU staged path: CPU-seconds a GB <= {GOAL_RATIO} x the bare read + one copy, "
        f"median of {rounds} interleaved: "
        f"{ratio:.2f} x ({low:.2f}-{high:.2f}), {said}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=GOAL_ROUNDS)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 80])
    parser.add_argument("--chunks-kib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--mib", type=int, default=512, help="bytes that a round moves, with every method")
    parser.add_argument("--io", choices=get_args(IoBackend), default="auto", help="of the transfers")
    parser.add_argument("--threads", type=int, default=1, help="I/O threads of the transfers")
    parser.add_argument("--folder", type=Path, help="where the file is made; a temporary folder by default")
    arguments = parser.parse_args()
    results = []
    print(f"{'':24}{'method':>20}{'CPU s/GB':>10}{'GB/s':>8}{'calls':>9}")
    for layers in arguments.layers:
        for kib in arguments.chunks_kib:
            blocks = max(1, arguments.mib * MIB // (layers * KV * kib * KIB))
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                case = Case(layers, kib * KIB, blocks, Path(folder), arguments.io)
                result = run(case, arguments.rounds, arguments.threads)
                os.close(case.fd)
            results.append(result)
            print(result["io"])
            title = f"{layers} layers, {kib} KiB"
            rows = result["methods"]
            for name, row in rows.items():
                print(
                    f"{title:24}{name:>20}{row['cpu_s_per_gb']:10.3f}{row['gb_per_s']:8.2f}{row['io_calls']:9d}"
                )
                title = ""
            print(verdict(result, arguments.rounds))
            print(
                f"I/O calls: {result['calls_saved']:.0f} times fewer than a call a run; "
                f"load average {os.getloadavg()[0]:.1f}"
            )
    if arguments.json:
        report = {
            "rounds": arguments.rounds,
            "threads": arguments.threads,
            "goal_ratio": GOAL_RATIO,
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
