"""A set of keys that forgets each key after a few seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import Keys


class KeyMemory:
    """A set of pairs of group and key. It forgets each pair `keep_s` seconds after the pair was added last.

    Args:
        keep_s: seconds for which a pair is remembered.
        most: maximum number of pairs; if it is exceeded, the pairs that were added first are dropped.
        clock: returns seconds and never runs backwards.
    """

    def __init__(self, keep_s: float, most: int, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._most = most
        self._clock = clock
        self._until_s: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, group: int, keys: Keys) -> None:
        until_s = self._clock() + self._keep_s
        for row in keys:
            name = (group, row.tobytes())
            self._until_s.pop(name, None)
            self._until_s[name] = until_s
        while len(self._until_s) > self._most:
            self._until_s.popitem(last=False)

    def holds(self, group: int, key: bytes) -> bool:
        return bool(self._until_s) and self._until_s.get((group, key), -1.0) > self._clock()

    def has(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys are remembered, bool [keys]."""
        if not self._until_s:
            return np.zeros(len(keys), np.bool_)
        now_s = self._clock()
        return np.array([self._until_s.get((group, row.tobytes()), -1.0) > now_s for row in keys], np.bool_)

    def clear(self) -> None:
        self._until_s.clear()
