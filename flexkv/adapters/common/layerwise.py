"""Layerwise loads and stores of a step: the forward waits for each layer of a load when it comes to it, and a layer of
a store is copied once the forward has written it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexkv.adapters.common.base import LoadJob
from flexkv.adapters.common.rank_ops import RankOps
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, TransferGraph

logger = get_logger(__name__)

NOT_WAITED_FOR = "the forward did not wait for every layer"
NOT_FINISHED = "the step's forward did not come to its end"


class LayerLoads:
    """The layerwise loads of one step.

    A load that fails, or does not come before `load.deadline_s`, is not noticed by the forward: what it computes from
    then on is wrong, and `finish` has the blocks named in the step's report. So has a layer that nobody waited for,
    because the forward may have read it too early.

    Attributes:
        busy: loads were begun, and their forward is not over.
    """

    def __init__(self, ops: RankOps, deadline_s: float) -> None:
        self._ops = ops
        self._deadline_s = deadline_s
        self._jobs: list[LoadJob] = []
        self._waited: set[int] = set()
        self._layers = 0
        self._ends_s = 0.0
        self.busy = False

    def begin(self, jobs: Sequence[LoadJob], layers: int) -> None:
        """Loads that were submitted for the forward to come, of KV with so many layers."""
        self._jobs = list(jobs)
        self.busy = bool(jobs)
        self._waited.clear()
        self._layers = layers
        self._ends_s = time.monotonic() + self._deadline_s

    def wait(self, layer: int, stream: int | None = None) -> None:
        """Returns when layer `layer` of all loads is in place, or its blocks will be named.

        Args:
            stream: the engine's, on a device: what it is given next comes after the copies.
        """
        if not 0 <= layer < self._layers:
            return  # of no load
        self._waited.add(layer)
        for job in list(self._jobs):
            if not self._ops.wait_layer(job, layer, self._ends_s, stream):
                self._jobs.remove(job)
                self._ops.finish_load(job)

    def finish(self) -> bool:
        """The forward is over: waits for the end of its loads.

        Returns:
            Whether it had waited for every layer.

        Raises:
            ClosedError: see `RankOps.finish_load`.
        """
        jobs, self._jobs, self.busy = self._jobs, [], False
        asked_for_all = len(self._waited) >= self._layers
        if jobs and not asked_for_all:
            logger.error(
                "%s: it asked for %d of %d; the loads count as failed",
                NOT_WAITED_FOR,
                len(self._waited),
                self._layers,
            )
            for job in jobs:
                self._ops.invalidate(job, NOT_WAITED_FOR)
        for job in jobs:
            self._ops.finish_load(job)
        return asked_for_all


class LayerStores:
    """The gated stores of one step.

    A layer is copied once the forward has left it and all before it; what is left, when the forward is over. So a
    forward that names no layer (the replay of a CUDA graph) stores as it would whole pages.

    Attributes:
        busy: stores were begun, and their forward is not over.
    """

    def __init__(self, ops: RankOps) -> None:
        self._ops = ops
        self._op_ids: list[OpId] = []
        self.busy = False
        self._written: set[int] = set()
        self._open = 0
        self._layers = 0

    def begin(self, graphs: Sequence[TransferGraph], layers: int) -> None:
        """Submits the stores of a forward to come, of KV with so many layers."""
        self._op_ids = [op.op_id for graph in graphs for op in graph.ops]
        self.busy = bool(self._op_ids)
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
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        if op_ids and self._open < self._layers:
            self._ops.open_layers(op_ids, self._layers)

    def abandon(self) -> None:
        """Another step begins. Stores whose forward never ended are given up."""
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        for op_id in op_ids:
            self._ops.give_up(op_id, NOT_FINISHED)
