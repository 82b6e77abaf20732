"""Collects the runs of one KV group and turns them into a view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexkv.c_ext import KvView


@dataclass(frozen=True, slots=True)
class Run:
    """`size` bytes of every block b at `base + b * block_stride`. `layer` counts within the group."""

    base: int
    block_stride: int
    size: int
    layer: int


class RunList:
    """The runs of a group. Keeps runs that are added twice (by layers that share their KV) once, under their first
    layer.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int, int], Run] = {}

    def add(self, base: int, block_stride: int, size: int, layer: int) -> None:
        self._runs.setdefault((base, block_stride, size), Run(base, block_stride, size, layer))

    def __len__(self) -> int:
        return len(self._runs)

    def view(self, num_blocks: int, first_block: int = 0, native_order: bool = False) -> KvView:
        """A view whose page holds the runs in the order in which they were added, or by address with `native_order`.

        Raises:
            GeometryError: there are no runs, sizes are not positive, or blocks share bytes.
        """
        runs = list(self._runs.values())
        if native_order:
            runs.sort(key=lambda run: run.base)
        rows = np.empty((len(runs), 5), np.int64)
        offset = 0
        for row, run in zip(rows, runs, strict=True):
            row[:] = (run.base, run.block_stride, run.size, offset, run.layer)
            offset += run.size
        return KvView(rows, num_blocks, offset, first_block)
