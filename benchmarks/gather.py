"""Measures gather and scatter on the host between a layer-first pool and pages, with 32 layers of K and V, one thread,
and buffers far larger than the CPU caches.

Prints medians of interleaved rounds, and ratios; `--json PATH` also writes them to a file. "flat_pages" and
"flat_whole" are plain memcpy of the same bytes, page by page and in one call. "flat_streaming" is flexkv's own copy of
pages that are one contiguous run. "torch best" is the fastest of a strided copy_ per block, a copy_ per run, and
index_select with copy_ (index_copy_ for scatter).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import at_least_one
from flexkv import c_ext

LAYERS, KV = 32, 2
KIB, MIB = 1 << 10, 1 << 20
HUGE_PAGE = 2 * MIB
POOL_BYTES = 512 * MIB
"""16 times the size of a 32 MiB L3 cache, so that no pass finds its bytes in the cache."""
RUN_KIB = (4, 16, 32, 64, 128, 256)

Bytes = NDArray[np.uint8]
Method = Callable[[], None]


def huge_buffer(size: int) -> Bytes:
    """Returns private memory whose pages are already mapped, in transparent huge pages if the host allows them. All
    bytes are 1.
    """
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)[:size]
    buffer[:] = 1
    return buffer


@dataclass
class Case:
    """The memory for one run size: a pool [layer, kv, block, run], pages [block, layer, kv, run], and the random order
    in which blocks are copied.
    """

    run_bytes: int
    pool: Bytes
    pages: Bytes

    def __post_init__(self) -> None:
        self.runs = LAYERS * KV
        self.page_bytes = self.runs * self.run_bytes
        self.blocks = POOL_BYTES // self.page_bytes
        self.order = np.random.default_rng(0).permutation(self.blocks).tolist()
        base = self.pool.ctypes.data
        rows = [
            [
                base + i * self.blocks * self.run_bytes,
                self.run_bytes,
                self.run_bytes,
                i * self.run_bytes,
                i // KV,
            ]
            for i in range(self.runs)
        ]
        self.view = c_ext.KvView(np.array(rows, np.int64), self.blocks, self.page_bytes)
        whole = [[base, self.page_bytes, self.page_bytes, 0, 0]]
        self.flat_view = c_ext.KvView(np.array(whole, np.int64), self.blocks, self.page_bytes)
        self.stripes = [
            self.pages[i * self.page_bytes : (i + 1) * self.page_bytes] for i in range(self.blocks)
        ]

    def ours(self, scatter: bool) -> Method:
        move = c_ext.scatter if scatter else c_ext.gather

        def run() -> None:
            for page, block in enumerate(self.order):
                move(self.view, block, self.stripes[page])

        return run

    def flat_streaming(self, scatter: bool) -> Method:
        move = c_ext.scatter if scatter else c_ext.gather

        def run() -> None:
            for page, block in enumerate(self.order):
                move(self.flat_view, block, self.stripes[page])

        return run

    def flat(self, scatter: bool, whole: bool) -> Method:
        source, target = (self.pages, self.pool) if scatter else (self.pool, self.pages)
        src, dst, size = source.ctypes.data, target.ctypes.data, self.blocks * self.page_bytes
        step = size if whole else self.page_bytes

        def run() -> None:
            for at in range(0, size, step):
                ctypes.memmove(dst + at, src + at, step)

        return run

    def torch_methods(self, scatter: bool) -> dict[str, Method]:
        import torch

        torch.set_num_threads(1)
        used = self.blocks * self.page_bytes
        # The tensors have int64 elements, because torch's index_select is fastest with int64, and its copies are no
        # faster with single bytes.
        pool = torch.from_numpy(self.pool[:used].view(np.int64)).view(self.runs, self.blocks, -1)
        pages = torch.from_numpy(self.pages[:used].view(np.int64)).view(self.blocks, self.runs, -1)
        order = torch.tensor(self.order)

        def block_copy() -> None:
            for page, block in enumerate(self.order):
                if scatter:
                    pool[:, block].copy_(pages[page])
                else:
                    pages[page].copy_(pool[:, block])

        def run_copy() -> None:
            for page, block in enumerate(self.order):
                for run in range(self.runs):
                    if scatter:
                        pool[run, block].copy_(pages[page, run])
                    else:
                        pages[page, run].copy_(pool[run, block])

        def indexed() -> None:
            if scatter:
                for run in range(self.runs):
                    pool[run].index_copy_(0, order, pages[:, run])
            else:
                for run in range(self.runs):
                    pages[:, run].copy_(torch.index_select(pool[run], 0, order))

        return {"torch_block_copy": block_copy, "torch_run_copy": run_copy, "torch_index": indexed}


def measure(case: Case, scatter: bool, rounds: int) -> dict[str, float]:
    """Returns the median GB/s of every method. Each round runs each method once, so that noise affects all methods
    alike."""
    methods: dict[str, Method] = {
        "flexkv": case.ours(scatter),
        "flat_pages": case.flat(scatter, whole=False),
        "flat_whole": case.flat(scatter, whole=True),
        "flat_streaming": case.flat_streaming(scatter),
        **case.torch_methods(scatter),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            times[name].append(time.perf_counter() - start)
    moved = case.blocks * case.page_bytes
    return {name: moved / statistics.median(taken) / 1e9 for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=at_least_one, default=7)
    parser.add_argument("--runs-kib", type=int, nargs="+", default=list(RUN_KIB))
    arguments = parser.parse_args()
    pool, pages = huge_buffer(POOL_BYTES), huge_buffer(POOL_BYTES)
    results = []
    columns = [
        "flexkv",
        "flat_pages",
        "flat_whole",
        "flat_streaming",
        "torch best",
        "/flat_pages",
        "/flat_whole",
        "/torch",
    ]
    print(f"{'':16}" + "".join(f"{name:>15}" for name in columns))
    for kib in arguments.runs_kib:
        case = Case(kib * KIB, pool, pages)
        for scatter in (False, True):
            rates = measure(case, scatter, arguments.rounds)
            best = max(rate for name, rate in rates.items() if name.startswith("torch"))
            ours = rates["flexkv"]
            ratios = [ours / rates["flat_pages"], ours / rates["flat_whole"], ours / best]
            name = f"{'scatter' if scatter else 'gather'} {kib} KiB"
            shown = [rates[c] for c in columns[:4]] + [best]
            print(
                f"{name:16}" + "".join(f"{v:15.1f}" for v in shown) + "".join(f"{r:14.2f}x" for r in ratios)
            )
            results.append(
                {
                    "direction": name.split()[0],
                    "run_kib": kib,
                    "gb_per_s": rates,
                    "torch_best": best,
                    "ratio_flat_pages": ratios[0],
                    "ratio_flat_whole": ratios[1],
                    "ratio_torch": ratios[2],
                }
            )
    if arguments.json:
        report = {
            "layers": LAYERS,
            "kv": KV,
            "pool_bytes": POOL_BYTES,
            "rounds": arguments.rounds,
            "threads": 1,
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
