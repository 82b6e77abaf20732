"""Loads the rows that the cache covers, layer by layer, through the layerwise pipeline."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexkv.blend.cache import SegmentCache
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_scatter import TurnedScatter
from flexkv.errors import FlexKVError
from flexkv.transfer.layerwise.base import LayerDevice, PipelineError
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers


class LostPages(FlexKVError):
    """Raised if pages that the cache promised did not arrive; `segments` contains the numbers of their segments."""

    def __init__(self, segments: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.segments = tuple(segments)


class ReusedRows:
    """The rows of a prompt that the cache covers.

    Args:
        load: the load of the prompt's cached segments.
        starts: the row in the prompt of each segment's first token.
        rows: number of rows of the prompt.
        device: the device with the prefill's KV.

    Attributes:
        covered: whether the cache covers each row, bool [rows].
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
        """A context manager that yields the `ReusedLayers` of the covered rows, and closes that object at the end of
        the `with` block.

        Args:
            past: each layer's keys and values [heads, tokens, dim] of the tokens that the caller already has, which
                precede the prompt; empty if there are none.
        """
        first = past[0][0].shape[1] if past else 0
        chunks = [
            Chunk(first + start, first + start + hit.tokens, old_start=0)
            for start, hit in zip(self._starts, self._load.hits, strict=True)
        ]
        layers = ReusedLayers(self._cache, self._load, chunks, rotation, past, self.covered, self._device)
        try:
            yield layers
        finally:
            layers.close()


class ReusedLayers:
    """The layers of one prefill. A pipeline writes the covered rows directly into the tensors that the prefill returns.

    Attributes:
        covered: whether the cache covers each row of the prompt, bool [rows].
        kept: each layer's keys and values [heads, tokens, dim], which the prefill returns.
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
        self._bits = getattr(torch, f"int{8 * shape.element_bytes}")
        room = (shape.heads, self._first + len(covered), shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        self.kept = [
            (torch.zeros(room, dtype=dtype), torch.zeros(room, dtype=dtype)) for _ in range(shape.layers)
        ]
        for planes, had in zip(self.kept, past, strict=False):
            for plane, rows in zip(planes, had, strict=True):
                plane[:, : self._first] = rows
        self._sent = 0
        self._pipeline: LoadPipeline | None = None
        self._steps: Generator[Any, Any, None] | None = None
        if chunks:
            # The pipeline handles all rows from the first chunk to the last, gaps included.
            set_of = ChunkSet(chunks)
            rows_of = slice(set_of.first, set_of.first + set_of.rows)
            paged = PagedLayers(
                [[self._paged(plane[:, rows_of]) for plane in planes] for planes in self.kept]
            )
            slots = np.arange(set_of.rows, dtype=np.int64)
            scatter = TurnedScatter(device, rotation, set_of.positions(), paged, slots)
            self._pipeline = LoadPipeline(
                device, paged, slots, set_of, None, cache.deadline_s, cache.prefetch_layers, scatter
            )
            self._steps = self._pipeline.run()
            next(self._steps)

    def _paged(self, rows: Any) -> Any:
        """Returns a view of a plane's rows as blocks of one token each, [rows, 1, heads, dim]."""
        return rows.view(self._bits).numpy().view(self._shape.carrier).transpose(1, 0, 2)[:, None]

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Returns the keys and values of all tokens, each [heads, tokens, dim], with the keys rotated to their
        positions. Rows without cached KV are zeros.

        The returned tensors are those in `kept`; the caller writes the computed rows into them. Meanwhile, the pipeline
        loads the next layers.

        Raises:
            LostPages: pages did not arrive.
            PipelineError: the layer did not arrive before the deadline.
        """
        if self._pipeline is not None and self._steps is not None:
            self._send(layer + 1)
            if layer == self._pipeline.num_layers - 1:
                self._check_lost(next(self._steps).failed)
            elif not self._pipeline.wait_scattered(layer):
                raise PipelineError(f"layer {layer} was not there in time")
            self._check_lost(self._pipeline.failed)
            self._send(layer + 2)
            self._pipeline.prefetch(self._load.rows)
        return self.kept[layer]

    def _send(self, last: int) -> None:
        """Runs the pipeline's steps up to the step that loads layer `last`. That step also scatters the layer before
        it."""
        assert self._pipeline is not None
        assert self._steps is not None
        while self._sent <= min(last, self._pipeline.num_layers - 1):
            begun = self._sent < self._pipeline.begun_layers
            self._steps.send(() if begun else self._load.rows(self._sent))
            self._sent += 1

    def close(self) -> None:
        """Waits for all work that has begun."""
        if self._steps is not None:
            self._steps.close()

    def _check_lost(self, failed: dict[int, str]) -> None:
        if failed:
            segments = [self._load.hits[number].segment for number in failed]
            raise LostPages(segments, "; ".join(failed.values()))
