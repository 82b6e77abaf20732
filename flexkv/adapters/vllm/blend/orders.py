"""The scheduler's orders for blending, which the engine sends to the ranks with each step, and the ranks' reports. All
are picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import Tokens
from flexkv.observe import BlendResult

RequestId = str


@dataclass(frozen=True, slots=True, eq=False)
class SegmentOrder:
    """Orders a rank to load segments for a request that is not scheduled yet.

    Attributes:
        request: the request's id.
        load: number of the load. The request's id does not identify the load, because a later request may have the same
            id.
        segments: the tokens of each segment.
        caller: the caller's namespace. Only segments that were stored for the same caller are found.
    """

    request: RequestId
    load: int
    segments: tuple[Tokens, ...]
    caller: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """Reports which segments a rank has loaded for a request. No further segments will arrive.

    Attributes:
        load: number of the load, from its `SegmentOrder`.
        tokens: for each segment, how many of its leading tokens were loaded.
        missing: why some cached tokens were not loaded; MISS if all cached tokens were loaded.
    """

    load: int
    tokens: tuple[int, ...]
    missing: BlendResult = BlendResult.MISS


@dataclass(frozen=True, slots=True)
class Reuse:
    """The segments that a request reuses, after all ranks have loaded them.

    Attributes:
        spans: for each segment, the position of its first token in the prompt, and how many of its leading tokens all
            ranks have loaded.
        ratio: share of the reused rows that is computed again.
    """

    spans: tuple[tuple[int, int], ...]
    ratio: float

    def covers(self, first: int, end: int) -> bool:
        """Whether a position in [first, end) lies in one of the spans."""
        return any(max(start, first) < min(start + tokens, end) for start, tokens in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class NewSegment:
    """A prompt that is computed completely and stored as a segment.

    Attributes:
        tokens: all tokens of the prompt.
        caller: the caller's namespace. Only requests of the same caller find the segment.
        number: the number under which every rank reports whether it has stored the segment, after the last token has
            been computed.
    """

    tokens: Tokens
    caller: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkOrder:
    """The rows of one blended request in a step.

    Attributes:
        request: the request's id.
        first: the position of the first row's token in the prompt.
        slots: the slot of each row in the engine's pool, int64 [rows]. A rank finds the rows by their slots, because
            the batch's order differs from the schedule's.
        asks: the purpose of the rows: `Reuse` if they reuse cached segments, `NewSegment` if they become a new segment.
    """

    request: RequestId
    first: int
    slots: NDArray[np.int64]
    asks: Reuse | NewSegment


@dataclass(slots=True)
class BlendOrders:
    """One step's orders for blending. A rank executes them before the step's forward pass, in the order of the fields.

    Attributes:
        forget: whether to drop all rows that are cached, loaded or being captured, because the weights change.
        release: requests whose loaded segments or captured rows are no longer needed.
        load: the loads of segments that the rank must start.
        chunks: the rows of blended requests in the step's batch.
    """

    forget: bool = False
    release: list[RequestId] = field(default_factory=list)
    load: list[SegmentOrder] = field(default_factory=list)
    chunks: list[ChunkOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.forget or bool(self.release or self.load or self.chunks)
