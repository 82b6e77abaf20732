"""The staging pool: blocks of plain memory through which pages of segments are loaded and stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import PLANES, KvShape
from flexkv.c_ext import KvView


class StagingPool:
    """Blocks of `block_tokens` tokens, which the transfer engine sees as the pool of a layer-first engine.

    Attributes:
        rows: [layers, blocks, planes, block_tokens, heads, head_dim], in the cache's carrier dtype.
        view: view of `rows`; a page has one run per layer, K then V.
    """

    def __init__(self, shape: KvShape, blocks: int, block_tokens: int) -> None:
        room = (shape.layers, blocks, PLANES, block_tokens, shape.heads, shape.head_dim)
        self.rows: NDArray[np.unsignedinteger] = np.zeros(room, shape.carrier)
        run_bytes = PLANES * block_tokens * shape.row_bytes
        runs = [
            [self.rows[layer].ctypes.data, run_bytes, run_bytes, layer * run_bytes, layer]
            for layer in range(shape.layers)
        ]
        self.block_tokens = block_tokens
        self.view = KvView(np.array(runs, np.int64), blocks, shape.layers * run_bytes)
        self.free = list(range(blocks - 1, -1, -1))
        """Free blocks, to and from which no page moves."""

    def take(self, blocks: int) -> NDArray[np.int32] | None:
        """Takes `blocks` blocks, int32 [blocks]; None if fewer are free."""
        if blocks > len(self.free):
            return None
        return np.array([self.free.pop() for _ in range(blocks)], np.int32)

    def give(self, blocks: Iterable[int]) -> None:
        """Frees blocks to or from which no copy moves any more."""
        self.free.extend(int(block) for block in blocks)
