"""Offloads in the order in which the engine gave them, which is the order in which their ends are reported to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.cache.base import Completion
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds, OpId, TransferGraph


@dataclass(slots=True)
class Offload:
    """One tree node on its way to the host tier, to disk, or a part of it to either.

    Attributes:
        stored: every page of it is stored, as far as is known.
        under_way: its ops that have not ended; None until they are known.
        ended_ops: those that have.
    """

    request_id: str
    stored: bool = True
    under_way: set[OpId] | None = None
    ended_ops: set[OpId] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return self.under_way is not None and not self.under_way

    def began(self, graph: TransferGraph | None) -> None:
        """These are its ops. Some may have ended already: what found no room does at once."""
        self.under_way = {op.op_id for op in graph.ops} - self.ended_ops if graph is not None else set()

    def ended(self, done: Completion) -> None:
        self.ended_ops.add(done.op_id)
        if self.under_way is not None:
            self.under_way.discard(done.op_id)
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
        offload.began(plan.graph)
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
