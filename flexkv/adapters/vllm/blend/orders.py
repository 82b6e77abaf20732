"""Orders for blending that a step carries to the ranks, and the ranks' reports. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import Tokens
from flexkv.observe import BlendResult

RequestId = str


@dataclass(frozen=True, slots=True, eq=False)
class SegmentOrder:
    """Segments to load for a request before it is scheduled.

    Attributes:
        load: number of the load, because a request's id may be used again for another request.
        caller: see `SegmentCache.begin_load`.
    """

    request: RequestId
    load: int
    segments: tuple[Tokens, ...]
    caller: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """The segments that a rank has loaded for a request, once no more will come.

    Attributes:
        load: see `SegmentOrder`.
        tokens: how many leading tokens of each segment were loaded.
        missing: why cached tokens are missing; MISS if none are.
    """

    load: int
    tokens: tuple[int, ...]
    missing: BlendResult = BlendResult.MISS


@dataclass(frozen=True, slots=True)
class Reuse:
    """The segments that a request reuses, once all ranks have them.

    Attributes:
        spans: position of each segment's first token in the prompt, and the number of its leading tokens that every
            rank has loaded.
        ratio: share of the reused rows that is computed again.
    """

    spans: tuple[tuple[int, int], ...]
    ratio: float

    def covers(self, first: int, end: int) -> bool:
        """Whether some span covers a position from `first` to `end`."""
        return any(max(start, first) < min(start + tokens, end) for start, tokens in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class NewSegment:
    """A prompt that will be kept as a segment.

    Attributes:
        tokens: all its tokens.
        caller: see `SegmentCache.store`.
        number: the number under which every rank reports the outcome, once it has computed the last token.
    """

    tokens: Tokens
    caller: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkOrder:
    """The rows of one request in a step.

    Attributes:
        first: position of its first token in the prompt.
        slots: slot of each of its rows in the engine's pool, int64 [rows]. A rank finds the rows by these slots,
            because the batch's order differs from the schedule's.
        asks: what the rows are for.
    """

    request: RequestId
    first: int
    slots: NDArray[np.int64]
    asks: Reuse | NewSegment


@dataclass(slots=True)
class BlendOrders:
    """One step's orders, carried out in this order before its forward pass.

    Attributes:
        forget: the weights change: no row that is cached, loaded or being captured may be used.
        release: requests whose loaded segments or captured rows are no longer needed.
        load: segments to load.
        chunks: rows of the step's batch.
    """

    forget: bool = False
    release: list[RequestId] = field(default_factory=list)
    load: list[SegmentOrder] = field(default_factory=list)
    chunks: list[ChunkOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.forget or bool(self.release or self.load or self.chunks)
