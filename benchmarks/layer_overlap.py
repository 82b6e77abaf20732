"""Measures how well layerwise loads overlap with compute. Each of 32 layers has a real copy and a real matrix product.
The copies and the products are timed alone and together.

`blocks` moves pages from host memory to an engine's blocks with a layerwise op, and waits for each layer before the
layer's product, as vLLM's forward pass does. `pipeline` is the load pipeline of docs/layerwise.md: it copies pages to
buffers, changes every key, and copies the buffers to paged memory; the product of a layer starts when that layer is in
paged memory. `plain` shows what the machine allows: a thread copies the same bytes as `blocks` with memcpy, while
another thread makes the products. The size of a product is chosen so that 32 products take about as long as the copies
alone. Each round times the copies alone, then the products alone, then both together. The matrix products run on one
thread.

    python -m benchmarks.layer_overlap [--rounds 9] [--json out/layer_overlap.json] [--check]
"""

from __future__ import annotations

import os

from benchmarks.arguments import at_least_one

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from flexkv import c_ext
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import RowPositions
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.sources import HostPages, PageInterior

LAYERS, BLOCKS, TOKENS, HEADS, WIDTH = 32, 32, 128, 8, 64
PLANE_BYTES = TOKENS * HEADS * WIDTH * 4
LAYER_BYTES = 2 * PLANE_BYTES
DEADLINE_S = 60.0
TOTAL_OVER_LARGER_MAX = 1.25


@dataclass(frozen=True, slots=True)
class Round:
    """One round: seconds of the copies alone, of the products alone, and of both together."""

    copies_s: float
    products_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        return self.together_s / max(self.copies_s, self.products_s)


class Products:
    """One matrix product per layer."""

    def __init__(self, size: int) -> None:
        numbers = np.random.default_rng(0)
        self.left, self.right = (numbers.random((size, size), np.float32) for _ in range(2))
        self.out = np.empty_like(self.left)

    def __call__(self) -> None:
        np.matmul(self.left, self.right, out=self.out)

    @classmethod
    def taking(cls, seconds: float) -> Products:
        """Returns products of matrices so large that each product takes about `seconds`."""
        size = 256
        for _ in range(4):
            products = cls(size)
            products()
            once = statistics.median(_timed(products) for _ in range(9))
            size = max(32, round(size * (seconds / once) ** (1 / 3)))
        return cls(size)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Pages:
    """Host memory with BLOCKS pages, and an engine's paged memory of the same size: float32, layer-first, with K and V
    in separate planes.
    """

    def __init__(self) -> None:
        image = LAYERS * LAYER_BYTES
        self.pool = HostPool(image, BLOCKS)
        if not self.pool.wait_ready(BLOCKS, DEADLINE_S):
            raise SystemExit(f"no host memory: {self.pool.stopped_reason}")
        for slot in range(BLOCKS):
            self.pool.slot(slot)[:] = slot
        self.memory = np.zeros((LAYERS, 2, BLOCKS, TOKENS, HEADS, WIDTH), np.float32)
        self.order = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)


class Way(ABC):
    """A method that loads pages into paged memory, layer by layer."""

    @abstractmethod
    def run(self, after_layer: Callable[[], None] | None) -> None:
        """Loads all layers, and calls `after_layer` each time a layer is in paged memory."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads of this method."""


class PlainThread(Way):
    """Loads with a thread that copies one layer after the other with memcpy."""

    def __init__(self, pages: Pages) -> None:
        self.sources = [pages.pool.slot(slot).ctypes.data for slot in range(BLOCKS)]
        self.memory = pages.memory

    def run(self, after_layer: Callable[[], None] | None) -> None:
        there = [threading.Event() for _ in range(LAYERS)]

        def copy() -> None:
            for layer, event in enumerate(there):
                to = self.memory[layer].ctypes.data
                for block, source in enumerate(self.sources):
                    ctypes.memmove(to + block * LAYER_BYTES, source + layer * LAYER_BYTES, LAYER_BYTES)
                event.set()

        thread = threading.Thread(target=copy)
        thread.start()
        for event in there:
            assert event.wait(DEADLINE_S)
            if after_layer is not None:
                after_layer()
        thread.join()

    def close(self) -> None:
        """Does nothing, because each run ends its own thread."""


class IntoBlocks(Way):
    """Loads with a layerwise op from host pages to the engine's blocks."""

    def __init__(self, pages: Pages) -> None:
        rows = [
            [
                pages.memory[layer, plane].ctypes.data,
                PLANE_BYTES,
                PLANE_BYTES,
                (2 * layer + plane) * PLANE_BYTES,
                layer,
            ]
            for layer in range(LAYERS)
            for plane in range(2)
        ]
        view = c_ext.KvView(np.array(rows, np.int64), BLOCKS, LAYERS * LAYER_BYTES)
        self.pages = pages
        self.engine = TransferEngine()
        self.engine.attach_view(0, view, pages.pool, owners=[pages.memory])
        self.numbers = count(1)

    def run(self, after_layer: Callable[[], None] | None) -> None:
        slots = np.arange(BLOCKS, dtype=np.int32)
        op = TransferOp(
            OpId(next(self.numbers)), OpKind.H2D, 0, Priority.LOAD, self.pages.order, slots, layerwise=True
        )
        ticket = self.engine.submit(TransferGraph((op,)))
        assert ticket is not None
        for layer in range(LAYERS):
            assert self.engine.wait_layer(ticket, layer, DEADLINE_S).ok
            if after_layer is not None:
                after_layer()
        assert self.engine.wait(ticket, DEADLINE_S)
        self.engine.poll()

    def close(self) -> None:
        assert self.engine.close(DEADLINE_S)


class ThroughBuffers(Way):
    """Loads with the load pipeline, from host pages to token slots in a different order."""

    def __init__(self, pages: Pages) -> None:
        offsets = tuple(((2 * n) * PLANE_BYTES, (2 * n + 1) * PLANE_BYTES) for n in range(LAYERS))
        strides = (HEADS * WIDTH * 4, WIDTH * 4, 4)
        interior = PageInterior(offsets, (TOKENS, HEADS, WIDTH), strides, np.dtype(np.float32))
        self.source = HostPages(pages.pool, interior, [list(range(BLOCKS))])
        self.paged = PagedLayers([list(layer) for layer in pages.memory])
        tokens = np.arange(TOKENS, dtype=np.int64)
        self.slots = (pages.order[:, None].astype(np.int64) * TOKENS + tokens).reshape(-1)
        self.chunks = ChunkSet([Chunk(0, BLOCKS * TOKENS)])
        self.device = HostDevice()

    def run(self, after_layer: Callable[[], None] | None) -> None:
        def change(layer: int, keys: Any, positions: RowPositions) -> None:
            np.negative(keys, out=keys)

        pipeline = LoadPipeline(self.device, self.paged, self.slots, self.chunks, change, DEADLINE_S)
        steps = pipeline.run()
        next(steps)
        sent, report = 0, None
        for layer in range(LAYERS):
            # Starts loading the next layers before it waits for layer `layer`.
            for ahead in range(sent, min(layer + 1 + pipeline.prefetch_layers, LAYERS)):
                steps.send(self.source.take(ahead))
                sent = ahead + 1
            if layer + 1 < LAYERS:
                assert pipeline.wait_scattered(layer)
            else:
                report = next(steps)
            if after_layer is not None:
                after_layer()
        assert report is not None
        assert not report.failed

    def close(self) -> None:
        assert self.device.close(DEADLINE_S)


def measure(way: Way, rounds: int) -> list[Round]:
    """Runs the rounds, and returns all rounds except the first, which is a warm-up."""
    way.run(None)
    products = Products.taking(statistics.median(_timed(lambda: way.run(None)) for _ in range(5)) / LAYERS)

    def multiply() -> None:
        for _ in range(LAYERS):
            products()

    return [
        Round(_timed(lambda: way.run(None)), _timed(multiply), _timed(lambda: way.run(products)))
        for _ in range(rounds + 1)
    ][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a ratio is above its limit")
    arguments = parser.parse_args()
    pages = Pages()
    found: dict[str, dict[str, float]] = {}
    ways: dict[str, type[IntoBlocks | ThroughBuffers | PlainThread]] = {
        "plain": PlainThread,
        "blocks": IntoBlocks,
        "pipeline": ThroughBuffers,
    }
    for name, make in ways.items():
        way = make(pages)
        rounds = measure(way, arguments.rounds)
        way.close()
        found[name] = {
            "copies_ms": 1e3 * statistics.median(r.copies_s for r in rounds),
            "products_ms": 1e3 * statistics.median(r.products_s for r in rounds),
            "together_ms": 1e3 * statistics.median(r.together_s for r in rounds),
            "total_over_larger": statistics.median(r.ratio for r in rounds),
            "total_over_larger_least": min(r.ratio for r in rounds),
        }
        print(
            f"{name:9} copies {found[name]['copies_ms']:7.1f} ms   products {found[name]['products_ms']:7.1f} ms   "
            f"together {found[name]['together_ms']:7.1f} ms   total / larger "
            f"{found[name]['total_over_larger']:.2f} (least {found[name]['total_over_larger_least']:.2f}"
            + (")" if name == "plain" else f", reach <= {TOTAL_OVER_LARGER_MAX:g})")
        )
    cpus = len(os.sched_getaffinity(0))
    print(f"{LAYERS} layers of {BLOCKS * LAYER_BYTES >> 20} MiB, {cpus} CPUs, load {os.getloadavg()[0]:.1f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"load": os.getloadavg()[0], "cpus": cpus, "ways": found}, indent=1)
        )
    met = all(
        way["total_over_larger"] <= TOTAL_OVER_LARGER_MAX for name, way in found.items() if name != "plain"
    )
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
