"""Row sources of a load whose pages are in host memory."""

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
    """The location of one block's rows in a host slot. It is not available for pages whose byte order only the engine
    knows.

    Attributes:
        offsets: for each layer and each of its planes, K first, the offset of the plane's first row from the slot's
            start, in bytes.
        shape: the shape of a plane: (block_tokens, heads, head_width).
        strides: bytes from one token to the next, from one head to the next, and from one element to the next.
    """

    offsets: tuple[tuple[int, ...], ...]
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    dtype: np.dtype[Any]

    def planes(self, slot: NDArray[np.uint8], layer: int) -> list[NDArray[Any]]:
        """Returns views of one layer's planes in a slot's bytes, each of shape [block_tokens, heads, head_width]."""
        return [
            np.ndarray(self.shape, self.dtype, slot.data, offset, self.strides)
            for offset in self.offsets[layer]
        ]


class HostPages:
    """Makes the row sources of chunks whose pages are in slots of the host pool.

    Args:
        slots: for each chunk the slots of its pages, in the order of the pages. A chunk starts with the first token of
            a page, and may end within its last page. The caller keeps the slots pinned until the pipeline is over.
    """

    def __init__(self, pool: HostPool, interior: PageInterior, slots: Sequence[Sequence[int]]) -> None:
        self._interior = interior
        self._slots = [[pool.slot(slot) for slot in chunk] for chunk in slots]

    def take(self, layer: int) -> list[RowSource]:
        """Returns a layer's row sources, one per chunk."""
        return [PageRows([self._interior.planes(slot, layer) for slot in chunk]) for chunk in self._slots]


def load_layers(pipeline: LoadPipeline, take: Callable[[int], Sequence[RowSource]]) -> PipelineReport:
    """Runs a load pipeline to its end, and returns its report.

    Args:
        take: takes a layer's number, and returns its row sources, one per chunk; `NoRows` for rows that cannot be
            delivered.
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
