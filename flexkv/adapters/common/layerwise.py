"""How a step's pages are loaded and stored layer by layer. The forward pass waits for each layer to be loaded just
before it reads the layer. Each layer is stored after the forward pass has written it.
"""

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

    The forward pass does not notice if a load fails or misses `load.deadline_s`. The results of the pass are then
    wrong, and the load's failed blocks are in the step's report when `finish` returns. If the forward pass did not wait
    for every layer, `finish` fails all of the step's loads, because a layer may have been read too early.

    Attributes:
        busy: whether loads of a step have begun and the step's forward pass has not finished.
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
        """Registers the loads that were submitted for the next forward pass.

        Args:
            layers: number of layers of the KV.
        """
        self._jobs = list(jobs)
        self.busy = bool(jobs)
        self._waited.clear()
        self._layers = layers
        self._ends_s = time.monotonic() + self._deadline_s

    def wait(self, layer: int, stream: int | None = None) -> None:
        """Waits until layer `layer` of every load is in place. A load whose layer fails or is late no longer delays the
        forward pass; its blocks will be reported as failed.

        Args:
            stream: the engine's stream, if the KV pool is on a device. Work enqueued on the stream after this call
                starts after the copies.
        """
        if not 0 <= layer < self._layers:
            return  # no load has such a layer
        self._waited.add(layer)
        for job in list(self._jobs):
            if not self._ops.wait_layer(job, layer, self._ends_s, stream):
                self._jobs.remove(job)
                self._ops.finish_load(job)

    def finish(self) -> bool:
        """Waits until all loads of the step have finished. Must be called after the forward pass.

        Returns:
            Whether the forward pass waited for every layer.

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
    """The gated store operations of one step: each layer is copied only after the forward pass has written it.

    A layer is copied as soon as the forward pass has reported it and all layers before it. The remaining layers are
    copied after the forward pass. These are all layers if the forward pass reports none because it replays a CUDA
    graph.

    Attributes:
        busy: whether store operations of a step have begun and the step's forward pass has not finished.
    """

    def __init__(self, ops: RankOps) -> None:
        self._ops = ops
        self._op_ids: list[OpId] = []
        self.busy = False
        self._written: set[int] = set()
        self._open = 0
        self._layers = 0

    def begin(self, graphs: Sequence[TransferGraph], layers: int) -> None:
        """Submits the store operations of the next forward pass.

        Args:
            layers: number of layers of the KV.
        """
        self._op_ids = [op.op_id for graph in graphs for op in graph.ops]
        self.busy = bool(self._op_ids)
        self._written.clear()
        self._open, self._layers = 0, layers
        for graph in graphs:
            self._ops.submit_store(graph, gated=True)

    def written(self, layer: int) -> None:
        """Reports that all work that writes this layer's KV is enqueued. If all layers before it have been reported
        too, the lanes may copy this layer."""
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
        """Lets the lanes copy the layers that the forward pass did not report. Must be called after the forward
        pass."""
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        if op_ids and self._open < self._layers:
            self._ops.open_layers(op_ids, self._layers)

    def abandon(self) -> None:
        """Gives up the store operations if their forward pass never finished. Called when the next step begins."""
        op_ids, self._op_ids, self.busy = self._op_ids, [], False
        for op_id in op_ids:
            self._ops.give_up(op_id, NOT_FINISHED)
