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
from flexkv.adapters.torch_tensors.device import torch_stream
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
"""Largest number of seconds that the worker's thread waits for copies out of blocks that the next forward pass writes.
In plain memory, the thread waits until the copies have ended. On a GPU, it waits only until they are enqueued, which
does not require any forward pass to end. If the time runs out, the pages count as failed. A lost page costs a recompute
later, but a waiting thread delays every running request now."""

ASLEEP = "the engine's KV memory is released"
RESET = "the cache was reset"
"""`ASLEEP` and `RESET` are the reasons in the results of ops that are refused because of a sleep or a reset."""

IDLE_WAIT_S = 0.002
"""How long a step without a forward pass waits for a copy to end. Without this wait the engine would run empty steps in
a tight loop and take time from the threads that copy. The wait delays a new request by at most this time."""


class WorkerSide(RankWorker):
    """The worker's side of one rank. The engine's worker thread calls all methods.

    Attributes:
        kv_config: the engine's KV cache configuration; None before the engine has registered its tensors.
        is_hybrid: whether the engine's pool is hybrid; see `PoolGeometry.is_hybrid`.
        layer_stores: the layerwise store operations of the current step. Its `busy` is True while there are any.
        settled_step: number of the last step whose outcome, with all its failures, was reported to a scheduler in this
            process; 0 if the scheduler runs in another process.
        reports: the reports to the unit that ordered the current step; the engine's hooks send them.
        blend: this rank's part in blending; None if blending is off.
    """

    def __init__(self, config: FlexKVConfig, rank: int, ranks: int, head_replicas: int = 1) -> None:
        """
        Args:
            ranks: number of tensor-parallel ranks.
            head_replicas: how many consecutive ranks have the same KV head.
        """
        super().__init__(config, rank, torch_stream)
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
        """Prepares the rank for the engine's pool, which consists of the tensors `caches`.

        Raises:
            GeometryError: the tensors contradict the configuration.
        """
        same = replicas(config, self._ranks, self._head_replicas)
        self.take_pool(build_views(caches, config, self._ranks // same, same))
        self.kv_config = config
        self.is_hybrid = pool_geometry(config).is_hybrid
        self._layer_numbers = layer_numbers(caches, config)

    def unregister_kv_caches(self) -> None:
        """Ends every op, because the engine is about to sleep and free its KV memory. Idempotent.

        Raises:
            ClosedError: a copy has not ended and cannot be cancelled, so the engine must not sleep.
        """
        self.layer_stores.abandon()
        self.release_pool(ASLEEP)

    def restore_kv_caches(self) -> None:
        """Allows ops again. The KV memory is mapped at the same addresses as before, with different content.
        Idempotent."""
        self.restore_pool()

    def end_copies(self, early: Sequence[TransferGraph]) -> None:
        """Ends every op, because the engine may sleep next without a call to its workers. Later ops are accepted.

        Args:
            early: store operations that were not submitted yet. They are refused.

        Raises:
            ClosedError: a copy has not ended and cannot be cancelled, so the engine must not sleep.
        """
        self.layer_stores.abandon()
        try:
            self._ops.release(RESET)
            self.end_registrations()
        finally:
            # The early store operations are refused even if a copy hangs, because nothing else would end them.
            self._ops.released = RESET
            for graph in early:
                self._ops.submit_store(graph)
            self._ops.released = ""

    def handshake(self) -> Handshake | None:
        """Returns the facts with which the scheduler's side sizes the host pool; None before the KV caches are
        registered."""
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
        """Submits early store operations, ends void and cancelled ops, and makes the step's forward pass wait for
        copies out of blocks that the pass may write. Then submits the step's layerwise store operations, whose layers
        are copied as the forward pass writes them. If the orders contain a grant, maps the host pool first.

        Call order:
            After all earlier forward passes were enqueued on the engine's stream, and before any work of this step is.
        """
        if orders.grant is not None:
            self.take_grant(orders.grant)
        if not self._begin_step(orders):
            return
        if self.layer_stores.busy and orders.step > self._ops.step:
            self.layer_stores.abandon()
        self._ops.step = max(self._ops.step, orders.step)
        for graph in orders.early:
            # Operations that store reused blocks run before other store operations, because the forward pass waits for
            # them.
            self._ops.submit_store(graph, urgent=any(op.op_id in orders.reused for op in graph.ops))
        # Ops whose bytes must not be used (void ops) are ended after the early store operations are submitted, because
        # some of these operations may be void.
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
        """Submits the step's loads, and waits for those that must be complete when the forward pass starts."""
        if not self._begin_step(orders):
            return
        self._ops.step = max(self._ops.step, orders.step)
        for job in orders.loads:
            self._ops.submit_load(job, self._before if orders.spares_loads else None)
            # A load is already void here if vLLM has reset its cache after the load was planned.
            if orders.void and any(op.op_id in orders.void for op in job.graph.ops):
                self._ops.invalidate(job, RESET)
        self.begin_step_loads(orders.loads)

    def wait_for_layer(self, name: str) -> None:
        """Waits until the `layer_loads` have filled the attention layer `name`. vLLM calls this when the forward pass
        is about to read the layer.

        Ignores attention layers without KV in the pool, such as an encoder's, because loads do not contain them.
        """
        if (number := self._layer_numbers.get(name)) is None:
            return
        self.layer_loads.wait(number, self.current_stream())

    def layer_written(self, name: str) -> None:
        """Lets the `layer_stores` copy the attention layer `name`. vLLM calls this when the forward pass has written
        the layer's KV."""
        # A blended forward pass may begin again and rewrite layers, so all layers are copied after it has ended.
        if self.blend is not None and self.blend.may_begin_again:
            return
        if (number := self._layer_numbers.get(name)) is not None:
            self.layer_stores.written(number)

    def after_forward(self, orders: ConnectorMetadata) -> None:
        """Records a point on the engine's stream, after which the step's store operations may start to copy.

        Call order:
            After all work of this step that writes KV was enqueued on the engine's stream, and before any later work
            is. Model runners without such a point do not call this method.
        """
        if orders is self._orders and orders.stores and self._foreign.unit is None:
            self._after = self._ops.point()

    def submit_stores(self, orders: ConnectorMetadata) -> None:
        """Submits the operations that store the blocks which this step's forward pass or earlier ones have filled.
        Before that, waits for the step's layerwise load and store operations.
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
        """Calls `submit_stores`, then waits until the step's copies have ended or count as failed."""
        self.submit_stores(orders)
        if self._foreign.unit is None:
            self._ops.finish_stores([*orders.settled, *orders.stores])

    def _begin_step(self, orders: ConnectorMetadata) -> bool:
        """Begins the step if no earlier hook of the same step has begun it. Every hook calls this method, because not
        all connector classes pass on all hooks. From then on, reports go to the unit that ordered the step.

        Returns:
            Whether this rank's own unit ordered the step. If another unit did, all ops of the step were refused.
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
        """Collects ops that have ended. If `idle`, waits up to `IDLE_WAIT_S` for an op in flight on this rank to end.
        If no op is in flight and `disk_busy`, waits that long for the disks."""
        if idle and disk_busy and not self._ops.busy:
            time.sleep(IDLE_WAIT_S)
        self._ops.poll(IDLE_WAIT_S if idle else 0.0)

    # --- reports ---

    def take_metadata(self) -> WorkerMetadata | None:
        """Returns the step's report to the scheduler's side; None if there is nothing to report."""
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
        # The report says that the disks are idle, because the other unit's engine need not run steps for this rank's
        # disks.
        return StepReport(self.rank, unit, error=self._foreign.reason, blend_disk=False)

    def take_results_early(self) -> list[OpResult]:
        """Returns results of ops to a scheduler in this process before the step is reported, and removes them.

        Returns only results of steps whose outcome the scheduler knows. In a later step, a load may have failed, either
        one of flexkv or one of another connector. Blocks that were computed from that load must not be published before
        the engine has discarded their tokens. With two batches in flight, a step is reported after the next one has
        run.
        """
        self._ops.poll()
        return self._ops.reports.take_settled(self.settled_step)

    def close(self) -> None:
        super().close()
        if self.blend is not None:
            self.blend.close()

    @property
    def busy(self) -> bool:
        """Whether an op is in flight, or has ended and was not reported yet."""
        return self._ops.busy


def current_device_is_host() -> bool:
    """Whether the engine runs on CPUs, so that its pool is plain memory."""
    return bool(current_platform.is_cpu())
