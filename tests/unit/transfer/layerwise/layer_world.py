"""A small world for tests of the pipelines: random chunks, paged memory, a straightforward reference result, and a
device that runs the work of its streams in any order that their events allow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.transfer.layerwise.base import Event, LayerDevice, RowNumbers, RowPositions, RowSource, Stream
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import PageRows

GENEROUS_S = 60.0


def turn(layer: int, keys: Any, positions: RowPositions) -> None:
    """A stand-in for the rotation of keys. Its result depends on all its arguments, so that tests notice if rows are
    rotated twice or if other bytes are rotated.
    """
    by = (positions.new - positions.old + layer + 1)[:, None, None]
    keys[:] = keys * 3 + by.astype(keys.dtype)


class LayerWorld:
    """A random test case: chunks, paged memory and stored rows. All values are integers, so that results can be
    compared exactly.
    """

    def __init__(self, seed: int, layers: int | None = None, planes: int | None = None) -> None:
        self.random = random.Random(seed)
        chosen = self.random
        self.layers = layers or chosen.randint(1, 12)
        self.planes = planes or chosen.choice([1, 2])
        self.heads, self.width = chosen.choice([(1, 576), (1, 8), (2, 4), (8, 16)])
        self.block_tokens = chosen.choice([1, 2, 16])
        at, chunks = chosen.randint(0, 5), []
        for _ in range(chosen.randint(1, 5)):
            at += chosen.choice([0, 0, 1, 3])
            end = at + chosen.randint(1, 9)
            chunks.append(Chunk(at, end, chosen.choice([None, chosen.randint(0, 100)])))
            at = end
        self.chunks = ChunkSet(chunks)
        self.blocks = -(-self.chunks.rows // self.block_tokens) + chosen.randint(0, 3)
        numbers = np.random.default_rng(seed)
        slots = numbers.permutation(self.blocks * self.block_tokens)[: self.chunks.rows]
        self.slots: RowNumbers = slots.astype(np.int64)
        shape = (self.planes, self.blocks, self.heads, self.block_tokens, self.width)
        # Rows need not be contiguous: heads may come before tokens, as in some engines, or there may be other bytes
        # between rows.
        self.memory = [numbers.integers(-1000, 1000, shape).astype(np.int32) for _ in range(self.layers)]
        order = chosen.choice(["heads first", "tokens first", "padded"])
        self.memory = [
            layer.transpose(0, 1, 3, 2, 4)
            if order == "heads first"
            else np.repeat(layer.transpose(0, 1, 3, 2, 4), 2, 2)[:, :, ::2]
            if order == "padded"
            else np.ascontiguousarray(layer.transpose(0, 1, 3, 2, 4))
            for layer in self.memory
        ]
        self.before = [layer.copy() for layer in self.memory]
        self.paged = PagedLayers([list(layer) for layer in self.memory])
        self.stored = [
            [
                numbers.integers(-1000, 1000, (self.planes, chunk.tokens, self.heads, self.width)).astype(
                    np.int32
                )
                for chunk in self.chunks.chunks
            ]
            for _ in range(self.layers)
        ]

    def sources(self, layer: int) -> list[RowSource]:
        return [PageRows([rows]) for rows in self.stored[layer]]

    def expected(self, failed_from: dict[int, int] | None = None) -> list[NDArray[np.int32]]:
        """Returns the paged memory as it must be after a load: all rows are loaded, rotated, zeroed in gaps and lost
        chunks, and scattered.

        Args:
            failed_from: by the number of a lost chunk, the first layer in which the chunk is lost.
        """
        out = []
        for layer in range(self.layers):
            rows = np.zeros((self.planes, self.chunks.rows, self.heads, self.width), np.int32)
            gaps = list(self.chunks.gaps)
            for number, chunk in enumerate(self.chunks.chunks):
                at = self.chunks.rows_of(chunk)
                rows[:, at] = self.stored[layer][number]
                if failed_from is not None and failed_from.get(number, self.layers) <= layer:
                    gaps += range(at.start, at.stop)
            turn(layer, rows[0], self.chunks.positions())
            rows[:, gaps] = 0
            paged = self.before[layer].copy()
            for row, slot in enumerate(self.slots):
                paged[:, slot // self.block_tokens, slot % self.block_tokens] = rows[:, row]
            out.append(paged)
        return out

    def same(self, expected: list[NDArray[np.int32]]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.memory, expected, strict=True))

    def pipeline(
        self, device: LayerDevice, kind: type[LoadPipeline] = LoadPipeline, prefetch_layers: int = 2
    ) -> LoadPipeline:
        return kind(device, self.paged, self.slots, self.chunks, turn, GENEROUS_S, prefetch_layers)

    def load(self, pipeline: LoadPipeline) -> PipelineReport:
        """Runs a pipeline: calls `next` once, `send` once per layer, and a final `next`, which returns the report."""
        steps = pipeline.run()
        next(steps)
        for layer in range(self.layers):
            steps.send(self.sources(layer))
        report = next(steps)
        steps.close()
        assert report is not None
        return report


class ReorderedEvent(Event):
    """An event that is reached when the device has run all earlier work of the event's stream."""

    def __init__(self, device: ReorderingDevice) -> None:
        self._device = device
        self.reached = False
        self.failure = ""

    def wait(self, deadline_s: float) -> bool:
        self._device.run_until(self)
        return self.reached

    @property
    def error(self) -> str:
        return self.failure


class ReorderedStream(Stream):
    """A stream of the reordering device: a queue with pieces of work, waits for events, and records of events."""

    def __init__(self, device: ReorderingDevice) -> None:
        self._device = device
        self.queue: deque[tuple[str, Any]] = deque()
        self.failure = ""

    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        self.queue.append(("run", (work, stage, layer)))

    def wait(self, event: Event) -> None:
        self.queue.append(("wait", event))

    def record(self) -> Event:
        event = ReorderedEvent(self._device)
        self.queue.append(("record", event))
        return event

    def can_go(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].reached)

    def go(self) -> None:
        kind, what = self.queue.popleft()
        if kind == "wait":
            self.failure = self.failure or what.failure
        elif kind == "record":
            what.failure = self.failure
            what.reached = True
        elif not self.failure:
            work, stage, layer = what
            self._device.ran.append((stage, layer))
            try:
                work()
            except Exception as error:  # a device must store an error of its work, and not raise it
                self.failure = str(error)


class ReorderingDevice(LayerDevice):
    """A device that runs queued work only when the host waits. It then runs the work in a random order, among those
    that the streams' events allow.

    Attributes:
        given: stage and layer of all work, in the order of submission.
        ran: stage and layer of all work, in the order of execution.
        buffers: the requested buffers.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[ReorderedStream] = []
        self.given: list[tuple[str, int]] = []
        self.ran: list[tuple[str, int]] = []
        self.buffers: list[Any] = []

    def stream(self, name: str) -> Stream:
        stream = TracedStream(self)
        self._streams.append(stream)
        return stream

    def run_until(self, event: ReorderedEvent) -> None:
        while not event.reached:
            able = [stream for stream in self._streams if stream.can_go()]
            assert able, "streams wait for each other: a deadlock"
            self._random.choice(able).go()

    def buffer(self, shape: Sequence[int], dtype: Any) -> Any:
        buffer = np.full(shape, 77, dtype)
        self.buffers.append(buffer)
        return buffer

    def index(self, numbers: RowNumbers) -> Any:
        return numbers

    def caller_event(self) -> Event | None:
        return None

    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        return event.wait(deadline_s)


class TracedStream(ReorderedStream):
    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        self._device.given.append((stage, layer))
        super().run(work, stage, layer)
