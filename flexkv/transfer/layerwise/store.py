"""The store pipeline: gathers layer i from paged memory while layer i-1 is copied to its target."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from flexkv.transfer.layerwise.base import Event, LayerDevice, RowNumbers, RowTarget
from flexkv.transfer.layerwise.chunks import ChunkSet
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.pipeline import Pipeline, PipelineReport


class StorePipeline(Pipeline):
    """Copies the layers of some chunks out of paged memory, in two stages: gather and store.

    The caller drives the generator `run()`: one `next`, then per layer one `send` with a row target for each chunk, and
    a final `next`. Each `send` must come after the layer's rows were computed or, on a GPU, after their computation was
    enqueued. The final `next` waits for the last layer and yields the `PipelineReport`. No `send` waits. The stages
    wait for each other in this order:

        the caller's work on its own stream before a send -> gather(i) -> store(i) -> gather(i+2), in the same buffer

    If a target raises `LostRows`, only its chunk fails. Any other failure ends the pipeline, and all chunks fail.
    """

    def __init__(
        self,
        device: LayerDevice,
        paged: PagedLayers,
        slots: RowNumbers,
        chunks: ChunkSet,
        deadline_s: float = 30.0,
    ) -> None:
        super().__init__(device, paged, slots, chunks, deadline_s)
        self._paged = paged
        self._gather, self._store = device.stream("load"), device.stream("store")
        self._gathered: dict[int, Event] = {}
        self._stored: dict[int, Event] = {}

    def run(self) -> Generator[PipelineReport | None, Sequence[RowTarget], None]:
        """Returns the generator that the class describes. May be called once."""
        self._start()
        reported = False
        try:
            for layer in range(self.num_layers):
                self._begin(layer, (yield None))
            yield None
            report = self._report(self._stored[self.num_layers - 1])
            reported = True
            yield report
        finally:
            if not reported:
                self._end_early()

    def _events(self) -> list[Event]:
        return [*self._gathered.values(), *self._stored.values()]

    def _begin(self, layer: int, targets: Sequence[RowTarget]) -> None:
        self._require_one_a_chunk(layer, len(targets), "row targets")
        buffer, copies = self._buffer_of(layer), [target.copy_from for target in targets]
        if layer >= self.prefetch_layers:
            self._after_store(layer - self.prefetch_layers)
        computed = self._device.caller_event()
        if computed is not None:
            self._gather.wait(computed)
        self._gather.run(lambda: self._paged.read(layer, self._blocks, self._tokens, buffer), "gather", layer)
        self._gathered[layer] = self._gather.record()
        self._after_gather(layer)
        self._store.run(lambda: self._copy_chunks(layer, buffer, copies), "store", layer)
        self._stored[layer] = self._store.record()

    def _after_store(self, layer: int) -> None:
        self._gather.wait(self._stored[layer])

    def _after_gather(self, layer: int) -> None:
        self._store.wait(self._gathered[layer])
