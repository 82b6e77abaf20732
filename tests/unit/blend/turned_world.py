"""Random loads whose keys are rotated to other positions, and a reference that computes the results of these loads in
separate steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.blend.turned_scatter import TurnedScatter
from flexkv.transfer.layerwise.base import LayerDevice
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from tests.unit.blend.rope_reference import encode
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S

ORDERS = ("tokens first", "heads first", "padded")


class TurnedWorld:
    """A random load: chunks with gaps between them, permuted slots, a random dtype, and paged memory with its axes in a
    random order.

    Attributes:
        memory: the engine's pool; for each layer an array [2, blocks, block_tokens, heads, head_dim] of any strides.
        stored: the rows to load; for each layer and chunk an array [2, tokens, heads, head_dim].
    """

    def __init__(self, seed: int, layers: int = 4) -> None:
        random = np.random.default_rng(seed)
        self.dtype = str(random.choice(["float32", "bfloat16", "float16"]))
        head_dim = int(random.choice([6, 16, 64]))
        spec = RopeSpec(
            head_dim,
            int(random.integers(1, head_dim // 2 + 1)) * 2,
            10_000.0,
            pairing=str(random.choice(["neox", "gptj"])),  # type: ignore[arg-type]
        )
        self.layers, heads = layers, int(random.integers(1, 4))
        self.rotation = KeyRotation(spec, heads, self.dtype)
        at, chunks = int(random.integers(0, 50)), []
        for _ in range(int(random.integers(1, 5))):
            at += int(random.choice([0, 1, 5]))
            chunks.append(Chunk(at, at + int(random.integers(1, 30)), int(random.integers(0, 500))))
            at = chunks[-1].end
        self.chunks = ChunkSet(chunks)
        self.block_tokens = int(random.choice([1, 4, 16]))
        blocks = -(-self.chunks.rows // self.block_tokens) + 2
        self.slots = random.permutation(blocks * self.block_tokens)[: self.chunks.rows].astype(np.int64)

        def values(*shape: int) -> NDArray[Any]:
            return encode(random.standard_normal(shape), self.dtype)

        self.stored = [
            [values(2, chunk.tokens, heads, head_dim) for chunk in chunks] for _ in range(self.layers)
        ]
        order = str(random.choice(ORDERS))
        shape = (2, blocks, self.block_tokens, heads, head_dim)
        if order == "heads first":
            made = [values(2, blocks, heads, self.block_tokens, head_dim) for _ in range(self.layers)]
            self.memory = [layer.transpose(0, 1, 3, 2, 4) for layer in made]
        elif order == "padded":
            self.memory = [np.repeat(values(*shape), 2, 2)[:, :, ::2] for _ in range(self.layers)]
        else:
            self.memory = [values(*shape) for _ in range(self.layers)]
        self.before = [layer.copy() for layer in self.memory]

    def pipeline(
        self, device: LayerDevice, memory: list[Any], kind: type[LoadPipeline] = LoadPipeline
    ) -> LoadPipeline:
        paged = PagedLayers([list(layer) for layer in memory])
        positions = self.chunks.positions()
        scatter = TurnedScatter(device, self.rotation, positions, paged, self.slots)
        return kind(
            device, paged, self.slots, self.chunks, None, GENEROUS_S, prefetch_layers=2, scatter=scatter
        )

    def expected(self, failed_from: dict[int, int] | None = None) -> list[NDArray[Any]]:
        """Returns the expected content of `memory` after the load, computed in separate steps: load, rotate, zero,
        scatter. `failed_from` gives, for lost chunks, the first layer in which they are lost.
        """
        rotation, positions = self.rotation, self.chunks.positions()
        count, head_bytes = self.chunks.rows, self.rotation.row_bytes // self.rotation.heads
        in_order = RowPlaces(np.arange(count, dtype=np.int64) * rotation.row_bytes, head_bytes)
        out = []
        for layer in range(self.layers):
            planes, _, _, heads, head_dim = self.memory[layer].shape
            rows = np.zeros((planes, count, heads, head_dim), self.memory[layer].dtype)
            gaps = list(self.chunks.gaps)
            for number, chunk in enumerate(self.chunks.chunks):
                at = self.chunks.rows_of(chunk)
                rows[:, at] = self.stored[layer][number]
                if failed_from is not None and failed_from.get(number, self.layers) <= layer:
                    gaps += range(at.start, at.stop)
            turned = np.zeros_like(rows[0])
            table = rotation.table(positions.old, positions.new)
            rotation.apply(rows[0], in_order, turned, in_order, table)
            rows[0] = turned
            rows[:, gaps] = 0
            paged = self.before[layer].copy()
            paged[:, self.slots // self.block_tokens, self.slots % self.block_tokens] = rows
            out.append(paged)
        return out

    def same(self, expected: list[NDArray[Any]]) -> bool:
        """Returns whether `memory` equals `expected` in every bit of every slot."""
        return all(
            np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))
            for a, b in zip(self.memory, expected, strict=True)
        )
