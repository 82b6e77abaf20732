"""The base class of load and store pipelines: their rows, slots and buffers, and how they end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexkv.config.sections import MAX_PREFETCH_LAYERS, MIN_PREFETCH_LAYERS
from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import (
    PREFETCH_LAYERS,
    Array,
    Event,
    LayerDevice,
    LostRows,
    PipelineError,
    RowNumbers,
)
from flexkv.transfer.layerwise.chunks import ChunkSet
from flexkv.transfer.layerwise.paged import CallerLayers, PagedLayers


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """How a pipeline ended.

    Attributes:
        failed: the failed chunks by number, each with the reason. A failed chunk's rows must not be used, neither in
            paged memory after a load nor in their target after a store.
        quiet: whether all copies have ended. While this is False, neither the engine's blocks nor the memory of row
            sources and targets may be reused; `Pipeline.quiet` waits for the copies.
    """

    failed: dict[int, str] = field(default_factory=dict)
    quiet: bool = True


class Pipeline(ABC):
    """Copies all layers of some chunks once, from or to paged memory.

    Args:
        slots: the slot in paged memory of every row, including rows in gaps; int64 [rows], without duplicates.
        buffers: number of buffers. Layer n uses buffer n mod `buffers`, so that with two buffers one is filled while
            the other is emptied.
        deadline_s: the longest time in seconds that a call makes its caller wait.

    Attributes:
        deadline_s: the longest time in seconds that a call makes its caller wait. A caller may change it between two
            calls.

    Raises:
        ContractError: the numbers of slots and rows differ, a slot appears twice, or `buffers` is not allowed.
        BlockRangeError: a slot lies outside the pool.
    """

    def __init__(
        self,
        device: LayerDevice,
        paged: PagedLayers | CallerLayers,
        slots: RowNumbers,
        chunks: ChunkSet,
        deadline_s: float,
        buffers: int = PREFETCH_LAYERS,
    ) -> None:
        if not MIN_PREFETCH_LAYERS <= buffers <= MAX_PREFETCH_LAYERS:
            raise ContractError(
                f"prefetch_layers is {buffers}: {MIN_PREFETCH_LAYERS} to {MAX_PREFETCH_LAYERS} layers are held at once"
            )
        slots = np.asarray(slots, dtype=np.int64)
        if slots.shape != (chunks.rows,):
            raise ContractError(f"slots of shape {slots.shape} for {chunks.rows} rows")
        if len(np.unique(slots)) != len(slots):
            raise ContractError("two rows have the same slot")
        blocks, tokens = paged.split(slots)
        self._device = device
        self._num_layers = paged.num_layers
        self._chunks = chunks
        self.deadline_s = deadline_s
        self._blocks, self._tokens = device.index(blocks), device.index(tokens)
        shape = (paged.planes, chunks.rows, paged.heads, paged.head_width)
        self._buffers = [device.buffer(shape, paged.dtype) for _ in range(buffers)]
        self._failed: dict[int, str] = {}
        self._started = False

    @abstractmethod
    def _events(self) -> list[Event]:
        """Returns the events of all work that was begun."""

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def prefetch_layers(self) -> int:
        """The number of layers that the pipeline holds at the same time, which is the number of its buffers."""
        return len(self._buffers)

    def _buffer_of(self, layer: int) -> Array:
        return self._buffers[layer % len(self._buffers)]

    def quiet(self, deadline_s: float) -> bool:
        """Waits up to `deadline_s` seconds until all work that was begun has ended. Returns False if some work has not
        ended.
        """
        ends_s = time.monotonic() + deadline_s
        return all(event.wait(max(0.0, ends_s - time.monotonic())) for event in self._events())

    @property
    def failed(self) -> dict[int, str]:
        """The numbers of the chunks that have failed so far, each with the reason."""
        return dict(self._failed)

    def _start(self) -> None:
        if self._started:
            raise ContractError("a pipeline runs once")
        self._started = True

    def _require_one_a_chunk(self, layer: int, count: int, what: str) -> None:
        if count != len(self._chunks.chunks):
            raise ContractError(f"layer {layer}: {count} {what} for {len(self._chunks.chunks)} chunks")

    def _copy_chunks(self, layer: int, buffer: Array, copies: Sequence[Callable[[Array], None]]) -> None:
        """Calls each chunk's copy function with the chunk's rows in the buffer. If a copy raises `LostRows`, its chunk
        fails, and is skipped in later layers.
        """
        for number, (chunk, copy) in enumerate(zip(self._chunks.chunks, copies, strict=True)):
            if number in self._failed:
                continue
            try:
                copy(buffer[:, self._chunks.rows_of(chunk)])
            except LostRows as lost:
                self._failed[number] = f"layer {layer}: {lost}"

    def _end_early(self) -> None:
        if not self.quiet(self.deadline_s):
            raise PipelineError(f"a pipeline that was closed still moves bytes after {self.deadline_s:g} s")

    def _report(self, last: Event) -> PipelineReport:
        """Waits for all work, and makes the report. `last` is the event that follows all other work. Its error covers
        every failure except those of single chunks.
        """
        quiet = self.quiet(self.deadline_s)
        error = last.error if quiet else f"did not end within {self.deadline_s:g} s"
        failed = dict(self._failed)
        if error:
            # A new dict is made, because stages that are still running may change `_failed`.
            failed = {number: failed.get(number, error) for number in range(len(self._chunks.chunks))}
        return PipelineReport(failed, quiet)
