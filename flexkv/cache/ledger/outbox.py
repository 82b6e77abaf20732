"""The queue of tiers' own ops that were planned but not submitted yet."""

from __future__ import annotations

from flexkv.cache.base import TierId
from flexkv.transfer.graph import OpId, TransferGraph, TransferOp


class Outbox:
    """A queue of planned graphs, in the order in which they were planned and are submitted."""

    def __init__(self) -> None:
        self._graphs: list[tuple[TierId, TransferGraph]] = []

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def op_ids(self) -> set[OpId]:
        """The numbers of all ops in the queue."""
        return {op.op_id for _, graph in self._graphs for op in graph.ops}

    def put(self, tier: TierId, op: TransferOp) -> None:
        self._graphs.append((tier, TransferGraph((op,))))

    def take(self) -> list[tuple[TierId, TransferGraph]]:
        """Removes and returns all graphs in the queue, with their tiers."""
        graphs, self._graphs = self._graphs, []
        return graphs
