"""The load pipeline: loads layer i, transforms layer i-1 and scatters layer i-2 at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import (
    PREFETCH_LAYERS,
    Array,
    Event,
    LayerDevice,
    LayerScatter,
    LayerTransform,
    PipelineError,
    RowNumbers,
    RowSource,
)
from flexkv.transfer.layerwise.chunks import ChunkSet
from flexkv.transfer.layerwise.paged import CallerLayers, PagedLayers
from flexkv.transfer.layerwise.pipeline import Pipeline, PipelineReport


class LoadPipeline(Pipeline):
    """Copies the layers of some chunks into paged memory, in three stages: load, transform and scatter.

    The caller drives the generator `run()`: one `next`, then per layer one `send` with a row source for each chunk, and
    a final `next`, which yields the `PipelineReport`. There are two steps more than layers. Step i starts the load of
    layer i, transforms layer i-1 and scatters layer i-2. After the `send` for layer i has returned, `get_kv` returns
    layer i, and the caller may no longer change layer i-1, which is being written to paged memory. The schedule is the
    same as in CacheBlend (LMCache's `batched_to_gpu`). But these stages wait only for each other's events, never for
    all work on the device:

        load(i) -> transform(i) -> scatter(i) -> load(i + buffers), which uses the same buffer
        the caller's work on its own stream before a step -> scatter of that step

    `prefetch` starts layers ahead of their steps, as many as there are free buffers.

    All rows from the start of the first chunk to the end of the last are written. Rows in gaps are zeros, unless the
    caller edits them. If a source raises `LostRows`, only its chunk fails, and from that layer on the chunk's rows are
    treated as gaps. Any other failure ends the pipeline: later stages are skipped, and all chunks fail. If the
    generator is closed early, the close waits for work that has begun; with `CallerLayers` on a GPU, the caller's
    stream waits instead.

    With `scatter`, keys are changed in the pass that writes them to paged memory. `get_kv` is not available then: the
    caller reads and edits a layer in paged memory, after `wait_scattered`.

    With `CallerLayers`, the pipeline writes nothing to paged memory. The caller itself copies what it needs of a layer
    before it takes the next step. The content of gaps and of failed chunks is undefined, so the caller copies only
    chunks that are not in `failed`.

    Args:
        transform: changes the keys of each layer; None leaves them as they are.
        deadline_s: the longest time in seconds that `get_kv`, `wait_scattered`, the step that yields the report, or an
            early close waits.
        prefetch_layers: number of layers that the pipeline holds at the same time, each in its own buffer, including
            the current layer; 2 to 16.
        scatter: function that writes each layer to paged memory; None to let the pipeline write it. Not allowed
            together with `transform`.

    Raises:
        ContractError, BlockRangeError: see `Pipeline`. ContractError also if both `transform` and `scatter` are given.
    """

    def __init__(
        self,
        device: LayerDevice,
        paged: PagedLayers | CallerLayers,
        slots: RowNumbers,
        chunks: ChunkSet,
        transform: LayerTransform | None = None,
        deadline_s: float = 30.0,
        prefetch_layers: int = PREFETCH_LAYERS,
        scatter: LayerScatter | None = None,
    ) -> None:
        super().__init__(device, paged, slots, chunks, deadline_s, prefetch_layers)
        self._paged = paged
        if transform is not None and scatter is not None:
            raise ContractError("a pipeline has a transform, or a scatter that changes keys, and not both")
        self._transform = transform
        self._own_scatter = scatter
        self._load, self._compute, self._store = (device.stream(n) for n in ("load", "compute", "store"))
        self._loaded: dict[int, Event] = {}
        self._transformed: dict[int, Event] = {}
        self._scattered: dict[int, Event] = {}
        self._current: int | None = None
        self._gaps: dict[int, Array] = {}
        self._gaps_of_lost = 0, device.index(chunks.gaps)
        """The number of failed chunks, and the numbers of all rows that are in gaps or in failed chunks."""
        self._positions = chunks.positions()

    # --- the generator ---

    def run(self) -> Generator[PipelineReport | None, Sequence[RowSource], None]:
        """Returns the generator that the class describes. May be called once."""
        self._start()
        layers = self.num_layers
        reported = False
        try:
            for step in range(layers + 2):
                if step > 1:
                    self._scatter(step - 2)
                if 0 < step <= layers:
                    self._process(step - 1)
                if step < layers:
                    self._take_step(step, (yield None))
                elif step == layers:
                    yield None
            # The last scatter waited for all earlier work, so its event has the error of any failure.
            report = self._report(self._scattered[layers - 1])
            reported = True
            yield report
        finally:
            self._current = None
            if not reported:
                self._end_early()

    @property
    def begun_layers(self) -> int:
        """The number of layers whose loads have begun, in the layers' own steps or ahead of them."""
        return len(self._loaded)

    def prefetch(self, take: Callable[[int], Sequence[RowSource]]) -> None:
        """Begins to load and transform the next layers, as many as there are free buffers.

        This does not change the current layer, which `get_kv` returns. In the step of a layer that this call has begun,
        the caller later sends an empty sequence.

        Call order:
            Between two steps.

        Args:
            take: takes a layer's number, and returns its row sources, one per chunk.
        """
        while (layer := self.begun_layers) < self.num_layers and self._buffer_is_leaving(layer):
            self._begin_load(layer, take(layer))
            self._begin_transform(layer)

    def get_kv(self, layer: int) -> Array:
        """Returns the current layer, which was transformed in the last step. The caller may read and edit it until the
        next step.

        Returns:
            Array [planes, rows, heads, head_width]; plane 0 has the keys.

        Raises:
            ContractError: `layer` is not the current layer, or the pipeline was given a `scatter`.
            PipelineError: the layer failed, or did not arrive before the deadline.
        """
        if self._own_scatter is not None:
            raise ContractError(f"get_kv({layer}): this pipeline changes keys as it scatters them")
        if layer != self._current:
            raise ContractError(f"get_kv({layer}): the layer between load and scatter is {self._current}")
        event = self._transformed[layer]
        if not self._device.caller_waits(event, self.deadline_s):
            raise PipelineError(f"layer {layer} was not there after {self.deadline_s:g} s")
        if event.error:
            raise PipelineError(f"layer {layer}: {event.error}")
        return self._buffer_of(layer)

    def wait_scattered(self, layer: int) -> bool:
        """Makes the caller's next work run after layer `layer` was written to paged memory. Returns False if the
        deadline passed first.

        Raises:
            ContractError: the step that scatters the layer has not been taken yet.
            PipelineError: the layer's scatter, or work that it waited for, failed.
        """
        if layer not in self._scattered:
            raise ContractError(f"layer {layer} is scattered two steps after its load")
        event = self._scattered[layer]
        if not self._device.caller_waits(event, self.deadline_s):
            return False
        if event.error:
            raise PipelineError(f"layer {layer}: {event.error}")
        return True

    def _events(self) -> list[Event]:
        return [*self._loaded.values(), *self._transformed.values(), *self._scattered.values()]

    def _end_early(self) -> None:
        """Waits until all work that was begun has ended. With `CallerLayers`, only the caller's next work waits.

        With `CallerLayers` on a GPU, the caller's stream waits, and the host continues. The host must not wait, because
        the last stages may wait for the caller's own work on the GPU, whose duration is not bounded. The caller may
        reuse the buffers for later work on its stream, because that runs after all work that was begun.
        """
        if not isinstance(self._paged, CallerLayers):
            super()._end_early()
        elif not self.precede_caller(self.deadline_s):
            raise PipelineError(f"a pipeline that was closed still moves bytes after {self.deadline_s:g} s")

    def precede_caller(self, deadline_s: float) -> bool:
        """Makes the caller's next work run after all work that has begun, through `LayerDevice.caller_waits`. Returns
        False if the deadline passed first."""
        ends_s = time.monotonic() + deadline_s
        return all(
            self._device.caller_waits(event, max(0.0, ends_s - time.monotonic())) for event in self._events()
        )

    # --- the stages ---

    def _take_step(self, layer: int, sources: Sequence[RowSource]) -> None:
        if layer >= self.begun_layers:
            self._begin_load(layer, sources)
        elif sources:
            raise ContractError(
                f"layer {layer}: it was begun ahead of its step, which then takes no row sources"
            )

    def _buffer_is_leaving(self, layer: int) -> bool:
        """Whether the load of `layer` may be queued. It may if its buffer was not used before, or if the scatter of the
        previous layer in that buffer was queued; the load then waits for that scatter.
        """
        return layer < self.prefetch_layers or layer - self.prefetch_layers in self._scattered

    def _begin_load(self, layer: int, sources: Sequence[RowSource]) -> None:
        self._require_one_a_chunk(layer, len(sources), "row sources")
        buffer = self._buffer_of(layer)
        if layer >= self.prefetch_layers:
            self._after_scatter(layer - self.prefetch_layers)
        sources = tuple(sources)
        self._load.run(lambda: self._fill(layer, buffer, sources), "load", layer)
        self._loaded[layer] = self._load.record()

    def _after_scatter(self, layer: int) -> None:
        """Makes the next load wait until layer `layer`, which was in the same buffer before, has been scattered."""
        self._load.wait(self._scattered[layer])

    def _fill(self, layer: int, buffer: Array, sources: Sequence[RowSource]) -> None:
        self._copy_chunks(layer, buffer, [source.copy_to for source in sources])
        self._gaps[layer] = self._gap_rows()

    def _gap_rows(self) -> Array:
        lost, gaps = self._gaps_of_lost
        if lost == len(self._failed):
            return gaps  # reused, because copying the table to a GPU for each layer would delay the caller
        rows = [self._chunks.gaps]
        for number in self._failed:
            at = self._chunks.rows_of(self._chunks.chunks[number])
            rows.append(np.arange(at.start, at.stop, dtype=np.int64))
        self._gaps_of_lost = len(self._failed), self._device.index(np.concatenate(rows))
        return self._gaps_of_lost[1]

    def _process(self, layer: int) -> None:
        if layer not in self._transformed:
            self._begin_transform(layer)
        self._current = layer

    def _begin_transform(self, layer: int) -> None:
        if self._own_scatter is not None:
            self._transformed[layer] = self._loaded[layer]
            return
        buffer = self._buffer_of(layer)
        self._after_load(layer)
        self._compute.run(lambda: self._change(layer, buffer), "transform", layer)
        self._transformed[layer] = self._compute.record()

    def _after_load(self, layer: int) -> None:
        self._compute.wait(self._loaded[layer])

    def _change(self, layer: int, buffer: Array) -> None:
        if self._transform is not None:
            self._transform(layer, buffer[0], self._positions)
        # Zeros the gaps after the transform, which may have rotated old data in them.
        gaps = self._gaps[layer]  # stays in `_gaps`, because a GPU reads it later
        if len(gaps) and self._paged.takes_gaps:
            buffer[:, gaps] = 0

    def _scatter(self, layer: int) -> None:
        buffer = self._buffer_of(layer)
        self._current = None
        self._after_transform(layer)
        edits = self._device.caller_event()
        if edits is not None:
            self._store.wait(edits)
        self._store.run(lambda: self._write(layer, buffer), "scatter", layer)
        self._scattered[layer] = self._store.record()

    def _write(self, layer: int, buffer: Array) -> None:
        if self._own_scatter is not None:
            self._own_scatter(layer, buffer, self._gaps[layer])
        else:
            self._paged.write(layer, self._blocks, self._tokens, buffer)

    def _after_transform(self, layer: int) -> None:
        self._store.wait(self._transformed[layer])
