"""Provides the loaded rows of segments, rotated to their positions in a prompt, layer by layer through the layerwise
pipeline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import PLANES, Hit
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_keys import TurnedKeys
from flexkv.transfer.layerwise.base import Array, LayerDevice, LostRows, PipelineError, RowSource
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import CallerLayers


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of a hit.

    Attributes:
        hit: the hit.
        first: number of the first row within the segment.
        rows: number of rows.
        position: position of the first row in the prompt.
    """

    hit: Hit
    first: int
    rows: int
    position: int


Passage = Callable[[int, Sequence[RowSource]], Sequence[RowSource]]
"""A function that converts a layer's row sources, which fill host memory, to row sources that fill a device's buffers.
It is called with the layer's number and one source per chunk."""


def straight(layer: int, sources: Sequence[RowSource]) -> Sequence[RowSource]:
    """The `Passage` for a device whose buffers are in host memory: returns the sources unchanged."""
    return sources


@dataclass(frozen=True, slots=True)
class RowDevice:
    """The device on which a pipeline's buffers are, and how rows are copied to them.

    Attributes:
        device: the device.
        dtype: the device's dtype for the cache's elements.
        rooms: makes the `Passage` of one load from host memory to the buffers. Its arguments are the number of layers
            that have separate staging buffers, and how many seconds to wait at most for such a buffer.
    """

    device: LayerDevice
    dtype: Any
    rooms: Callable[[int, float], Passage] = lambda layers, deadline_s: straight


class LostStretches(PipelineError):
    """Raised if rows of some stretches will not arrive because pages of their segments were lost, and nothing else has
    failed."""


class StretchRows:
    """The positions of one stretch's rows in the staging pool."""

    def __init__(
        self, cache: SegmentCache, rotation: KeyRotation, load: SegmentLoad, stretch: Stretch
    ) -> None:
        self._cache, self._rotation, self._load, self._hit = cache, rotation, load, stretch.hit
        tokens, row_bytes = cache.block_tokens, cache.shape.row_bytes
        head_bytes = row_bytes // cache.shape.heads
        rows = np.arange(stretch.first, stretch.first + stretch.rows)
        places = stretch.hit.blocks.astype(np.int64)[rows // tokens] * (PLANES * tokens) + rows % tokens
        self._sources = [RowPlaces((places + p * tokens) * row_bytes, head_bytes) for p in range(PLANES)]
        self._target = RowPlaces(np.arange(stretch.rows, dtype=np.int64) * row_bytes, head_bytes)
        self._copies = TurnTable.copies(stretch.rows)

    def copy_layer(self, layer: int, rows: Array) -> None:
        """Waits until the layer has arrived, and copies its rows to `rows` in host memory.

        Raises:
            LostRows: the layer did not arrive in time, or the load freed the hit's staging blocks, so that they may
                hold different rows by now.
        """
        self._load.wait_layer(self._hit, layer)
        staging = self._cache.staging.rows[layer]
        for plane, source in enumerate(self._sources):
            # This copies all rows in one call, which releases Python's interpreter lock.
            self._rotation.apply(staging, source, rows[plane], self._target, self._copies)
        if self._hit not in self._load.hits:
            raise LostRows("its segment was released")


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of a stretch. A `RowSource` for buffers in host memory."""

    stretch: StretchRows
    layer: int

    def copy_to(self, rows: Array) -> None:
        self.stretch.copy_layer(self.layer, rows)


class TurnedRows:
    """The rows of one request's hits. Their pages have arrived in the staging pool, or are arriving there layer by
    layer.

    Args:
        stretches: the rows; at least one stretch, in order of positions.

    Attributes:
        in_buffer: for each row of the stretches, its index in a pipeline buffer, int64 [rows]. A buffer holds all
            positions from the first stretch's first row to the last stretch's last row, gaps included.
    """

    def __init__(
        self, cache: SegmentCache, rotation: KeyRotation, load: SegmentLoad, stretches: Sequence[Stretch]
    ) -> None:
        self._cache, self._rotation = cache, rotation
        self._chunks = ChunkSet(
            [Chunk(each.position, each.position + each.rows, each.first) for each in stretches]
        )
        self._stretches = [StretchRows(cache, rotation, load, each) for each in stretches]
        begins = [np.arange(each.rows) + each.position - self._chunks.first for each in stretches]
        self.in_buffer: NDArray[np.int64] = np.concatenate(begins).astype(np.int64)

    def open(self, on: RowDevice, first: int) -> TurnedLayers:
        """Starts copying and rotating the layers from the model's layer `first` on. The caller must close the result.

        Args:
            on: the device for the buffers.
            first: number of the first layer to copy.

        Raises:
            ClosedError: the device was closed.
        """
        shape = self._cache.shape
        chunks, device = self._chunks, on.device
        pipeline = LoadPipeline(
            device,
            CallerLayers(shape.layers - first, PLANES, shape.heads, shape.head_dim, on.dtype),
            np.arange(chunks.rows, dtype=np.int64),
            chunks,
            TurnedKeys(device, self._rotation, chunks, on.dtype),
            self._cache.deadline_s,
            self._cache.prefetch_layers,
        )
        passage = on.rooms(self._cache.prefetch_layers, self._cache.deadline_s)
        return TurnedLayers(pipeline, lambda layer: passage(layer, self.sources(layer)), first)

    def sources(self, layer: int) -> list[RowSource]:
        """Returns a layer's row sources, one per stretch."""
        return [LayerRows(each, layer) for each in self._stretches]


class TurnedLayers:
    """Yields the layers of a load one after the other, while the next layers are copied and rotated.

    Call order:
        `layer`, then `leave`, for each layer from `first` on, as many as the caller needs; then `close`.

    Args:
        pipeline: the pipeline that copies and rotates the rows.
        take: returns the row sources of one of the model's layers, one per chunk.
        first: number of the model's layer that is the pipeline's layer 0.
    """

    def __init__(
        self, pipeline: LoadPipeline, take: Callable[[int], Sequence[RowSource]], first: int
    ) -> None:
        self._pipeline, self._first, self._take_rows = pipeline, first, take
        self._sent = 0
        self._steps: Generator[Any, Any, None] = pipeline.run()
        next(self._steps)
        self._step()

    def layer(self, layer: int) -> Array:
        """Returns the keys and values of the current layer, [2, rows, heads, head_dim], with the keys rotated. They
        stay in the buffer until `leave` is called.

        Raises:
            ContractError: `layer` is not the current layer.
            LostStretches: some rows will not arrive, because their pages were lost.
            PipelineError: rows did not arrive for a different reason, or not before the deadline.
        """
        try:
            buffer = self._pipeline.get_kv(layer - self._first)
        except PipelineError as error:
            raise PipelineError(f"cached rows of the model's layer {layer}: {error}") from error
        # The rows of a lost chunk have undefined content, so the layer is not returned.
        if failed := self._pipeline.failed:
            raise LostStretches(f"cached rows of the model's layer {layer}: {'; '.join(failed.values())}")
        return buffer

    def leave(self) -> None:
        """Goes on to the next layer. Must be called when the caller has enqueued all its work on the current layer,
        whose buffer is then reused."""
        if self._sent < self._pipeline.num_layers:
            self._step()

    def _step(self) -> None:
        """Makes the next layer the current one, and starts filling the free buffers with the layers after it."""
        begun = self._sent < self._pipeline.begun_layers
        self._steps.send(() if begun else self._take(self._sent))
        self._sent += 1
        self._pipeline.prefetch(self._take)

    def _take(self, number: int) -> Sequence[RowSource]:
        return self._take_rows(self._first + number)

    def close(self, wait: bool = True) -> None:
        """Closes the pipeline: begins no further layer, and waits for the layers that were begun.

        Args:
            wait: whether to wait for copies in flight.

        Raises:
            PipelineError: copies are still in flight at the deadline or, if `wait` is False, at the time of this call.
        """
        if not wait:
            self._pipeline.deadline_s = 0.0
        self._steps.close()
