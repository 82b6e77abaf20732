"""Divides a range of tokens into rows that cached chunks cover and rows that are gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexkv.errors import ContractError
from flexkv.transfer.layerwise.base import RowNumbers, RowPositions


@dataclass(frozen=True, slots=True)
class Chunk:
    """The cached tokens [start, end) of a sequence. Either all rows of a chunk arrive, or the chunk fails.

    Attributes:
        start, end: the tokens' positions in the sequence.
        old_start: the position at which the first token's KV was computed; None if it was computed at `start`.
    """

    start: int
    end: int
    old_start: int | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


class ChunkSet:
    """The chunks of one sequence in ascending order, with or without gaps between them. Row 0 is the first token of the
    first chunk.

    Attributes:
        first: the position of row 0 in the sequence.
        rows: number of rows from the first chunk's start to the last chunk's end, including the gaps.
        gaps: numbers of the rows that no chunk covers, int64 ascending.

    Raises:
        ContractError: there are no chunks, a chunk is empty, or two chunks overlap or do not ascend.
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
        """Returns for every row the position at which it was computed, and the position at which it will be used."""
        return RowPositions(self._old, np.arange(self.first, self.first + self.rows, dtype=np.int64))
