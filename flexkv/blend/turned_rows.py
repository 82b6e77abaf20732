"""Loaded rows of segments, rotated to their positions in a prompt, layer by layer through the layerwise pipeline."""

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
        first: number of the first row in its segment.
        rows: number of rows.
        position: position in the prompt of the first row.
    """

    hit: Hit
    first: int
    rows: int
    position: int


Passage = Callable[[int, Sequence[RowSource]], Sequence[RowSource]]
"""Makes a layer's row sources for a device of sources that fill host memory, one per chunk. Called with the layer's
number."""


def straight(layer: int, sources: Sequence[RowSource]) -> Sequence[RowSource]:
    """The `Passage` of a device whose buffers are host memory."""
    return sources


@dataclass(frozen=True, slots=True)
class RowDevice:
    """The place of a pipeline's buffers.

    Attributes:
        dtype: the device's dtype for the cache's elements.
        rooms: called with a number of layers and of seconds, makes the memory between host memory and the buffers of
            one load: for that many layers at a time, with waits of at most that long. See `Passage`.
    """

    device: LayerDevice
    dtype: Any
    rooms: Callable[[int, float], Passage] = lambda layers, deadline_s: straight


class LostStretches(PipelineError):
    """Rows of some stretches will not arrive, because their segments' pages were lost. Nothing else has failed."""


class StretchRows:
    """The place of one stretch's rows in the staging pool."""

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
        """Fills `rows`, in host memory, once the layer has arrived.

        Raises:
            LostRows: the layer does not arrive in time, or the load was released, so that its blocks may hold other
                rows.
        """
        self._load.wait_layer(self._hit, layer)
        staging = self._cache.staging.rows[layer]
        for plane, source in enumerate(self._sources):
            # One pass, without Python's interpreter lock.
            self._rotation.apply(staging, source, rows[plane], self._target, self._copies)
        if self._hit not in self._load.hits:
            raise LostRows("its segment was released")


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of a stretch: a `RowSource` for buffers in host memory."""

    stretch: StretchRows
    layer: int

    def copy_to(self, rows: Array) -> None:
        self.stretch.copy_layer(self.layer, rows)


class TurnedRows:
    """Rows of one request's hits, whose pages have arrived in the staging pool or arrive there layer by layer.

    Args:
        stretches: the rows, by ascending position, at least one.

    Attributes:
        in_buffer: number of each row among those from the first stretch's first to the last one's last, int64 [rows].
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
        """Begins to load the layers from `first` on. The caller closes what this returns.

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
        """One row source per stretch."""
        return [LayerRows(each, layer) for each in self._stretches]


class TurnedLayers:
    """The layers of a load, one after the other, while the next ones are copied and rotated.

    Call order:
        `layer`, `leave` for each layer from `first` on, as far as the caller wants; `close`.

    Args:
        take: returns a layer's row sources, one per chunk.
        first: the model's layer that is the first one in the pipeline.
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
        """Keys and values, [2, rows, heads, head_dim], with the keys rotated. They are in the buffer until `leave`.

        Raises:
            ContractError: another layer is next.
            LostStretches: pages of rows were lost.
            PipelineError: rows did not arrive for another reason, or not before the deadline.
        """
        try:
            buffer = self._pipeline.get_kv(layer - self._first)
        except PipelineError as error:
            raise PipelineError(f"cached rows of the model's layer {layer}: {error}") from error
        # The rows of a lost chunk are undefined.
        if failed := self._pipeline.failed:
            raise LostStretches(f"cached rows of the model's layer {layer}: {'; '.join(failed.values())}")
        return buffer

    def leave(self) -> None:
        """Called when the caller has enqueued all its work on the current layer, whose buffer is then reused."""
        if self._sent < self._pipeline.num_layers:
            self._step()

    def _step(self) -> None:
        """Makes the next layer the current one, and begins the layers after it in the buffers that are free."""
        begun = self._sent < self._pipeline.begun_layers
        self._steps.send(() if begun else self._take(self._sent))
        self._sent += 1
        self._pipeline.prefetch(self._take)

    def _take(self, number: int) -> Sequence[RowSource]:
        return self._take_rows(self._first + number)

    def close(self, wait: bool = True) -> None:
        """Begins no further layer, and waits for those that were begun.

        Args:
            wait: whether to wait.

        Raises:
            PipelineError: some layers still move at the deadline or, without `wait`, now.
        """
        if not wait:
            self._pipeline.deadline_s = 0.0
        self._steps.close()
