"""Gives each page write a number, its generation, which is never used again: the durable count of the tier's openings,
followed by a counter.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flexkv.errors import CapacityError
from flexkv.storage.base import Generations
from flexkv.storage.number_file import read_number, write_number

COUNTER_BITS = 40
"""The number of lower bits of a generation. They count writes, up to a trillion per opening. The higher bits are the
count of openings.
"""

MOST_OPENS = (1 << 24) - 1

OPENS_NAME = "opens"
"""The name of the file with the count of openings. The index beside it contains the count, too."""

OPENS_WITHOUT_A_TRACE = 1024
"""If the file with the count is lost, the count continues this far above the highest count found in index and trailers,
because later openings may have left no trace there. The 24 bits of the count allow for 16,000 such losses.
"""


def opens_of(generations: Generations) -> int:
    """The highest count of openings in `generations`; 0 if there are none."""
    return int(generations.max(initial=0)) >> COUNTER_BITS


def write_opens(folder: Path, opens: int) -> None:
    """Makes the count of openings durable. Call this before any generation with this count is used.

    Raises:
        OSError: the file could not be written.
    """
    write_number(folder / OPENS_NAME, opens)


def read_opens(folder: Path) -> int | None:
    """Returns the count of openings that was written last; None if the file does not exist. Raises what `read_number`
    raises.
    """
    return read_number(folder / OPENS_NAME, MOST_OPENS)


def opens_so_far(written: int | None, others: Iterable[int]) -> int:
    """An upper bound on the number of the tier's openings.

    Args:
        written: the count in the file; None if the file is missing or damaged.
        others: counts in the index and in trailers. All of them may be too low: pages of the latest openings may never
            have reached the disk, and an index that lost its log has the count of an earlier commit.
    """
    highest = max(others, default=0)
    return highest + OPENS_WITHOUT_A_TRACE if written is None else max(written, highest)


class GenerationCounter:
    """Gives out the generations of one opening of the tier.

    Raises:
        CapacityError: the count of openings or the counter has no number left.
    """

    def __init__(self, opens: int) -> None:
        if not 0 < opens <= MOST_OPENS:
            raise CapacityError(
                f"a disk tier can be opened {MOST_OPENS} times; this would be number {opens}: begin with an empty one "
                "(flexkv disk drop)"
            )
        self._next = (opens << COUNTER_BITS) + 1
        self._end = (opens + 1) << COUNTER_BITS

    def take(self, count: int) -> Generations:
        first = self._next
        if first + count > self._end:
            raise CapacityError("no generation is left: open the disk tier again")
        self._next += count
        return np.arange(first, first + count, dtype=np.uint64)
