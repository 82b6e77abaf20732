"""Numbers of writes: the durable count of opens, then a counter. None is ever given twice."""

from __future__ import annotations

import numpy as np

from flexkv.errors import CapacityError
from flexkv.storage.base import Generations

COUNTER_BITS = 40
"""A trillion writes an open."""

MOST_OPENS = (1 << 24) - 1


def opens_of(generations: Generations) -> int:
    """The highest count of opens among `generations`, 0 if there are none."""
    return int(generations.max(initial=0)) >> COUNTER_BITS


class GenerationCounter:
    """Raises: CapacityError: `opens` or the counter has no number left."""

    def __init__(self, opens: int) -> None:
        if not 0 < opens <= MOST_OPENS:
            raise CapacityError(f"a disk tier can be opened {MOST_OPENS} times; this would be number {opens}")
        self._next = (opens << COUNTER_BITS) + 1
        self._end = (opens + 1) << COUNTER_BITS

    def take(self, count: int) -> Generations:
        first = self._next
        if first + count > self._end:
            raise CapacityError("no generation is left: open the disk tier again")
        self._next += count
        return np.arange(first, first + count, dtype=np.uint64)
