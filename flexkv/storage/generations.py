"""Numbers writes by the durable count of opens and a counter. No number is ever used twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flexkv.errors import CapacityError
from flexkv.storage.base import Generations
from flexkv.storage.number_file import read_number, write_number

COUNTER_BITS = 40
"""A trillion writes per open."""

MOST_OPENS = (1 << 24) - 1

OPENS_NAME = "opens"
"""The file with the count of opens, beside the index, which has the count, too."""

OPENS_WITHOUT_A_TRACE = 1024
"""If the file is lost, the count continues this far above the highest count found in index and trailers. The numbers
allow that 16,000 times.
"""


def opens_of(generations: Generations) -> int:
    """The highest count of opens among `generations`, 0 if there are none."""
    return int(generations.max(initial=0)) >> COUNTER_BITS


def write_opens(folder: Path, opens: int) -> None:
    """Makes the count durable. Call it before any generation with this count is handed out.

    Raises:
        OSError: it could not be written.
    """
    write_number(folder / OPENS_NAME, opens)


def read_opens(folder: Path) -> int | None:
    """The count written last, or None; raises as `read_number`."""
    return read_number(folder / OPENS_NAME, MOST_OPENS)


def opens_so_far(written: int | None, others: Iterable[int]) -> int:
    """The highest number of times that the tier may have been opened.

    Args:
        written: what `read_opens` found; None if there is nothing, or it is damaged.
        others: counts in the index, or in the trailers of a group. All may be too low: pages of the latest opens may
            never have reached the disk, and an index that lost its log is an earlier commit's.
    """
    highest = max(others, default=0)
    return highest + OPENS_WITHOUT_A_TRACE if written is None else max(written, highest)


class GenerationCounter:
    """The generations of one open. Raises CapacityError when `opens` or the counter has no number left."""

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
