"""Stores of a step whose layers are copied as its forward writes them, one by one."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.adapters.common.rank_ops import RankOps
from flexkv.transfer.graph import OpId, TransferGraph

NOT_FINISHED = "the step's forward did not come to its end"


class LayerStores:
    """The gated stores of one step.

    A layer is copied once the forward has left it and all before it; what is left, when the forward is over. So a
    forward that says nothing of its layers (the replay of a CUDA graph) stores as it would whole pages.
    """

    def __init__(self, ops: RankOps) -> None:
        self._ops = ops
        self._op_ids: list[OpId] = []
        self._written: set[int] = set()
        self._open = 0
        self._layers = 0

    def begin(self, graphs: Sequence[TransferGraph], layers: int) -> None:
        """Submits the stores of a forward to come, of KV with so many layers."""
        self._op_ids = [op.op_id for graph in graphs for op in graph.ops]
        self._written.clear()
        self._open, self._layers = 0, layers
        for graph in graphs:
            self._ops.submit_store(graph, gated=True)

    def written(self, layer: int) -> None:
        """The forward has been given all that writes this layer's KV."""
        if not self._op_ids:
            return
        self._written.add(layer)
        ready = self._open
        while ready in self._written:
            ready += 1
        if ready > self._open:
            self._open = ready
            self._ops.open_layers(self._op_ids, ready)

    def finish(self) -> None:
        """The forward is over: the layers that nobody named are copied too."""
        op_ids, self._op_ids = self._op_ids, []
        if op_ids and self._open < self._layers:
            self._ops.open_layers(op_ids, self._layers)

    def abandon(self) -> None:
        """Another step begins. Stores whose forward never ended are given up."""
        op_ids, self._op_ids = self._op_ids, []
        for op_id in op_ids:
            self._ops.give_up(op_id, NOT_FINISHED)
