"""Supplies a load with rows from pages in host memory, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import RowSource
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.pipeline import PipelineReport
from flexkv.transfer.layerwise.rows import PageRows


@dataclass(frozen=True, slots=True)
class PageInterior:
    """How one block's rows lie in its stripe, if that is known (it is not for an engine's opaque order).

    Attributes:
        offsets: where the first row of each plane (K first) of each layer lies, bytes from the slot's start.
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


class HostPages:
    """Pages in slots of the host pool.

    Args:
        slots: each chunk's slots, in the order of its pages. A chunk starts with a page's first token; its last page
            may be partly used. The caller keeps the slots pinned until the pipeline is over.
    """

    def __init__(self, pool: HostPool, interior: PageInterior, slots: Sequence[Sequence[int]]) -> None:
        self._interior = interior
        self._slots = [[pool.slot(slot) for slot in chunk] for chunk in slots]

    def take(self, layer: int) -> list[RowSource]:
        """One row source per chunk."""
        return [PageRows([self._interior.planes(slot, layer) for slot in chunk]) for chunk in self._slots]


def load_layers(pipeline: LoadPipeline, take: Callable[[int], Sequence[RowSource]]) -> PipelineReport:
    """Runs a pipeline to its end.

    Args:
        take: returns a layer's row sources, one per chunk; `NoRows` for rows that will not arrive.
    """
    steps = pipeline.run()
    try:
        next(steps)
        for layer in range(pipeline.num_layers):
            steps.send(take(layer))
        report = next(steps)
    finally:
        steps.close()
    assert report is not None, "the last step yields it"
    return report
