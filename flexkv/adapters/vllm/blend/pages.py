"""One rank's segments: cached, on their way for requests, or being captured from a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexkv.adapters.vllm.blend.orders import NewSegment, RequestId, Reuse, SegmentOrder
from flexkv.adapters.vllm.blend.rows import Numbers
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import Stretch, TurnedRows
from flexkv.errors import FlexKVError
from flexkv.observe import Counters, get_logger

logger = get_logger(__name__)

Planes = tuple[Any, Any]
"""Keys and values of some rows, tensors [rows, heads, head_dim]."""


class StagedRows:
    """Loaded rows of a request in a batch."""

    def __init__(self, rows: TurnedRows, dtype: Any, device: Any) -> None:
        self._rows, self._dtype, self._device = rows, dtype, device

    def only(self, chosen: Numbers) -> StagedRows:
        """The chosen ones of these rows."""
        return StagedRows(self._rows.only(chosen), self._dtype, self._device)

    def layer(self, layer: int) -> Planes:
        """Keys and values of a layer, the keys turned to the rows' positions."""
        keys, values = self._rows.layer(layer)
        return self._tensor(keys), self._tensor(values)

    def _tensor(self, bits: Any) -> Any:
        return torch.from_numpy(bits).view(self._dtype).to(self._device)


@dataclass(slots=True)
class Capture:
    """A segment whose rows are being computed.

    Attributes:
        planes: keys and values of its tokens, [layers, 2, heads, tokens, head_dim] in host memory.
        done: number of its leading tokens whose rows are captured in every layer.
    """

    planes: Any
    done: int = 0


class BlendPages:
    """
    Args:
        dtype: torch's name of the cache's dtype.
        device: the device of the engine's pool.
    """

    def __init__(
        self, cache: SegmentCache, rotation: KeyRotation, dtype: Any, device: Any, counters: Counters
    ) -> None:
        self.cache, self.rotation = cache, rotation
        self._dtype, self._device = dtype, device
        self._counters = counters
        self._loads: dict[RequestId, SegmentLoad] = {}
        self._coming: dict[RequestId, int] = {}
        """Loads that nobody was told of yet, with their numbers of segments."""
        self._captures: dict[RequestId, Capture] = {}

    # --- loads ---

    def begin_load(self, order: SegmentOrder) -> None:
        """Begins to load what is cached of a request's segments."""
        self._coming[order.request] = len(order.segments)
        try:
            self._loads[order.request] = self.cache.begin_load(order.segments, order.caller)
        except FlexKVError as error:
            logger.warning("segments of a request cannot be loaded: %s", error)

    def take_arrived(self) -> dict[RequestId, tuple[int, ...]]:
        """The loads that have ended since the last call: of each segment, how many leading tokens have arrived."""
        arrived = {}
        for request, segments in list(self._coming.items()):
            load = self._loads.get(request)
            if load is not None and load.moves:
                continue
            tokens = [0] * segments
            if load is not None:
                load.drop_lost()
                self._counters.add("flexkv_blend_lost_segments_total", len(load.lost))
                for hit in load.hits:
                    tokens[hit.segment] = hit.tokens
            arrived[request] = tuple(tokens)
            del self._coming[request]
        return arrived

    def rows(self, request: RequestId, spans: Sequence[tuple[int, int]], first: int, end: int) -> StagedRows:
        """Loaded rows of a request from position `first` to `end`, in the order of its spans.

        Raises:
            KeyError: nothing is loaded for the request.
        """
        hits = {hit.segment: hit for hit in self._loads[request].hits}
        stretches = []
        for segment, (start, tokens) in enumerate(spans):
            low, high = max(start, first), min(start + tokens, end)
            if low < high:
                stretches.append(Stretch(hits[segment], low - start, high - low, low))
        return StagedRows(TurnedRows.of(self.cache, self.rotation, stretches), self._dtype, self._device)

    def holds(self, request: RequestId) -> bool:
        """Whether segments are loaded for the request."""
        return request in self._loads and request not in self._coming

    # --- captures ---

    def begin_capture(self, request: RequestId, asks: NewSegment, first: int) -> bool:
        """Makes room for the rows of a segment from position `first` on. Returns False if earlier rows are missing."""
        if first == 0:
            shape = self.cache.shape
            room = (shape.layers, 2, shape.heads, len(asks.tokens), shape.head_dim)
            self._captures[request] = Capture(torch.empty(room, dtype=self._dtype))
        capture = self._captures.get(request)
        return capture is not None and capture.done == first

    def capture(self, request: RequestId, layer: int, first: int, planes: Planes) -> None:
        """Takes a layer's fresh keys and values of consecutive rows from position `first` on."""
        room = self._captures[request].planes
        end = min(first + len(planes[0]), room.shape[3])
        for plane, rows in enumerate(planes):
            room[layer, plane, :, first:end] = rows[: end - first].transpose(0, 1)

    def end_capture(self, request: RequestId, asks: NewSegment, end: int) -> None:
        """Called when all layers' rows before position `end` are captured: stores a segment that is whole."""
        capture = self._captures[request]
        capture.done = end
        if end < len(asks.tokens):
            return
        del self._captures[request]
        planes = capture.planes
        try:
            self.cache.store(
                asks.tokens,
                lambda layer: (planes[layer, 0], planes[layer, 1]),
                self.rotation,
                caller=asks.caller,
            )
        except FlexKVError as error:
            logger.warning("a segment of %d tokens is not kept: %s", len(asks.tokens), error)

    # --- ends ---

    def release(self, request: RequestId) -> None:
        """Forgets a request's loaded segments and captured rows. Does not wait for pages on their way."""
        self._coming.pop(request, None)
        self._captures.pop(request, None)
        if (load := self._loads.pop(request, None)) is not None:
            load.abandon()

    def forget(self) -> None:
        """Forgets everything, because the weights change."""
        for request in [*self._loads, *self._captures]:
            self.release(request)
        self.cache.forget()

    def close(self) -> None:
        for load in self._loads.values():
            load.abandon()
        self._loads.clear()
        self.cache.close()


def segment_rows(spans: Sequence[tuple[int, int]], first: int, end: int) -> Numbers:
    """The positions from `first` to `end` that spans cover, less `first`, in the order of `BlendPages.rows`."""
    parts = [np.arange(max(start, first), min(start + tokens, end)) for start, tokens in spans]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64) - first


def has_rows(asks: Reuse, first: int, end: int) -> bool:
    """Whether some span covers a position from `first` to `end`."""
    return any(max(start, first) < min(start + tokens, end) for start, tokens in asks.spans)
