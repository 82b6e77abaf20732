"""The load pipeline: loads layer i, transforms i-1 and scatters i-2 at the same time, in two or more buffers."""

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
    """Brings the layers of some chunks into paged memory, as a generator of three overlapping stages.

    `run()` expects one `next`, a `send` for each layer in turn (one row source per chunk), and a final `next`, which
    yields the `PipelineReport`. Step i of layers + 2 scatters layer i-2, transforms layer i-1 and starts the load of
    layer i. So when `send` for layer i returns, `get_kv` returns that layer, and layer i-1 is on its way to paged
    memory and may not be changed any more. The schedule is CacheBlend's (LMCache's `batched_to_gpu`), but here the
    stages wait for each other by events and never for the whole device:

        loaded(i) -> transform(i) -> scatter(i) -> load(i + buffers), which uses the same buffer
        the caller's work on its own stream before a step -> scatter of that step

    `prefetch` begins the next layers ahead of their steps, as many as there are free buffers.

    All rows from the first chunk to the last are written; rows in gaps are zeros unless the caller edits them. The rows
    of a failed chunk are gaps from that layer on; other chunks continue. Any other failure ends the pipeline: later
    stages are skipped, and every chunk fails. Closing the generator early waits for work that has begun; with
    `CallerLayers` on a GPU, the caller's stream does.

    A pipeline with its own `scatter` changes keys in the one pass that writes them to paged memory. `get_kv` then has
    nothing to return: callers read and edit a layer in paged memory, after `wait_scattered`.

    With `CallerLayers` nothing is scattered: before the next step, the caller has written the parts of a layer that it
    wants. Rows in gaps and of failed chunks are then undefined: the caller takes only the rows of chunks that are not
    in `failed`.

    Args:
        transform: None leaves keys as they are.
        deadline_s: the longest wait of `get_kv`, `wait_scattered`, the end, and `close`, in seconds.
        prefetch_layers: layers held at once, the current one included, from 2 to 16; each has a buffer.
        scatter: replaces the plain scatter; not allowed together with a transform.

    Raises: see `Pipeline`; ContractError also for a transform and a scatter.
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
        """Number of lost chunks, and the gaps with their rows."""
        self._positions = chunks.positions()

    # --- the generator ---

    def run(self) -> Generator[PipelineReport | None, Sequence[RowSource], None]:
        """See the class. May be run once."""
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
            # The last scatter waited for everything before it, so it carries every failure.
            report = self._report(self._scattered[layers - 1])
            reported = True
            yield report
        finally:
            self._current = None
            if not reported:
                self._end_early()

    @property
    def begun_layers(self) -> int:
        """Layers whose load has begun, in their steps or ahead of them."""
        return len(self._loaded)

    def prefetch(self, take: Callable[[int], Sequence[RowSource]]) -> None:
        """Begins to load and transform the next layers, as many as there are free buffers. Call it between two steps.

        The current layer stays as it is. A layer begun here takes an empty `send` in its step.

        Args:
            take: returns the row sources of a layer, one per chunk.
        """
        while (layer := self.begun_layers) < self.num_layers and self._buffer_is_leaving(layer):
            self._begin_load(layer, take(layer))
            self._begin_transform(layer)

    def get_kv(self, layer: int) -> Array:
        """The layer transformed last, which may be read and edited until the next step.

        Returns:
            Array [planes, rows, heads, head_width], plane 0 the keys.

        Raises:
            ContractError: another layer is current, or none, or the pipeline has its own scatter.
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
        """Makes the caller's next work see layer `layer` in paged memory. Returns False if the deadline passed first.

        Raises:
            ContractError: the step that scatters the layer has not been taken yet.
            PipelineError: it, or what it waited for, failed.
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
        """With `CallerLayers`, a device whose streams wait for each other makes the caller's stream wait, too, and the
        host continues: the last stages may wait for the caller's own work on the device, whose duration is not bounded.
        The caller's next work on its stream comes after all work that was begun, so it may reuse the buffers.
        """
        if not isinstance(self._paged, CallerLayers):
            super()._end_early()
        elif not self.precede_caller(self.deadline_s):
            raise PipelineError(f"a pipeline that was closed still moves bytes after {self.deadline_s:g} s")

    def precede_caller(self, deadline_s: float) -> bool:
        """Makes the caller's next work run after all work that has begun, as `LayerDevice.caller_waits` does. Returns
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
        """Whether the layer's buffer is free, or the scatter of the buffer's previous layer has been queued."""
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
        """Makes the load wait until the buffer's previous layer `layer` has been scattered."""
        self._load.wait(self._scattered[layer])

    def _fill(self, layer: int, buffer: Array, sources: Sequence[RowSource]) -> None:
        self._copy_chunks(layer, buffer, [source.copy_to for source in sources])
        self._gaps[layer] = self._gap_rows()

    def _gap_rows(self) -> Array:
        lost, gaps = self._gaps_of_lost
        if lost == len(self._failed):
            return gaps  # a GPU's copy of a table would delay the caller in each layer
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
        # Comes after the transform, which may have turned old content of these rows.
        gaps = self._gaps[layer]  # kept alive: a GPU reads it later
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
