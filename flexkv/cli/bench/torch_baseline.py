"""Measures how an engine would copy blocks with torch alone, and how long small copies take while a store runs.

Outside the adapters and blending, this is the only module that imports torch.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flexkv.cli.bench.base import ComparisonRow

SMALL_BYTES = 4096
SMALL_COPIES = 2000
"""Number of small copies, enough for a 99th percentile. All pauses between them together take 0.2 s."""
PAUSE_S = 1e-4
"""Seconds between two small copies. An engine makes one small copy per step, and does not make them one directly after
another."""


def load_torch() -> Any | None:
    """Returns the module torch, or None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def both_ways_limit_gbps(device: int, total_bytes: int, repeats: int) -> float | None:
    """Measures two contiguous copies at once, one in each direction, of `total_bytes` together. Returns their rate in
    1e9 bytes per second; None if torch is missing or cannot use CUDA.
    """
    torch = load_torch()
    if torch is None or not torch.cuda.is_available():
        return None
    half = max(1, total_bytes // 2)
    place = f"cuda:{device}"
    pairs = [
        (
            torch.cuda.Stream(device),
            torch.zeros(half, dtype=torch.uint8, device=place),
            torch.zeros(half, dtype=torch.uint8, pin_memory=True),
        )
        for _ in range(2)
    ]

    def once() -> None:
        for (stream, on_device, on_host), load in zip(pairs, (True, False), strict=True):
            target, source = (on_device, on_host) if load else (on_host, on_device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream, _, _ in pairs:
            stream.synchronize()

    torch.cuda.synchronize(device)
    return 2 * half / _median(once, repeats) / 1e9


def index_select_rows(
    device: int | None, run_sizes: tuple[int, ...], layers: int, total_bytes: int, repeats: int
) -> list[ComparisonRow]:
    """Measures torch's copies. A store gathers each layer's blocks with `index_select`, and copies the result to host
    memory. A load copies each layer to the device, and scatters it to the blocks with `index_copy_`."""
    torch = load_torch()
    what = "torch index_select + copy"
    if torch is None:
        return [ComparisonRow(what, "both", 0, note="torch is not installed")]
    if device is not None and not torch.cuda.is_available():
        return [ComparisonRow(what, "both", 0, note="torch was built without CUDA")]
    place = "cpu" if device is None else f"cuda:{device}"
    # torch's gather and scatter take as many multiprocessors as they can fill.
    path = "cpu" if device is None else "torch's kernels, copy engine"
    taken = 0 if device is None else torch.cuda.get_device_properties(device).multi_processor_count
    rows = []
    for run_bytes in run_sizes:
        blocks = total_bytes // (run_bytes * layers)
        if blocks < 1:
            continue
        pool = torch.zeros((layers, blocks, run_bytes), dtype=torch.uint8, device=place)
        host = torch.zeros((layers, blocks, run_bytes), dtype=torch.uint8, pin_memory=device is not None)
        order = torch.from_numpy(np.random.default_rng(0).permutation(blocks)).to(place)

        def wait() -> None:
            if device is not None:
                torch.cuda.current_stream(device).synchronize()

        def store(pool: Any = pool, host: Any = host, order: Any = order) -> None:
            for layer in range(layers):
                host[layer].copy_(pool[layer].index_select(0, order), non_blocking=True)
            wait()

        def load(pool: Any = pool, host: Any = host, order: Any = order) -> None:
            for layer in range(layers):
                pool[layer].index_copy_(0, order, host[layer].to(place, non_blocking=True))
            wait()

        for direction, once in (("H2D", load), ("D2H", store)):
            seconds = _median(once, repeats)
            rows.append(
                ComparisonRow(
                    what,
                    direction,
                    run_bytes,
                    layers * blocks * run_bytes / seconds / 1e9,
                    calls=2 * layers,
                    path=path,
                    multiprocessors=taken,
                )
            )
    return rows


def small_copy_rows(device: int | None, store: Callable[[], None]) -> list[ComparisonRow]:
    """Measures the p99 of a 4 KiB device-to-host copy on a separate stream, first alone, then while `store` runs again
    and again in another thread."""
    what = "4 KiB copy, p99"
    if device is None:
        small, target = np.zeros(SMALL_BYTES, np.uint8), np.zeros(SMALL_BYTES, np.uint8)
        note = "plain memory: a memcpy in another thread"

        def once() -> None:
            np.copyto(target, small)
    else:
        torch = load_torch()
        if torch is None or not torch.cuda.is_available():
            return [ComparisonRow(what, "D2H", SMALL_BYTES, note="needs torch built with CUDA")]
        on_device = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
        pinned = torch.zeros(SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(device)
        note = "a stream of its own"

        def once() -> None:
            with torch.cuda.stream(stream):
                pinned.copy_(on_device, non_blocking=True)
            stream.synchronize()

    alone = _p99_ms(once)
    ended = threading.Event()
    failures: list[BaseException] = []

    def keep_storing() -> None:
        try:
            while not ended.is_set():
                store()
        except BaseException as error:  # raised again in the caller's thread
            failures.append(error)

    storing = threading.Thread(target=keep_storing)
    storing.start()
    try:
        beside = _p99_ms(once)
    finally:
        ended.set()
        storing.join()
    if failures:
        raise failures[0]
    path = "cpu" if device is None else "copy engine"
    return [
        ComparisonRow(what, "D2H", SMALL_BYTES, p99_ms=alone, path=path, note=f"{note}, alone"),
        ComparisonRow(
            what, "D2H", SMALL_BYTES, p99_ms=beside, path=path, note=f"{note}, while a store streams"
        ),
    ]


def _median(once: Callable[[], None], repeats: int) -> float:
    once()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _p99_ms(once: Callable[[], None]) -> float:
    once()
    times = np.empty(SMALL_COPIES)
    for i in range(SMALL_COPIES):
        start = time.perf_counter()
        once()
        times[i] = time.perf_counter() - start
        time.sleep(PAUSE_S)
    return float(np.percentile(times, 99) * 1e3)
