"""The block-first pool of one rank in plain memory, and the numbers expected in it.

An expected number depends on all tokens up to its position, and on salt, adapter, layer, head and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.tensorrt_llm.request import Request

GARBAGE = 0x7FA5A5A5


@dataclass(frozen=True)
class Shape:
    """The shape of a pool, [blocks, layers, kv, heads * tokens * size]. An element has 4 bytes. With fp8 the engine
    passes four elements of one byte in place of each element.

    Attributes:
        fp8: whether the engine passes elements of one byte.
    """

    blocks: int = 40
    layers: int = 3
    kv: int = 2
    heads: int = 2
    tokens: int = 4
    size: int = 8
    fp8: bool = False


class HostTensor:
    """Stands for a torch tensor whose memory is an array, with the attributes and methods that the connector uses.
    Importing torch would take seconds in each process.
    """

    device = SimpleNamespace(type="cpu", index=None)

    def __init__(self, array: NDArray[Any], dtype: str = "") -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{dtype or array.dtype}"

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def storage_offset(self) -> int:
        return 0


class Pool:
    """The KV pool of one rank, and its expected numbers."""

    def __init__(self, shape: Shape, rank: int) -> None:
        s = self.shape = shape
        self.rank = rank
        self.words: NDArray[np.uint32] = np.full(
            (s.blocks, s.layers, s.kv, s.heads, s.tokens, s.size), GARBAGE, np.uint32
        )
        flat = self.words.reshape(s.blocks, s.layers, s.kv, s.heads * s.tokens * s.size)
        self.tensor = (
            HostTensor(flat.view(np.uint8), "float8_e4m3fn") if s.fp8 else HostTensor(flat.view(np.float32))
        )

    def truth(self, request: Request, first: int, end: int) -> NDArray[np.uint32]:
        """Returns the numbers expected at token positions [first, end), as [layers, kv, heads, positions, size]."""
        s = self.shape
        chain = np.empty(end, np.uint32)
        state = (request.secret * 2654435761 + self.rank * 40503 + 17) & 0xFFFFFFFF
        for position, token in enumerate(request.tokens[:end]):
            state = (state * 1664525 + token + 1013904223) & 0xFFFFFFFF
            chain[position] = state
        rest = np.arange(s.layers * s.kv * s.heads * s.size, dtype=np.uint32).reshape(
            s.layers, s.kv, s.heads, 1, s.size
        )
        # The bits must form finite floats, because copying a NaN as a float may change its bits.
        return (chain[first:end].reshape(1, 1, 1, -1, 1) + rest * np.uint32(9973)) & np.uint32(0x3FFFFFFF)

    def write(self, request: Request, first: int, end: int) -> None:
        truth = self.truth(request, first, end)
        for position in range(first, end):
            block = request.blocks[position // self.shape.tokens]
            self.words[block, :, :, :, position % self.shape.tokens] = truth[:, :, :, position - first]

    def wrong(self, request: Request, end: int) -> list[int]:
        """Returns the positions before `end` whose numbers are wrong."""
        truth = self.truth(request, 0, end)
        return sorted(
            {
                position
                for layer in range(self.shape.layers)
                for position in self.wrong_in(request, truth, layer)
            }
        )

    def wrong_in(self, request: Request, truth: NDArray[np.uint32], layer: int) -> list[int]:
        """Returns the positions whose numbers are wrong in one layer. `truth` contains the expected numbers of all
        positions to compare, which begin at 0.
        """
        s, end = self.shape, truth.shape[3]
        here = self.words[request.blocks[: -(-end // s.tokens)], layer]  # [blocks, kv, heads, tokens, size]
        rows = here.transpose(1, 2, 0, 3, 4).reshape(s.kv, s.heads, -1, s.size)[:, :, :end]
        return np.flatnonzero((rows != truth[layer]).any(axis=(0, 1, 3))).tolist()


def layout_of(pool: Pool, window: int | None = None, groups: int = 1) -> Any:
    """Returns a layout that describes the pool as one region with K and V of every layer."""
    s = pool.shape
    size = s.layers * s.kv * s.heads * s.tokens * s.size * 4
    buffers = tuple(
        SimpleNamespace(layer_id=layer, role=role, expansion=1)
        for layer in range(s.layers)
        for role in ("key", "value")[: s.kv]
    )
    region = SimpleNamespace(
        base=pool.tensor.data_ptr(),
        size=size,
        stride=size,
        num_slots=s.blocks,
        buffers=buffers,
        as_tensor=lambda: pool.tensor,
    )
    group = SimpleNamespace(
        layer_group_id=0,
        layer_ids=tuple(range(s.layers)),
        window_size=window,
        regions=(region,),
        replicated_regions=(),
    )
    return SimpleNamespace(tokens_per_block=s.tokens, groups=(group,) * groups)
