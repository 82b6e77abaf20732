"""Offloads in the order in which the engine gave them, which is the order in which their ends are reported to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.cache.base import Completion, Keys
from flexkv.transfer.graph import BlockIds


@dataclass(slots=True)
class Offload:
    """One tree node on its way to the host tier.

    Attributes:
        stored: every page of it is stored, as far as is known.
        done: nothing of it moves any more.
    """

    request_id: str
    stored: bool = True
    done: bool = False

    def ended(self, done: Completion) -> None:
        self.done = True
        self.stored = self.stored and not len(done.failed_blocks)


class Offloads:
    """First in, first out, because the engine reduces the number of completions over its ranks: a rank that completed
    another offload first would publish the wrong node."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._queue: deque[Offload] = deque()
        self._numbers = count(1)

    def add(self, keys: Keys, blocks: BlockIds, stream: int | None) -> None:
        """Takes a node's pages. What finds no room is not stored, and the offload completes saying so."""
        offload = Offload(f"offload {next(self._numbers)}")
        self._queue.append(offload)
        plan = self._cache.store(offload.request_id, keys, blocks, offload.ended, stream)
        if plan.graph is None:
            offload.done = True
        if plan.dropped:
            offload.stored = False

    def completed(self) -> int:
        """How many from the oldest on have ended."""
        ended = 0
        for offload in self._queue:
            if not offload.done:
                break
            ended += 1
        return ended

    def pop(self) -> bool:
        """Takes the oldest; whether all of it is stored."""
        offload = self._queue.popleft()
        self._cache.manager.release(offload.request_id)
        return offload.stored

    def reset(self) -> None:
        """Forgets all of them. Nothing of them may move any more."""
        while self._queue:
            self.pop()
