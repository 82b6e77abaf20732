"""Stores nodes of the engine's radix tree; such an operation is called an offload. Offloads are reported as completed
in the order in which they began."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count, takewhile

from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.cache.base import Completion
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds


@dataclass(slots=True)
class Offload:
    """The operation that stores one node of the engine's radix tree.

    Attributes:
        request_id: the offload's id in the manager.
        stored: whether every page of the node is stored, as far as is known.
        in_flight: number of ops that have not finished.
    """

    request_id: str
    stored: bool = True
    in_flight: int = 0

    def ended(self, done: Completion) -> None:
        self.in_flight -= 1
        self.stored = self.stored and not len(done.failed_blocks)


class Offloads:
    """A first-in, first-out queue of offloads. The order matters because the ranks agree only on the number of
    completed offloads: if one rank completed its offloads in a different order, the engine would publish the wrong
    node."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._queue: deque[Offload] = deque()
        self._numbers = count(1)

    def add(self, keys: Keys, blocks: BlockIds, stream: int | None, ttl_s: int | None = None) -> None:
        """Starts to store a node's pages. If a page gets no slot, the offload completes as not stored.

        Args:
            stream: the copies start after the work that is enqueued on this stream so far; None for the engine's
                stream.
            ttl_s: seconds after which the pages expire; None if they do not.
        """
        offload = Offload(f"offload {next(self._numbers)}")
        self._queue.append(offload)
        plan = self._cache.store(offload.request_id, keys, blocks, offload.ended, stream, ttl_s)
        # The number of ops may be set after `store` returns, because `ended` is called only in later polls, even for
        # ops that were refused because a queue was full.
        offload.in_flight = 0 if plan.graph is None else len(plan.graph.ops)
        offload.stored = not plan.dropped

    def completed(self) -> int:
        """Number of finished offloads at the head of the queue, before the first unfinished one."""
        return sum(1 for _ in takewhile(lambda offload: not offload.in_flight, self._queue))

    def pop(self) -> bool:
        """Removes the oldest offload, and returns whether all its pages are stored."""
        offload = self._queue.popleft()
        self._cache.manager.release(offload.request_id)
        return offload.stored

    def reset(self) -> None:
        """Removes all offloads. Precondition: none of their copies is in flight."""
        while self._queue:
            self.pop()
