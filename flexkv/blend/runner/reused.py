"""The rows that the cache covers, layer by layer, through the layerwise pipeline."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexkv.blend.cache import SegmentCache
from flexkv.blend.kv_shape import PLANES
from flexkv.blend.plan import Rows
from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.blend.segment_load import SegmentLoad
from flexkv.errors import FlexKVError
from flexkv.transfer.layerwise.base import Array, LayerDevice, RowPositions
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers


class LostPages(FlexKVError):
    """Pages that the cache promised did not come; `segments` names the segments."""

    def __init__(self, segments: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.segments = tuple(segments)


class Turning:
    """The pipeline's transform: keys from the positions they are cached at to those they are wanted at.

    Args:
        positions: of the rows of every layer.
    """

    def __init__(self, rotation: KeyRotation, positions: RowPositions) -> None:
        self._rotation = rotation
        self._table = rotation.table(positions.old, positions.new)
        head_bytes = rotation.row_bytes // rotation.heads
        rows = np.arange(len(positions.new), dtype=np.int64)
        self._places = RowPlaces(rows * rotation.row_bytes, head_bytes)

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        self._rotation.apply(keys, self._places, keys, self._places, self._table)


class ReusedRows:
    """What the cache covers of a prompt.

    Args:
        starts: of each segment, the row of its first token in the prompt.
        rows: of the prompt.

    Attributes:
        covered: bool [rows].
    """

    def __init__(
        self, cache: SegmentCache, load: SegmentLoad, starts: Sequence[int], rows: int, device: LayerDevice
    ) -> None:
        self._cache, self._load, self._device = cache, load, device
        self._starts = [starts[hit.segment] for hit in load.hits]
        self.covered = np.zeros(rows, np.bool_)
        for start, hit in zip(self._starts, load.hits, strict=True):
            self.covered[start : start + hit.tokens] = True

    @contextmanager
    def open(self, rotation: KeyRotation, past: Sequence[tuple[Any, Any]]) -> Iterator[ReusedLayers]:
        """The layers, one after the other, behind the tokens of `past`: of each layer, keys and values
        [heads, tokens, dim] that the engine has.

        Raises:
            LostPages: at the end, if rows did not come after all.
        """
        first = past[0][0].shape[1] if past else 0
        chunks = [
            Chunk(first + start, first + start + hit.tokens, old_start=0)
            for start, hit in zip(self._starts, self._load.hits, strict=True)
        ]
        layers = ReusedLayers(self._cache, self._load, chunks, rotation, past, self.covered, self._device)
        try:
            yield layers
            layers.end()
        finally:
            layers.close()


class ReusedLayers:
    """The pipeline of one prefill. What it scatters to is the cache that is handed out.

    Attributes:
        kept: of each layer, keys and values [heads, tokens, dim]; complete after `end`.
    """

    def __init__(
        self,
        cache: SegmentCache,
        load: SegmentLoad,
        chunks: Sequence[Chunk],
        rotation: KeyRotation,
        past: Sequence[tuple[Any, Any]],
        covered: NDArray[np.bool_],
        device: LayerDevice,
    ) -> None:
        shape = cache.shape
        self.covered = covered
        self._load, self._shape = load, shape
        self._first = past[0][0].shape[1] if past else 0
        self._dtype = getattr(torch, shape.dtype)
        self._bits = getattr(torch, f"int{8 * shape.element_bytes}")
        self._room = (shape.heads, self._first + len(covered), shape.head_dim)
        self.kept = [(self._empty(), self._empty()) for _ in range(shape.layers)]
        for planes, had in zip(self.kept, past, strict=False):
            for plane, rows in zip(planes, had, strict=True):
                plane[:, : self._first] = rows
        # The rows that go through the pipeline: from the first chunk to the last, gaps included.
        self._begin = self._end = 0
        self._pipeline: LoadPipeline | None = None
        self._steps: Generator[Any, Any, None] | None = None
        self._buffer: Any = None
        if chunks:
            set_of = ChunkSet(chunks)
            self._begin, self._end = set_of.first - self._first, set_of.first - self._first + set_of.rows
            paged = PagedLayers([[self._paged(plane) for plane in planes] for planes in self.kept])
            slots = np.arange(set_of.rows, dtype=np.int64)
            turning = Turning(rotation, set_of.positions())
            self._pipeline = LoadPipeline(
                device, paged, slots, set_of, turning, cache.deadline_s, cache.prefetch_layers
            )
            self._steps = self._pipeline.run()
            next(self._steps)

    def _empty(self) -> Any:
        return torch.zeros(self._room, dtype=self._dtype)

    def _paged(self, plane: Any) -> Any:
        """The pipeline's rows of a plane, as blocks of one token: [rows, 1, heads, dim] in its memory."""
        rows = plane[:, self._first + self._begin : self._first + self._end]
        return rows.view(self._bits).numpy().view(self._shape.carrier).transpose(1, 0, 2)[:, None]

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Keys and values of all tokens, [heads, tokens, dim], to be edited; zeros where nobody has any.

        Raises:
            LostPages: pages did not come.
        """
        # Not `kept` itself: the pipeline writes there while the layer is in use.
        planes = tuple(self._empty() for _ in range(PLANES))
        for plane, kept in zip(planes, self.kept[layer], strict=True):
            plane[:, : self._first] = kept[:, : self._first]
        if self._pipeline is not None and self._steps is not None:
            begun = layer < self._pipeline.begun_layers
            self._steps.send(() if begun else self._load.rows(layer))
            # The next layers come and are turned while this one is computed with.
            self._pipeline.prefetch(self._load.rows)
            self._buffer = self._pipeline.get_kv(layer)
            self._check_lost(self._pipeline.failed)
            at = slice(self._first + self._begin, self._first + self._end)
            for plane, rows in zip(planes, self._buffer, strict=True):
                plane[:, at] = (
                    torch.from_numpy(rows.view(rows.dtype.str.replace("u", "i")))
                    .view(self._dtype)
                    .transpose(0, 1)
                )
        return planes[0], planes[1]

    def edit(self, layer: int, rows: Rows, key: Any, value: Any) -> None:
        """Puts fresh keys and values [rows, heads, dim] of `rows` into what the layer hands out."""
        inside = (rows >= self._begin) & (rows < self._end)
        outside = torch.from_numpy(rows[~inside] + self._first)
        for number, fresh in enumerate((key, value)):
            self.kept[layer][number][:, outside] = fresh[torch.from_numpy(~inside)].transpose(0, 1)
            if self._buffer is not None:
                carried = fresh[torch.from_numpy(inside)].contiguous().view(self._bits)
                self._buffer[number, rows[inside] - self._begin] = carried.numpy().view(self._shape.carrier)

    def end(self) -> None:
        """
        Raises:
            LostPages: the pipeline ended with failed rows.
        """
        if self._steps is not None:
            self._check_lost(next(self._steps).failed)

    def close(self) -> None:
        """Waits for what was begun."""
        if self._steps is not None:
            self._steps.close()

    def _check_lost(self, failed: dict[int, str]) -> None:
        if failed:
            segments = [self._load.hits[number].segment for number in failed]
            raise LostPages(segments, "; ".join(failed.values()))
