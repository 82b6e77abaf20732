"""Measures the rotation of keys on one CPU thread. A plain rotation is compared with memcpy. A rotation that is fused
with the scatter is compared with a rotation and a scatter in separate passes.

Keys have 8 heads of 128 elements. The position of every token changes by one of 8 distances. Buffers are larger than
the CPU caches. Figures are medians of interleaved rounds; `--json PATH` writes them to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.gather import huge_buffer
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable

HEADS, HEAD_DIM = 8, 128
BUFFER_BYTES = 128 << 20


def methods(dtype: str, pairing: str) -> dict[str, Callable[[], None]]:
    spec = RopeSpec(HEAD_DIM, HEAD_DIM, 10_000.0, pairing=pairing)  # type: ignore[arg-type]
    rotation = KeyRotation(spec, HEADS, dtype)
    rows = BUFFER_BYTES // rotation.row_bytes
    head_bytes = rotation.row_bytes // HEADS
    source, middle, target = (huge_buffer(BUFFER_BYTES) for _ in range(3))
    random = np.random.default_rng(0)
    # The values contain no subnormal numbers, because a subnormal number takes a hundred CPU cycles, and real keys have
    # none.
    values = random.standard_normal(1 << 20).astype(np.float32)
    encoded = (
        (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    )
    source[:] = np.resize(encoded.view(np.uint8), BUFFER_BYTES)
    in_order = RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, head_bytes)
    # The scatter writes to pages of 16 tokens in random order.
    pages = random.permutation(rows // 16).astype(np.int64)
    slots = (pages[:, None] * 16 + np.arange(16)).reshape(-1)
    scattered = RowPlaces(slots * rotation.row_bytes, head_bytes)
    old = np.arange(rows, dtype=np.int64)
    table = rotation.table(old, old + np.repeat(np.arange(1, 9) * 37, rows // 8))
    copies = TurnTable.copies(rows)

    def memcpy() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, BUFFER_BYTES)

    def in_place() -> None:
        rotation.apply(source, in_order, source, in_order, table)

    def elsewhere() -> None:
        rotation.apply(source, in_order, target, in_order, table)

    def fused() -> None:
        rotation.apply(source, in_order, target, scattered, table)

    def two_passes() -> None:
        rotation.apply(source, in_order, middle, in_order, table)
        rotation.apply(middle, in_order, target, scattered, copies)

    return {
        "memcpy": memcpy,
        "in_place": in_place,
        "elsewhere": elsewhere,
        "fused": fused,
        "two_passes": two_passes,
    }


def measure(rounds: int, dtype: str, pairing: str) -> dict[str, object]:
    calls = methods(dtype, pairing)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    kept = {name: values[1:] for name, values in times.items()}  # the first round warms up

    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(kept[of], kept[to], strict=True))

    return {
        "dtype": dtype,
        "pairing": pairing,
        "gb_per_s": {name: BUFFER_BYTES / statistics.median(values) / 1e9 for name, values in kept.items()},
        "in_place_to_memcpy": ratio("memcpy", "in_place"),
        "elsewhere_to_memcpy": ratio("memcpy", "elsewhere"),
        "fused_to_two_passes": ratio("two_passes", "fused"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    print(
        f"{'dtype':10}{'pairing':9}{'memcpy':>8}{'in place':>10}{'fused':>8}   to memcpy: in place, elsewhere"
    )
    for dtype in ("float32", "bfloat16", "float16"):
        for pairing in ("neox", "gptj"):
            found = measure(arguments.rounds, dtype, pairing)
            results.append(found)
            rates = found["gb_per_s"]
            assert isinstance(rates, dict)
            print(
                f"{dtype:10}{pairing:9}{rates['memcpy']:8.1f}{rates['in_place']:10.1f}{rates['fused']:8.1f}   "
                f"{found['in_place_to_memcpy']:.2f}, {found['elsewhere_to_memcpy']:.2f}; "
                f"fused {found['fused_to_two_passes']:.2f} x the two passes"
            )
    if arguments.json:
        report = {"rounds": arguments.rounds, "threads": 1, "load": os.getloadavg(), "results": results}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
