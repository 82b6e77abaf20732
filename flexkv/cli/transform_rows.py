"""The layout transform with digests, beside the device's own copy of as many bytes."""

from __future__ import annotations

import statistics

from flexkv import c_ext
from flexkv.cli.comparison import PAGE_LAYERS, PAGE_RUN_BYTES, ComparisonRow

HOST_DEVICE = -1
"""Number of the device that is plain memory."""


def transform_rows(device: int | None, total_bytes: int, repeats: int) -> list[ComparisonRow]:
    """Slots to a layer-first pool, checking digests, and back, making them; on the multiprocessors that transfers use
    and, on a GPU, on all.

    Raises:
        ConfigError: no such device. CapacityError: the memory is not there.
    """
    rows = []
    for run_bytes in PAGE_RUN_BYTES:
        blocks = max(1, total_bytes // (PAGE_LAYERS * run_bytes))
        moved = blocks * PAGE_LAYERS * run_bytes
        for whole_device in (False,) if device is None else (False, True):
            for direction, into_pool in (("slots to pool", True), ("pool to slots", False)):
                number = HOST_DEVICE if device is None else device
                times = c_ext.time_transform(
                    number, PAGE_LAYERS, run_bytes, blocks, into_pool, whole_device, repeats
                )
                share = statistics.median(copy / transform for transform, copy in times)
                grid = (
                    "plain memory"
                    if device is None
                    else "all of the GPU"
                    if whole_device
                    else "beside a model"
                )
                rows.append(
                    ComparisonRow(
                        "layout transform",
                        direction,
                        run_bytes,
                        moved / statistics.median(transform for transform, _ in times) / 1e9,
                        note=f"{grid}; {share:.2f} of the device's own copy",
                    )
                )
    return rows
