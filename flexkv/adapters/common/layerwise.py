"""Layerwise loads and stores of a step: the forward waits for each layer of a load just before it reads the layer, and
each layer of a store is copied once the forward has written it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.rank_ops import RankOps
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, TransferGraph

logger = get_logger(__name__)

NOT_WAITED_FOR = "the forward did not wait for every layer"
NOT_FINISHED = "the step's forward did not come to its end"


class LayerLoads:
    """The layerwise loads of one step.

    The forward does not notice a load that fails or misses `load.deadline_s`: whatever it computes from then on is
    wrong, and `finish` puts the blocks into the step's report. If the forward did not wait for every layer, `finish`
    fails all of the step's loads, because the forward may have read a layer too early.

    Attributes:
        busy: loads have begun, and their forward is not over.
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
        """Takes the loads that were submitted for the next forward. `layers` is the number of layers of the KV."""
        self._jobs = list(jobs)
        self.busy = bool(jobs)
        self._waited.clear()
        self._layers = layers
        self._ends_s = time.monotonic() + self._deadline_s

    def wait(self, layer: int, stream: int | None = None) -> None:
        """Returns once layer `layer` of every load is in place, or blocks without it are due to be reported as failed.

        Args:
            stream: the engine's stream, on a device: work enqueued there from now on starts after the copies.
        """
        if not 0 <= layer < self._layers:
            return  # no load has such a layer
        self._waited.add(layer)
        for job in list(self._jobs):
            if not self._ops.wait_layer(job, layer, self._ends_s, stream):
                self._jobs.remove(job)
                self._ops.finish_load(job)

    def finish(self) -> bool:
        """Called when the forward is over: waits until its loads have ended.

        Returns:
            Whether the forward has waited for every layer.

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

    A layer is copied once the forward has written it and all layers before it; the remaining layers are copied when the
    forward is over. So a forward that reports no layer (the replay of a CUDA graph) is stored as whole pages would be.

    Attributes:
        busy: stores have begun, and their forward is not over.
    """

    def __init__(self, ops: RankOps) -> None:
        self._ops = ops
        self._op_ids: list[OpId] = []
        self.busy = False
        self._written: set[int] = set()
        self._open = 0
        self._layers = 0

    def begin(self, graphs: Sequence[TransferGraph], layers: int) -> None:
        """Submits the stores of the next forward. `layers` is the number of layers of the KV."""
        self._op_ids = [op.op_id for graph in graphs for op in graph.ops]
        self.busy = bool(self._op_ids)
        self._written.clear()
        self._open, self._layers = 0, layers
        for graph in graphs:
            self._ops.submit_store(graph, gated=True)

    def written(self, layer: int) -> None:
        """Called when all work that writes this layer's KV is enqueued: lets the layers complete so far be copied."""
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
        """Called when the forward is over: lets the layers that it did not report be copied too."""
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        if op_ids and self._open < self._layers:
            self._ops.open_layers(op_ids, self._layers)

    def abandon(self) -> None:
        """Called when another step begins: gives up stores whose forward never ended."""
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        for op_id in op_ids:
            self._ops.give_up(op_id, NOT_FINISHED)
