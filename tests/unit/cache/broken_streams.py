"""Broken managers, each of which breaks one rule for pages that are promised while they are read from disk. The
simulation must catch every one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import NO_READS, OpResult, TransferGraph
from tests.unit.cache.broken_managers import IndexProxy, rank_op


class LoadsWithoutWaiting(LocalCacheManager):
    """A broken manager whose loads do not wait for pages that are still being read from disk."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        if graph is None:
            return None
        return TransferGraph(tuple(replace(op, reads=NO_READS) for op in graph.ops), graph.edges)


class WaitsForAnEarlierRead(LocalCacheManager):
    """A broken manager that makes a load wait for an earlier read of the same slot, so that the load may copy the wrong
    bytes.
    """

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        if graph is None:
            return None
        earlier = getattr(self, "_earlier", {})
        ops = []
        for op in graph.ops:
            before = [earlier.get((op.group, slot), 0) for slot in op.slots.tolist()]
            for slot, read in zip(op.slots.tolist(), op.reads.tolist(), strict=False):
                earlier[op.group, slot] = read
            ops.append(replace(op, reads=np.where(before, before, op.reads) if len(op.reads) else NO_READS))
        self._earlier = earlier
        return TransferGraph(tuple(ops), graph.edges)


class PromisesWhatStoresFill(LocalCacheManager):
    """A broken manager that also promises blocks that a store in flight is filling, although the store may never be
    published.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = self.hub.presence

        def insert(group: int, keys: Any, most: int, filler: int = 1 << 40, **more: Any) -> Any:
            return index.insert(group, keys, most, filler, **more)

        self.hub.presence = IndexProxy(index, insert=insert)  # type: ignore[assignment]


class ReusesSlotsThatLoadsWaitFor(LocalCacheManager):
    """A broken manager that lets pages that are being read for a load be evicted before the load."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        for op in graph.ops if graph is not None else ():
            inflight = rank_op(self, op.op_id)
            if inflight.coming is not None:
                self.hub.index.unpin(inflight.entries[inflight.coming])
                inflight.entries = inflight.entries.copy()
        return graph

    def complete(self, rank: int, result: OpResult) -> Any:
        op = rank_op(self, result.op_id)
        if op.coming is not None and len(op.reported) + 1 == self._limits.ranks:
            self.hub.index.pin_coming(op.entries[op.coming])
        return super().complete(rank, result)


BROKEN_STREAMS = [
    LoadsWithoutWaiting,
    WaitsForAnEarlierRead,
    PromisesWhatStoresFill,
    ReusesSlotsThatLoadsWaitFor,
]
