"""The KV connector that vLLM loads. It passes each hook to the scheduler's side or the worker's side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.engine_checks import (
    check_batch_invariance,
    check_engine,
    check_groups,
    warn_of_policy,
    warn_of_sudden_end,
    warn_of_version,
)
from flexkv.adapters.vllm.engine_spec import EngineRole, EngineSpec, units_on_node, with_possible_modes
from flexkv.adapters.vllm.geometry import head_replicas, required_layout
from flexkv.adapters.vllm.local_engines import (
    OwnPools,
    check_agent,
    end_registration,
    ending_failed_start,
    register_only,
)
from flexkv.adapters.vllm.metadata import ConnectorMetadata, Handshake, WorkerMetadata
from flexkv.adapters.vllm.pool_geometry import PoolGeometry, pool_geometry
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.adapters.vllm.stats import FlexKVPromMetrics, FlexKVStats
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.config import FlexKVConfig, load_config
from flexkv.observe import Counters, get_logger
from flexkv.unit.build import share_of_node

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class FlexKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector to flexkv's cache in host memory, on disks and in a remote store. vLLM uses it if started with

    `--kv-transfer-config '{"kv_connector":"FlexKVConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'`

    Raises:
        ConfigError: a setting is unknown or not allowed, `check_engine` refuses the engine or its model, or the engine
            already has a connector of flexkv.
        GeometryError: `pool_geometry` refuses the model's KV cache.
        KeySchemeError: the engine's block hashes are not cryptographic.
    """

    _cache_hit_source = CacheHitSource.HOST

    scheduler: SchedulerSide
    """The scheduler's side. Only a connector in the scheduler's role has this attribute."""

    worker: WorkerSide
    """The worker's side. Only a connector in the worker's role has this attribute."""

    worker_class: type[WorkerSide] = WorkerSide
    """The class of `worker`. A subclass of the connector may set another class, for example to wrap the worker's
    mover."""

    def __init_subclass__(cls) -> None:
        _make_known(cls)

    @log_refusal(logger)
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        geometry = pool_geometry(kv_cache_config)
        check_groups(vllm_config, geometry)
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        if role is KVConnectorRole.WORKER:
            self.worker = self.worker_class(
                settings, parallel.rank % ranks, ranks, head_replicas(vllm_config)
            )
            self._own_pools = OwnPools()
            register_only(self, role, vllm_config)
            local_engines.announce(self.worker, vllm_config.cache_config)
            return
        check_agent(vllm_config)
        with ending_failed_start(vllm_config):
            self._start_scheduler(vllm_config, settings, geometry)

    def _start_scheduler(
        self, vllm_config: VllmConfig, settings: FlexKVConfig, geometry: PoolGeometry
    ) -> None:
        log_start(logger, settings, "vllm")
        warn_of_version()
        warn_of_policy(self._kv_transfer_config)
        warn_of_sudden_end(settings, vllm_config)
        settings = with_possible_modes(settings, vllm_config, geometry.is_hybrid)
        spec = EngineSpec.of(
            vllm_config,
            geometry,
            share_of_node(settings, units_on_node(settings, vllm_config)),
            EngineRole.of(vllm_config),
        )
        self.scheduler = SchedulerSide(spec)
        # The connector is registered last, so that a refused connector does not count as its engine's connector.
        register_only(self, self.role, vllm_config)

    # --- both sides ---

    @property
    def requires_kv_delivery(self) -> bool:
        """False: vLLM need not compute a preempted request again just to store its blocks, because a block that is not
        stored only costs a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        layout = required_layout(vllm_config)
        if layout is not None:
            _say_layout(vllm_config.kv_transfer_config, layout)
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True if load or store operations are layerwise, or if blending is on. A CUDA graph of the complete forward
        pass would omit the connector's calls per layer, and could not compute fewer rows in some layers.
        """
        settings = load_config(extra_config)
        return settings.blend.enabled or "layerwise" in (settings.load.mode, settings.store.mode)

    def get_kv_connector_stats(self) -> FlexKVStats | None:
        if self.role is KVConnectorRole.WORKER:
            counters = self.worker.counters
            data = counters.take() if counters.data else None
        else:
            data = self.scheduler.take_counters()
        return FlexKVStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FlexKVStats | None:
        return FlexKVStats(data=Counters(data).data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FlexKVPromMetrics:
        return FlexKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        side = self.worker if self.role is KVConnectorRole.WORKER else self.scheduler
        side.close()
        end_registration(self)

    # --- worker ---

    @log_refusal(logger)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        # This check comes first, outside `ending_failed_start`: if this connector belongs to another engine, refusing
        # the pool must not shut down that engine's connector.
        self._own_pools.check()
        with ending_failed_start(self._vllm_config):
            check_batch_invariance(self._vllm_config)
            self.worker.register_kv_caches(kv_caches, self._kv_cache_config)
            self._start_blending()

    def _start_blending(self) -> None:
        settings = load_config(self._kv_transfer_config.kv_connector_extra_config)
        if not settings.blend.enabled:
            return
        from flexkv.adapters.vllm.blend.worker import BlendWorker  # late, because it imports vLLM's models

        geometry, worker = pool_geometry(self._kv_cache_config), self.worker
        worker.blend = BlendWorker(self._vllm_config, settings, worker.rank, geometry, worker.counters)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 and later call this before the engine sleeps and frees its KV memory."""
        self.worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """vLLM 0.33 and later call this after the engine has woken and allocated its KV memory again."""
        self.worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker.blend is not None:
            # `begin_step` is called here and not in `start_load_kv`, because vLLM may call `start_load_kv` after the
            # forward pass.
            self.worker.blend.begin_step(cast("ConnectorMetadata", connector_metadata).blend)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, ConnectorMetadata)
        self.worker.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_loads(cast("ConnectorMetadata", self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.worker.layer_loads.busy:
            self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if self.worker.layer_stores.busy:
            self.worker.layer_written(layer_name)

    def finish_forward(self) -> None:
        """vLLM's Model Runner V2 calls this between forward pass and sampling. Does nothing if the engine has a draft
        model, which writes its KV after this call.
        """
        if self._vllm_config.speculative_config is None and self.has_connector_metadata():
            self.worker.after_forward(cast("ConnectorMetadata", self._get_connector_metadata()))

    def wait_for_save(self) -> None:
        self.worker.submit_stores(cast("ConnectorMetadata", self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose async loads have ended. For a hybrid engine, also returns which of these loads
        failed: in such an engine a block's number does not determine its group, so vLLM expects the ids of failed
        requests, not failed blocks."""
        orders = cast("ConnectorMetadata", self._get_connector_metadata())
        self.worker.poll(orders.idle, orders.disk_busy)
        finished, failed = self.worker.reports.take_finished_and_failed()
        return KVConnectorTransferResults(
            finished_recving=finished, failed_recving=failed if self.worker.is_hybrid else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        reports = self.worker.reports
        failed = reports.take_failed_blocks() if reports.failed_blocks else set()
        return set() if self.worker.is_hybrid else failed

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self.worker.take_metadata()

    # --- scheduler ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_block_pool(gpu_block_pool)

    @log_refusal(logger)
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        ours = {rank: item for rank, item in metadata.items() if isinstance(item, Handshake)}
        with ending_failed_start(self._vllm_config):
            self.scheduler.take_handshake(ours)

    def on_new_request(self, request: Request) -> None:
        """vLLM calls this when the request enters its queue. Starts to fetch the request's pages to host memory."""
        self.scheduler.enter(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Returns how many of the request's loaded tokens came from each source. vLLM calls this after
        `update_state_after_alloc`."""
        sources = self.scheduler.supplied(request, num_external_tokens)
        return sources or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata:
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request, block_ids)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self.scheduler.events
        return events.take_events() if events is not None else ()

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        """False: store operations hold no reference to engine blocks, so the engine would gain no block by waiting for
        them. The engine has to preempt requests instead."""
        return False

    def reset_cache(self) -> bool:
        return self.scheduler.reset()


@log_refusal(logger)
def _say_layout(transfer: KVTransferConfig, layout: str) -> None:
    """Logs the layout that the connector asks for, and what to do if another connector asks for a different one. If two
    connectors ask for different layouts, vLLM fails with an error that names neither layout, before it calls any other
    hook.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    read_settings(transfer.kv_connector_extra_config)
    logger.info(
        "asks vLLM for KV cache layout %s. Where another connector of a MultiConnector asks for another one, vLLM does "
        "not start: set VLLM_KV_CACHE_LAYOUT to one of the two",
        layout,
    )


def _make_known(connector: type[FlexKVConnector]) -> None:
    """Registers the class, so that vLLM finds it by its name. A MultiConnector looks classes up by name when it reads
    the statistics of its connectors, and a name that is not registered ends the engine's output loop."""
    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)


_make_known(FlexKVConnector)
