"""Collective operations of an engine's ranks: of one rank in this process, or of two ranks over a pipe."""

from __future__ import annotations

import pickle
from typing import Any, Protocol

LONG_S = 120.0
"""Seconds after which an executor that is still busy counts as stuck."""


class Group(Protocol):
    """Collective operations of an engine's ranks."""

    rank: int

    def broadcast(self, value: Any) -> Any: ...
    def allgather(self, value: Any) -> list[Any]: ...


class Alone:
    """The group of a single rank. Objects that are broadcast are pickled, as they would be between processes."""

    rank = 0

    def broadcast(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def allgather(self, value: Any) -> list[Any]:
        return [value]


class Pair:
    """A group of two ranks in two processes that are connected by a pipe."""

    def __init__(self, rank: int, pipe: Any) -> None:
        self.rank = rank
        self._pipe = pipe

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._pipe.send(value)
            return value
        return self._take()

    def allgather(self, value: Any) -> list[Any]:
        self._pipe.send(value)
        other = self._take()
        return [value, other] if self.rank == 0 else [other, value]

    def _take(self) -> Any:
        assert self._pipe.poll(LONG_S), "the other rank says nothing"
        return self._pipe.recv()
