"""Where the rows of a load come from, layer by layer: pages in host memory, pages on disk."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.transfer.base import DataPlane, Ticket
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import RowSource
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import NoRows, PageRows


@dataclass(frozen=True, slots=True)
class PageInterior:
    """How the rows of one block lie in its stripe, where that is known (an engine's opaque order has none).

    Attributes:
        offsets: of each layer, of each plane (K first): of its first row, bytes from the slot's start.
        shape: (block_tokens, heads, head_width).
        strides: bytes from token to token, head to head, element to element.
    """

    offsets: tuple[tuple[int, ...], ...]
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: np.dtype[Any]

    def planes(self, slot: NDArray[np.uint8], layer: int) -> list[NDArray[Any]]:
        """Views of one layer's planes in a slot's bytes, each [block_tokens, heads, head_width]."""
        return [
            np.ndarray(self.shape, self.dtype, slot.data, offset, self.strides)
            for offset in self.offsets[layer]
        ]


class LayerSource(ABC):
    """Gives the rows of all chunks, one layer after the other."""

    @abstractmethod
    def begin(self, layer: int) -> None:
        """The layer will be taken soon: starts bringing it, and does not wait."""

    @abstractmethod
    def take(self, layer: int) -> Sequence[RowSource]:
        """One row source a chunk; those that will not come are `NoRows`."""


class HostPages(LayerSource):
    """Pages in slots of the host pool.

    Args:
        slots: of each chunk its pages' slots, in order. A chunk starts with a page's first token; its last page may be
            used in part. The slots are leased until the pipeline is over.
    """

    def __init__(self, pool: HostPool, interior: PageInterior, slots: Sequence[Sequence[int]]) -> None:
        self._interior = interior
        self._slots = [[pool.slot(slot) for slot in chunk] for chunk in slots]

    def begin(self, layer: int) -> None:
        """They are there."""

    def take(self, layer: int) -> list[RowSource]:
        return [PageRows([self._interior.planes(slot, layer) for slot in chunk]) for chunk in self._slots]


class DiskPages(LayerSource):
    """Pages that a layerwise DISK_READ brings into slots of the host pool: each layer alone, by its offset.

    The disk lane reads ahead by itself, as far as its ring is deep, and verifies a layer before it counts as read.

    Args:
        ticket: of a graph with that one op. Its pages are those of all chunks, in order.
        slots: as for `HostPages`.
        deadline_s: from now on; what has not come by then is lost, and the slots stay leased until the op's result.
    """

    def __init__(
        self,
        engine: DataPlane,
        ticket: Ticket,
        pool: HostPool,
        interior: PageInterior,
        slots: Sequence[Sequence[int]],
        deadline_s: float = 30.0,
    ) -> None:
        self._engine, self._ticket = engine, ticket
        self._host = HostPages(pool, interior, slots)
        self._first_page = np.cumsum([0, *(len(chunk) for chunk in slots)])
        self._ends_s = time.monotonic() + deadline_s
        self._lost: dict[int, str] = {}

    def begin(self, layer: int) -> None:
        """The op was submitted with all layers."""

    def take(self, layer: int) -> list[RowSource]:
        """Waits for the layer."""
        rows = self._host.take(layer)
        found = self._engine.wait_layer(self._ticket, layer, max(0.0, self._ends_s - time.monotonic()))
        if not found.in_time:
            return [NoRows("it was not read from disk in time") for _ in rows]
        for pages in found.failed.values():
            for chunk in np.unique(np.searchsorted(self._first_page, pages, side="right") - 1):
                own = pages[(pages >= self._first_page[chunk]) & (pages < self._first_page[chunk + 1])]
                numbers = ", ".join(str(page - self._first_page[chunk]) for page in own)
                self._lost.setdefault(int(chunk), f"pages {numbers} of the chunk were not read from disk")
        return [
            NoRows(self._lost[number]) if number in self._lost else row for number, row in enumerate(rows)
        ]


def load_layers(
    pipeline: LoadPipeline, source: LayerSource, prefetch_layers: int | None = None
) -> PipelineReport:
    """Runs a pipeline to its end with what a source gives.

    Args:
        prefetch_layers: how many layers the source is asked for ahead of the one that is taken. None: as many as the
            pipeline holds.
    """
    if prefetch_layers is None:
        prefetch_layers = pipeline.prefetch_layers
    if prefetch_layers < 0:
        raise ContractError(f"prefetch_layers is {prefetch_layers}; it must be at least 0")
    layers, steps = pipeline.num_layers, pipeline.run()
    try:
        next(steps)
        for layer in range(min(prefetch_layers, layers)):
            source.begin(layer)
        for layer in range(layers):
            if layer + prefetch_layers < layers:
                source.begin(layer + prefetch_layers)
            steps.send(source.take(layer))
        report = next(steps)
    finally:
        steps.close()
    assert report is not None, "the last step yields it"
    return report
