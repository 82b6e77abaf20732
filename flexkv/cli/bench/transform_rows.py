"""Measures the layout transform, which also computes digests. Compares it with the device's own copy of as many
bytes."""

from __future__ import annotations

import itertools
import statistics

from flexkv import c_ext
from flexkv.cli.bench.base import PAGE_LAYERS, PAGE_RUN_BYTES, ComparisonRow

HOST_DEVICE = -1
"""The device number that stands for plain memory."""


def transform_rows(
    device: int | None, multiprocessors: int, total_bytes: int, repeats: int
) -> list[ComparisonRow]:
    """Measures the transform of slots into a layer-first pool, during which digests are checked, and the transform
    back, during which they are made.

    Each direction runs on the multiprocessors that transfers use. On a GPU, it also runs on all `multiprocessors`.

    Raises:
        ConfigError: there is no such device.
        CapacityError: there is not enough memory.
    """
    number = HOST_DEVICE if device is None else device
    beside_model = min(multiprocessors, c_ext.CUDA_THRESHOLDS["transform_multiprocessors"])
    grids = [(False, beside_model)] if device is None else [(False, beside_model), (True, multiprocessors)]
    directions = (("slots to pool", True), ("pool to slots", False))
    rows = []
    for run_bytes, (whole_device, taken), (direction, into_pool) in itertools.product(
        PAGE_RUN_BYTES, grids, directions
    ):
        blocks = max(1, total_bytes // (PAGE_LAYERS * run_bytes))
        times = c_ext.time_transform(number, PAGE_LAYERS, run_bytes, blocks, into_pool, whole_device, repeats)
        moved = blocks * PAGE_LAYERS * run_bytes
        rows.append(
            ComparisonRow(
                "layout transform",
                direction,
                run_bytes,
                moved / statistics.median(transform for transform, _ in times) / 1e9,
                path="cpu" if device is None else "kernel",
                multiprocessors=taken,
                share=statistics.median(copy / transform for transform, copy in times),
                note="share of the device's own copy",
            )
        )
    return rows
