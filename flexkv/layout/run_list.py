"""Collects the runs of one KV group, and makes a view of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexkv.c_ext import KvView


@dataclass(frozen=True, slots=True)
class Run:
    """A run of every block of a group: for block b, the bytes at address `base + b * block_stride`.

    Attributes:
        base: address of block 0's run.
        block_stride: bytes from one block's run to the next block's.
        size: bytes of the run.
        layer: number of the layer within the group.
    """

    base: int
    block_stride: int
    size: int
    layer: int


class RunList:
    """The runs of a group. If the same run is added twice, because layers share their KV, it is kept only once, with
    the layer for which it was added first.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int, int], Run] = {}

    def add(self, base: int, block_stride: int, size: int, layer: int) -> None:
        self._runs.setdefault((base, block_stride, size), Run(base, block_stride, size, layer))

    def __len__(self) -> int:
        return len(self._runs)

    def view(self, num_blocks: int, first_block: int = 0, native_order: bool = False) -> KvView:
        """Returns a view whose pages hold the runs in the order in which they were added.

        Args:
            num_blocks: number of blocks of the pool.
            first_block: number of the first block that may be used.
            native_order: whether pages hold the runs in order of their addresses, not in the order in which they were
                added.

        Raises:
            GeometryError: there are no runs, sizes are not positive, or blocks overlap.
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
