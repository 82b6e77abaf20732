"""Which rows of a range of tokens are covered by cached chunks, and which are gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import RowNumbers, RowPositions


@dataclass(frozen=True, slots=True)
class Chunk:
    """Cached tokens [start, end) of a sequence. A chunk arrives as a whole or fails as a whole.

    Attributes:
        old_start: the position at which its first token was computed. None: at `start`.
    """

    start: int
    end: int
    old_start: int | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


class ChunkSet:
    """Chunks of one sequence, ascending, with gaps between them; row 0 is the first chunk's start.

    Attributes:
        first: position of row 0.
        rows: number of rows from the first chunk's start to the last one's end, gaps included.
        gaps: rows that no chunk covers, int64 ascending.

    Raises:
        ContractError: no chunks, an empty one, or two that overlap or do not ascend.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            raise ContractError("a pipeline needs at least one chunk")
        at = 0
        for chunk in chunks:
            if chunk.start < at or chunk.end <= chunk.start:
                raise ContractError(
                    f"chunk [{chunk.start}, {chunk.end}) after position {at}: chunks ascend, are apart and not empty"
                )
            at = chunk.end
        self.chunks = tuple(chunks)
        self.first = chunks[0].start
        self.rows = at - self.first
        covered = np.zeros(self.rows, dtype=bool)
        old = np.zeros(self.rows, dtype=np.int64)
        for chunk in chunks:
            rows = self.rows_of(chunk)
            covered[rows] = True
            begin = chunk.start if chunk.old_start is None else chunk.old_start
            old[rows] = np.arange(begin, begin + chunk.tokens)
        self.gaps: RowNumbers = np.flatnonzero(~covered).astype(np.int64)
        self._old = old

    def rows_of(self, chunk: Chunk) -> slice:
        return slice(chunk.start - self.first, chunk.end - self.first)

    def positions(self) -> RowPositions:
        """Old and new position of every row."""
        return RowPositions(self._old, np.arange(self.first, self.first + self.rows, dtype=np.int64))
