"""Arithmetic on the rows of a batch: where a request's rows are, which rows later layers compute, and how these rows
are divided into runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.plan import budget_of, rows_to_keep

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one forward pass, one per token. Each of the engine's sequences has consecutive rows.

    Attributes:
        starts: the first row of each sequence, followed by the number of all rows, int64 [sequences + 1].
        slots: the slot of each row in the engine's pool, int64 [rows].
        positions: the position of each row's token in its request, int64 [rows].
    """

    starts: Numbers
    slots: Numbers
    positions: Numbers

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def last(self) -> Numbers:
        """The last row of each sequence, from whose output the engine may sample."""
        return self.starts[1:][np.diff(self.starts) > 0] - 1

    def place(self, first: int, slots: Numbers) -> int | None:
        """Returns the first row of the sequence that begins at position `first` and has exactly these slots; None if
        there is no such sequence."""
        if not len(slots):
            return None
        for row in np.flatnonzero(self.slots == slots[0]).tolist():
            sequence = int(np.searchsorted(self.starts, row, side="right")) - 1
            end = int(self.starts[sequence + 1])
            if (
                row == self.starts[sequence]
                and np.array_equal(self.slots[row:end], slots)
                and self.positions[row] == first
            ):
                return row
        return None


def kept_rows(
    batch: BatchRows,
    reused: Sequence[tuple[Numbers, float]],
    difference: NDArray[np.float64],
    run_rows: int = 1,
) -> NDArray[np.bool_]:
    """Returns which rows the layers after the check layer compute, bool [rows]. These are all rows that have no cached
    row, the rows that differ most from their cached rows, and the last row of each sequence.

    Args:
        reused: for each request, the rows that have cached rows, and the share of them that is computed.
        difference: for each row with a cached row, the squared distance between its cached and fresh keys, [rows].
        run_rows: how many adjacent rows are chosen together; see `rows_to_keep`.
    """
    keep = np.ones(batch.rows, np.bool_)
    for rows, ratio in reused:
        covered = np.zeros(batch.rows, np.bool_)
        covered[rows] = True
        chosen = np.zeros(batch.rows, np.bool_)
        chosen[rows_to_keep(difference, covered, budget_of(ratio, len(rows)), run_rows)] = True
        keep[rows] = chosen[rows]
    keep[batch.last] = True
    return keep


@dataclass(frozen=True, slots=True)
class Runs:
    """The kept rows, divided into runs. A run consists of kept rows at consecutive positions of one request, and is a
    sequence of its own for the attention kernel. Its rows attend to all tokens up to their own positions. A kernel's
    causal mask can express this only for rows without gaps.

    Attributes:
        starts: the index of each run's first row among the kept rows, followed by the number of kept rows, int32
            [runs + 1].
        lengths: the position of each run's last row, plus one, int32 [runs].
        sequences: the number of the engine's sequence to which each run belongs, int64 [runs].
    """

    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    sequences: Numbers

    @classmethod
    def of(cls, batch: BatchRows, kept: Numbers) -> Runs:
        """Divides the kept rows of a batch into runs.

        Args:
            kept: the numbers of the kept rows, ascending; at least one.
        """
        positions = batch.positions[kept]
        sequences = np.searchsorted(batch.starts, kept, side="right") - 1
        broken = (np.diff(positions) != 1) | (np.diff(sequences) != 0)
        begin = np.flatnonzero(np.concatenate(([True], broken)))
        ends = np.append(begin[1:], len(kept))
        return cls(
            np.append(begin, len(kept)).astype(np.int32),
            (positions[ends - 1] + 1).astype(np.int32),
            sequences[begin],
        )
