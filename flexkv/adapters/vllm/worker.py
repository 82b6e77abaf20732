"""The worker's side: runs one rank's device lanes and reports every op exactly once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from flexkv.adapters.common.layerwise import LayerStores
from flexkv.adapters.common.rank_worker import RankWorker
from flexkv.adapters.vllm.foreign_steps import ForeignSteps
from flexkv.adapters.vllm.geometry import build_views, layer_numbers, replicas
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, StepReport, WorkerMetadata
from flexkv.adapters.vllm.pool_geometry import pool_geometry
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import UnitId
from flexkv.observe import get_logger
from flexkv.transfer.engine import cuda_device_of
from flexkv.transfer.gds_lane import gpudirect_refusal
from flexkv.transfer.graph import OpResult, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from flexkv.adapters.vllm.blend.worker import BlendWorker
    from flexkv.c_ext import StreamPoint

logger = get_logger(__name__)

REUSE_WAIT_S = 0.25
"""Longest time that the worker's thread waits for the copy out of a block before a forward that writes the block: in
plain memory for the copy to end, on a GPU for the copy to be enqueued, for which no forward must end. After that the
page counts as failed: a lost page costs a recompute later, while a waiting thread delays every running request now."""

ASLEEP = "the engine's KV memory is released"
RESET = "the cache was reset"
"""Reasons with which ops are refused."""

IDLE_WAIT_S = 0.002
"""Longest time that a step without a forward waits for a copy to end. Without this wait the engine would spin through
empty steps and take time from the threads that copy. A new request waits at most this long."""


class WorkerSide(RankWorker):
    """One rank. The engine's worker thread calls all methods.

    Attributes:
        kv_config: the engine's KV cache configuration; None before its tensors are registered.
        is_hybrid: see `PoolGeometry`.
        layer_stores: the layerwise stores of the step under way; `busy` while there are any.
        settled_step: the last step whose outcome, with all its failures, a scheduler in this process knows.
        reports: the reports for the unit that ordered the step under way, which the engine's hooks carry.
        blend: this rank's part in blending; None unless blending is requested.
    """

    def __init__(self, config: FlexKVConfig, rank: int, ranks: int, head_replicas: int = 1) -> None:
        """
        Args:
            head_replicas: number of consecutive ranks with the same KV head.
        """
        super().__init__(config, rank, _current_stream)
        self._ranks = ranks
        self._head_replicas = head_replicas
        self.kv_config: KVCacheConfig | None = None
        self._layer_numbers: dict[str, int] = {}
        self.is_hybrid = False
        self.layer_stores = LayerStores(self._ops)
        self._foreign = ForeignSteps(config, rank, self.counters)
        self.reports = self._ops.reports
        self._orders: ConnectorMetadata | None = None
        self._before: StreamPoint | None = None
        self._after: StreamPoint | None = None
        self.settled_step = 0
        self._reported: StepReport = StepReport(rank, ready=-1, blend_disk=False)
        self._reported_foreign: UnitId | None = None
        self.blend: BlendWorker | None = None

    # --- set up ---

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> None:
        """Takes the engine's pool.

        Raises:
            GeometryError: the tensors contradict the configuration.
        """
        same = replicas(config, self._ranks, self._head_replicas)
        self.take_pool(build_views(caches, config, self._ranks // same, same))
        self.kv_config = config
        self.is_hybrid = pool_geometry(config).is_hybrid
        self._layer_numbers = layer_numbers(caches, config)

    def unregister_kv_caches(self) -> None:
        """Ends every op, because the engine is about to sleep and take the KV memory away. Idempotent.

        Raises:
            ClosedError: a copy neither ended nor could be recalled: the engine must not sleep.
        """
        self.layer_stores.abandon()
        self.release_pool(ASLEEP)

    def restore_kv_caches(self) -> None:
        """Allows ops again: the KV memory is back at its addresses, with different content. Idempotent."""
        self.restore_pool()

    def end_copies(self, early: Sequence[TransferGraph]) -> None:
        """Ends every op, for an engine that may sleep after this without a call to its workers. Later ops are accepted.

        Args:
            early: stores that were not submitted yet; they end refused.

        Raises:
            ClosedError: a copy neither ended nor could be recalled: the engine must not sleep.
        """
        self.layer_stores.abandon()
        try:
            self._ops.release(RESET)
            self.end_registrations()
        finally:
            # Also done if a copy hangs, because nothing else ends these stores.
            self._ops.released = RESET
            for graph in early:
                self._ops.submit_store(graph)
            self._ops.released = ""

    def handshake(self) -> Handshake | None:
        """The facts that the scheduler needs to size the host pool; None before the KV caches are registered."""
        facts = self.facts()
        if facts is None:
            return None
        plain = {field.name: getattr(facts, field.name) for field in fields(facts)}
        more = {"gpudirect": self._has_gpudirect()}
        return Handshake(**plain | more, blend_refusal=self.blend.refusal if self.blend else None)

    def _has_gpudirect(self) -> bool:
        disk = self._config.disk
        if disk.gds != "auto" or not disk.folders or cuda_device_of(self._owners) is None:
            return False
        if refusal := gpudirect_refusal():
            logger.info("disk.gds=auto: blocks on disk are loaded through host memory: %s", refusal)
        return not refusal

    # --- one step, in the order in which the engine calls ---

    def before_forward(self, orders: ConnectorMetadata) -> None:
        """Takes the host pool, submits early stores, and orders this step's forward pass behind the copies out of
        blocks that it may write. Then submits the step's layerwise stores, whose layers are copied as the forward pass
        writes them. All earlier forward passes are enqueued on the engine's stream by now, and no work of this one.
        """
        if orders.grant is not None:
            self.take_grant(orders.grant)
        if not self._begin_step(orders):
            return
        if self.layer_stores.busy and orders.step > self._ops.step:
            self.layer_stores.abandon()
        self._ops.step = max(self._ops.step, orders.step)
        for graph in orders.early:
            # A store of reused blocks goes before the other stores, because the forward pass waits for it.
            self._ops.submit_store(graph, urgent=any(op.op_id in orders.reused for op in graph.ops))
        # After the early stores are submitted, because one of them may already be void.
        for op_id in orders.void:
            self._ops.give_up(op_id, RESET)
        for op_id in orders.cancel:
            self._ops.give_up(op_id, "the request ended")
        if orders.reused:
            self._ops.keep_before_reuse(orders.reused, REUSE_WAIT_S)
        if orders.settled or (orders.spares_loads and orders.loads):
            self._before = self._ops.point()
        if by_layer := [graph for graph in orders.stores if graph.is_layerwise]:
            self.layer_stores.begin(by_layer, self.views[0].num_layers)

    def start_loads(self, orders: ConnectorMetadata) -> None:
        """Submits the step's loads, and waits for those that its forward pass needs complete when it starts."""
        if not self._begin_step(orders):
            return
        self._ops.step = max(self._ops.step, orders.step)
        for job in orders.loads:
            self._ops.submit_load(job, self._before if orders.spares_loads else None)
            # vLLM may begin a load between steps, and reset its cache before the step that orders the load.
            if orders.void and any(op.op_id in orders.void for op in job.graph.ops):
                self._ops.invalidate(job, RESET)
        self.begin_step_loads(orders.loads)

    def wait_for_layer(self, name: str) -> None:
        """Called when the forward pass is about to read this attention layer: waits until the `layer_loads` have filled
        it.

        Loads do not contain attention layers without KV in the pool, such as those of an encoder.
        """
        if (number := self._layer_numbers.get(name)) is None:
            return
        self.layer_loads.wait(number, self.current_stream())

    def layer_written(self, name: str) -> None:
        """Called when the forward pass has written this attention layer's KV: lets the `layer_stores` copy it."""
        # A forward pass that may begin again writes layers once more, so all are copied after its end.
        if self.blend is not None and self.blend.may_begin_again:
            return
        if (number := self._layer_numbers.get(name)) is not None:
            self.layer_stores.written(number)

    def after_forward(self, orders: ConnectorMetadata) -> None:
        """Called when all work of this step that writes KV, and no later work, is enqueued on the engine's stream.
        Runners whose steps have no such point do not call it."""
        if orders is self._orders and orders.stores and self._foreign.unit is None:
            self._after = self._ops.point()

    def submit_stores(self, orders: ConnectorMetadata) -> None:
        """Submits the stores of blocks that this step's forward pass or earlier ones completed. The step's layerwise
        loads have ended when this returns.
        """
        if not self._begin_step(orders):
            return
        if self.layer_loads.busy:
            self.layer_loads.finish()
        if self.layer_stores.busy:
            self.layer_stores.finish()
        for graph in orders.settled:
            self._ops.submit_store(graph, after=self._before)
        for graph in orders.stores:
            if not graph.is_layerwise:
                self._ops.submit_store(graph, after=self._after)

    def finish_stores(self, orders: ConnectorMetadata) -> None:
        """Calls `submit_stores`, and waits until the copies have ended or count as failed."""
        self.submit_stores(orders)
        if self._foreign.unit is None:
            self._ops.finish_stores([*orders.settled, *orders.stores])

    def _begin_step(self, orders: ConnectorMetadata) -> bool:
        """Begins the step if this hook is its first, because not every connector class forwards all hooks. From then on
        the reports are for the unit that ordered the step.

        Returns:
            Whether that is this rank's unit. If it is another, all ops of the step have ended.
        """
        if orders is not self._orders:
            self._orders = orders
            self._before = self._after = None
            if orders.unit == self.unit:
                self._foreign.unit, self.reports = None, self._ops.reports
            else:
                self.reports = self._foreign.refuse(orders, self.unit)
        return self._foreign.unit is None

    def poll(self, idle: bool = False, disk_busy: bool = False) -> None:
        """Collects ended ops. With `idle`, waits up to IDLE_WAIT_S for one if any is under way here or on the disks."""
        if idle and disk_busy and not self._ops.busy:
            time.sleep(IDLE_WAIT_S)
        self._ops.poll(IDLE_WAIT_S if idle else 0.0)

    # --- reports ---

    def take_metadata(self) -> WorkerMetadata | None:
        """The step's report to the scheduler's side; None if there is nothing to report."""
        unit = self._foreign.unit
        report = self._own_report() if unit is None else self._foreign_report(unit)
        report.results = self.reports.take_results()
        return None if report == StepReport(self.rank, report.unit) else WorkerMetadata([report])

    def _own_report(self) -> StepReport:
        report = StepReport(self.rank, self.unit)
        self.add_news(report)
        self.add_if_new(report, "step", self._ops.step)
        if self._ops.engine is None and self._reported.handshake is None:
            self.add_if_new(report, "handshake", self.handshake())
        if self.blend is not None:
            report.blend_arrived, report.blend_stored = self.blend.take_arrived(), self.blend.take_stored()
            self.add_if_new(report, "blend_disk", self.blend.disk_busy)
        return report

    def _foreign_report(self, unit: UnitId) -> StepReport:
        if self._reported_foreign == unit:
            return StepReport(self.rank, unit)
        self._reported_foreign = unit
        # The other unit need not step for this rank's disks.
        return StepReport(self.rank, unit, error=self._foreign.reason, blend_disk=False)

    def take_results_early(self) -> list[OpResult]:
        """Takes results for a scheduler in this process, ahead of the step's report.

        Only results of steps whose outcome the scheduler knows are taken. In a step, a load of ours or of another
        connector may have failed, and blocks computed from it must not be published before the engine has taken those
        tokens back. With two batches in flight, a step is reported when the next one has run.
        """
        self._ops.poll()
        return self._ops.reports.take_settled(self.settled_step)

    def close(self) -> None:
        super().close()
        if self.blend is not None:
            self.blend.close()

    @property
    def busy(self) -> bool:
        """Whether an op is under way or unreported."""
        return self._ops.busy


def current_device_is_host() -> bool:
    """Whether the engine's pool is plain memory."""
    return bool(current_platform.is_cpu())


def _current_stream(device: int) -> int:
    """The stream on which this thread enqueues the engine's work, as an integer."""
    return int(torch.cuda.current_stream(device).cuda_stream)
