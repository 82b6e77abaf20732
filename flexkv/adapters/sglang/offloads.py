"""Offloads in the order in which the engine began them; their completions are reported in the same order."""

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
    """The store of one tree node, to the host tier, to disk, or partly to each.

    Attributes:
        stored: every page of the node is stored, as far as is known.
        under_way: number of ops that have not ended.
    """

    request_id: str
    stored: bool = True
    under_way: int = 0

    def ended(self, done: Completion) -> None:
        self.under_way -= 1
        self.stored = self.stored and not len(done.failed_blocks)


class Offloads:
    """A first-in, first-out queue of offloads. The order matters because the engine reduces the number of completions
    over its ranks: a rank that completed another offload first would publish the wrong node."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._queue: deque[Offload] = deque()
        self._numbers = count(1)

    def add(self, keys: Keys, blocks: BlockIds, stream: int | None, ttl_s: int | None = None) -> None:
        """Starts to store a node's pages, which expire after `ttl_s`. If a page finds no room, the offload completes as
        not stored."""
        offload = Offload(f"offload {next(self._numbers)}")
        self._queue.append(offload)
        plan = self._cache.store(offload.request_id, keys, blocks, offload.ended, stream, ttl_s)
        # `ended` is called only in later polls, also for ops that a full queue refused.
        offload.under_way = 0 if plan.graph is None else len(plan.graph.ops)
        offload.stored = not plan.dropped

    def completed(self) -> int:
        """Number of offloads that have ended, from the oldest on without a gap."""
        return sum(1 for _ in takewhile(lambda offload: not offload.under_way, self._queue))

    def pop(self) -> bool:
        """Removes the oldest offload; returns whether all its pages are stored."""
        offload = self._queue.popleft()
        self._cache.manager.release(offload.request_id)
        return offload.stored

    def reset(self) -> None:
        """Removes all offloads. None of their copies may be under way."""
        while self._queue:
            self.pop()
