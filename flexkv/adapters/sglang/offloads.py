"""Offloads in the order in which the engine began them; their completions are reported in the same order."""

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
    """The store of one tree node, to the host tier, to disk, or partly to each.

    Attributes:
        stored: every page of the node is stored, as far as is known.
        under_way: ops that have not ended; None until the ops are known.
        ended_ops: ops that have ended.
    """

    request_id: str
    stored: bool = True
    under_way: set[OpId] | None = None
    ended_ops: set[OpId] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Whether all its copies have ended."""
        return self.under_way is not None and not self.under_way

    def began(self, graph: TransferGraph | None) -> None:
        """Takes the ops of the offload. Some may have ended already, such as those that a full queue refused."""
        self.under_way = {op.op_id for op in graph.ops} - self.ended_ops if graph is not None else set()

    def ended(self, done: Completion) -> None:
        self.ended_ops.add(done.op_id)
        if self.under_way is not None:
            self.under_way.discard(done.op_id)
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
        offload.began(plan.graph)
        if plan.dropped:
            offload.stored = False

    def completed(self) -> int:
        """Number of offloads that have ended, from the oldest on without a gap."""
        ended = 0
        for offload in self._queue:
            if not offload.done:
                break
            ended += 1
        return ended

    def pop(self) -> bool:
        """Removes the oldest offload; returns whether all its pages are stored."""
        offload = self._queue.popleft()
        self._cache.manager.release(offload.request_id)
        return offload.stored

    def reset(self) -> None:
        """Removes all offloads. None of their copies may be under way."""
        while self._queue:
            self.pop()
