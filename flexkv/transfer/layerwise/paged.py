"""Reads and writes an engine's paged KV memory, one layer at a time, by token slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flexkv.errors import BlockRangeError, GeometryError
from flexkv.transfer.layerwise.base import Array, RowNumbers


class PagedLayers:
    """An engine's paged KV memory. Slot s is token `s % block_tokens` of block `s // block_tokens`.

    Args:
        layers: for each layer its planes: K and V, or the single plane of MLA. Each is an array [blocks, block_tokens,
            heads, head_width] with any strides, so that a view of any engine's pool has this shape. The caller keeps
            the pool's memory valid until the pipeline is over.

    Attributes:
        layers: the planes of each layer.
        planes, blocks, block_tokens, heads, head_width, dtype: the geometry, which is the same for every layer.
        takes_gaps: whether a load writes zeros to the rows that no chunk covers.

    Raises:
        GeometryError: there are no layers, or planes differ in shape or dtype.
    """

    takes_gaps: ClassVar[bool] = True

    def __init__(self, layers: Sequence[Sequence[Array]]) -> None:
        if not layers or not layers[0]:
            raise GeometryError("paged memory needs at least one layer with one plane")
        first = layers[0][0]
        for number, planes in enumerate(layers):
            for plane in planes:
                same = tuple(plane.shape) == tuple(first.shape) and plane.dtype == first.dtype
                if len(planes) != len(layers[0]) or len(plane.shape) != 4 or not same:
                    raise GeometryError(
                        f"layer {number}: {len(planes)} planes, one of shape {tuple(plane.shape)} {plane.dtype}; "
                        f"all layers must have {len(layers[0])} of shape [blocks, block_tokens, heads, head_width] "
                        f"like layer 0's {tuple(first.shape)} {first.dtype}"
                    )
        self.layers = tuple(tuple(planes) for planes in layers)
        self.planes = len(self.layers[0])
        self.dtype = first.dtype
        self.blocks, self.block_tokens, self.heads, self.head_width = (int(n) for n in first.shape)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def split(self, slots: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """Returns each slot's block, and the number of its token in that block.

        Raises:
            BlockRangeError: a slot lies outside the pool.
        """
        numbers = np.asarray(slots, dtype=np.int64)
        total = self.blocks * self.block_tokens
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < total):
            bad = numbers[(numbers < 0) | (numbers >= total)][0]
            raise BlockRangeError(f"slot {bad} of an engine's pool: slots are [0, {total})")
        return numbers // self.block_tokens, numbers % self.block_tokens

    def write(self, layer: int, blocks: Array, tokens: Array, rows: Array) -> None:
        """Writes `rows`, shape [planes, rows, heads, head_width], to slots of the layer. No slot may be given twice."""
        for number, plane in enumerate(self.layers[layer]):
            to, of = _as_items(plane, rows[number])
            to[blocks, tokens] = of

    def read(self, layer: int, blocks: Array, tokens: Array, rows: Array) -> None:
        """Reads slots of the layer into `rows`, shape [planes, rows, heads, head_width]."""
        for number, plane in enumerate(self.layers[layer]):
            of, to = _as_items(plane, rows[number])
            to[:] = of[blocks, tokens]


@dataclass(frozen=True, slots=True)
class CallerLayers:
    """Takes the place of `PagedLayers` if only the caller knows the layout of its memory. The caller then copies each
    layer from the load's buffers itself (`LoadPipeline.get_kv`), before it takes the next step. The slot of a row is
    the row's number.

    Attributes:
        num_layers, planes, heads, head_width: the geometry of the layers.
        dtype: the rows' dtype, in the device's own type.
        takes_gaps: always False. The caller reads no rows that no chunk covers, so the pipeline need not zero them.
    """

    takes_gaps: ClassVar[bool] = False

    num_layers: int
    planes: int
    heads: int
    head_width: int
    dtype: Any

    def split(self, slots: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """Like `PagedLayers.split`, with blocks of one token."""
        return slots, np.zeros_like(slots)

    def write(self, layer: int, blocks: Array, tokens: Array, rows: Array) -> None:
        """Does nothing: the caller has already copied the rows."""


def _as_items(plane: Array, rows: Array) -> tuple[Array, Array]:
    """If both arrays are NumPy arrays with contiguous rows, returns views of them in which each row is a single item.
    Otherwise returns the arrays unchanged.

    NumPy copies an item with one memcpy, which is three times as fast as copying [heads, head_width] elements.
    """
    if not all(isinstance(array, np.ndarray) for array in (plane, rows)):
        return plane, rows
    item = plane.itemsize
    row = (plane.shape[-1] * item, item)
    if plane.strides[-2:] != row or rows.strides[-2:] != row:
        return plane, rows
    whole = np.dtype((np.void, plane.shape[-2] * row[0]))
    return tuple(a.reshape(*a.shape[:-2], -1).view(whole)[..., 0] for a in (plane, rows))
