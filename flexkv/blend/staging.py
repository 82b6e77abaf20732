"""The staging pool: blocks of plain host memory through which the pages of segments are loaded and stored."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import PLANES, KvShape
from flexkv.c_ext import KvView


class StagingPool:
    """A pool of blocks of `block_tokens` tokens. The transfer engine treats it like the KV pool of an inference engine.

    Attributes:
        rows: the memory, [layers, blocks, planes, block_tokens, heads, head_dim], with elements of `KvShape.carrier`.
        block_tokens: tokens per block.
        view: the `KvView` of `rows`; a page has one run per layer, which holds K, then V.
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
        """Numbers of the free blocks. No copy reads or writes them."""

    def take(self, blocks: int) -> NDArray[np.int32] | None:
        """Removes `blocks` blocks from the free ones, and returns their numbers, int32 [blocks]. Returns None if fewer
        are free."""
        if blocks > len(self.free):
            return None
        return np.array([self.free.pop() for _ in range(blocks)], np.int32)

    def give(self, blocks: Iterable[int]) -> None:
        """Frees blocks. Precondition: no copy reads or writes them any more."""
        self.free.extend(int(block) for block in blocks)
