"""Arithmetic on the rows of a batch: where a request's rows are, which are kept, and the runs that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.plan import budget_of, rows_to_keep

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one forward pass. Each of the engine's sequences has consecutive rows.

    Attributes:
        starts: first row of each sequence and the number of all rows, int64 [sequences + 1].
        slots: slot of each row in the engine's pool, int64 [rows].
        positions: position of each row in its request, int64 [rows].
    """

    starts: Numbers
    slots: Numbers
    positions: Numbers

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def last(self) -> Numbers:
        """The last row of each sequence, from which the engine may sample."""
        return self.starts[1:][np.diff(self.starts) > 0] - 1

    def place(self, first: int, slots: Numbers) -> int | None:
        """The first row of the sequence that has exactly these slots, from position `first` on; None if none has."""
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
    """Which rows are computed after the check layer: all rows that are not covered, the covered rows that differ most,
    and the last row of each sequence.

    Args:
        reused: for each request its covered rows, and the share of them that is kept.
        difference, run_rows: see `rows_to_keep`, [rows].
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
    """Kept rows as separate sequences: each run of consecutive positions of one request is one. Its rows attend to
    everything up to their own positions, which a kernel's causal mask expresses only if the run has no gap.

    Attributes:
        starts: first kept row of each run and the number of all, int32 [runs + 1].
        lengths: position of each run's last row plus one, int32 [runs].
        sequences: the engine's sequence to which each run belongs, int64 [runs].
    """

    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    sequences: Numbers

    @classmethod
    def of(cls, batch: BatchRows, kept: Numbers) -> Runs:
        """
        Args:
            kept: the kept rows, ascending; at least one.
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
