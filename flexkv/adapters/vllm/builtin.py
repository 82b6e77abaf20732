"""flexkv behind vLLM's built-in `FlexKVConnectorV1`, reduced to the modes that are safe with the hooks of that class.

The built-in class passes on neither the engine's block pool nor its KV cache configuration. It passes on no preemptions
and no resets, and carries no metadata from worker to scheduler. Therefore store operations end within the step that
computed the blocks, so that no block is reused during its copy. Only prompt blocks are stored, and loads run within the
step. Both sides must run in one process, because the KV cache configuration is read from the worker's connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from flexkv.adapters.common.refusals import log_refusal
from flexkv.adapters.common.start import log_start, read_settings
from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.engine_checks import (
    check_batch_invariance,
    check_engine,
    warn_of_policy,
    warn_of_version,
)
from flexkv.adapters.vllm.engine_spec import EngineRole, EngineSpec, step_load_needs
from flexkv.adapters.vllm.identity import check_hash
from flexkv.adapters.vllm.local_engines import (
    OwnPools,
    check_agent,
    end_registration,
    ending_failed_start,
    register_only,
)
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.pool_geometry import one_group_geometry
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.cache.stores.base import StoreWatch
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.observe import get_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

FULL_CONNECTOR = '"kv_connector":"FlexKVConnector","kv_connector_module_path":"flexkv.adapters.vllm"'


class FlexKVConnectorV1Impl:
    """The class to which vLLM's built-in `FlexKVConnectorV1` delegates its hooks.

    Raises:
        ConfigError: a setting is unknown or not allowed; `check_engine` refuses the engine; or the engine may sleep,
            has more than one rank, already has a connector of flexkv, or cannot recompute a failed load although its
            policy requires it.
        KeySchemeError: the engine's block hashes are not cryptographic.
        CapacityError: the host memory that flexkv may use is too small for one slot.
    """

    _worker: WorkerSide
    """The worker's side. Only a connector in the worker's role has this attribute."""

    @log_refusal(logger)
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole) -> None:
        transfer = vllm_config.kv_transfer_config
        asked = read_settings(transfer.kv_connector_extra_config)
        check_engine(vllm_config)
        check_hash(vllm_config.cache_config.prefix_caching_hash_algo)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if ranks != 1:
            raise ConfigError(
                f"tensor_parallel_size is {ranks}: vLLM's built-in FlexKVConnectorV1 carries nothing from worker to "
                f"scheduler, so it works with 1; set {FULL_CONNECTOR}"
            )
        if vllm_config.model_config.enable_sleep_mode:
            raise ConfigError(
                "enable_sleep_mode is set: vLLM's built-in FlexKVConnectorV1 is told of no sleep, so after one of "
                f"level 2 KV of the old weights would be served; set {FULL_CONNECTOR}, or leave --enable-sleep-mode out"
            )
        because, settings = step_load_needs(vllm_config)
        if because and transfer.kv_load_failure_policy == "recompute":
            raise ConfigError(
                f'kv_load_failure_policy is "recompute" and loads run inside the step: set {settings}, or '
                f"{FULL_CONNECTOR}, because {because}"
            )
        self._vllm_config = vllm_config
        self._settings = _reduced(asked)
        self._scheduler: SchedulerSide | None = None
        """The scheduler's side; None in the worker's role, and if the worker runs in another process."""
        self._is_worker = role is KVConnectorRole.WORKER
        if self._is_worker:
            self._worker = WorkerSide(self._settings, 0, 1)
            self._own_pools = OwnPools()
        else:
            check_agent(vllm_config)
            log_start(logger, asked, "vllm")
            warn_of_version()
            warn_of_policy(transfer)
            logger.warning(
                "vLLM's built-in FlexKVConnectorV1 does not forward cache resets: pages stored before a reset are "
                "served after it. It also stores prompts only, within each step. For all of flexkv set %s",
                FULL_CONNECTOR,
            )
            with ending_failed_start(vllm_config):
                self._scheduler = self._make_side()
        # The connector is registered last, so that a refused connector does not count as its engine's connector.
        register_only(self, role, vllm_config)
        if self._is_worker:
            local_engines.announce(self._worker, vllm_config.cache_config)

    def shutdown(self) -> None:
        if self._is_worker:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        end_registration(self)

    # --- worker ---

    @log_refusal(logger)
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Prepares the worker's side for the engine's pool, which consists of the tensors `kv_caches`.

        Raises:
            ConfigError: the connector is a child of a MultiConnector or belongs to another engine, or the attention
                backend breaks batch invariance.
            GeometryError: flexkv does not support the KV cache configuration, or the tensors contradict it.
        """
        self._own_pools.check()
        with ending_failed_start(self._vllm_config):
            agent = get_kv_transfer_group()
            check_alone(agent)
            check_batch_invariance(self._vllm_config)
            config = agent._kv_cache_config
            one_group_geometry(config)  # raises if the engine has other groups
            self._worker.register_kv_caches(kv_caches, config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all loads of a step have ended before its forward pass starts."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Does nothing: complete blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        self._worker.finish_stores(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.reports.take_failed_blocks()

    def get_kv_connector_stats(self) -> None:
        """Returns no statistics: vLLM's class cannot reconstruct those of flexkv, and would warn at every report."""

    @staticmethod
    def _orders() -> ConnectorMetadata:
        orders = get_kv_transfer_group()._get_connector_metadata()
        return orders if isinstance(orders, ConnectorMetadata) else ConnectorMetadata()

    # --- scheduler ---

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self._scheduler
        return side.match(request, num_computed_tokens) if side is not None else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata:
        side = self._scheduler
        return side.build(scheduler_output) if side is not None else ConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.update(connector_output)
            self._scheduler.collect()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        side = self._scheduler
        return side.events.take_events() if side is not None and side.events is not None else ()

    def _make_side(self) -> SchedulerSide | None:
        """Makes the scheduler's side. Returns None if no worker in this process has registered KV caches. vLLM makes
        the scheduler's connector after the workers have registered theirs, so in this case the worker is in another
        process."""
        worker = local_engines.worker_of_engine(self._vllm_config.cache_config)
        if worker is None or worker.kv_config is None or (handshake := worker.handshake()) is None:
            logger.warning(
                "no worker in this process: vLLM's built-in FlexKVConnectorV1 carries nothing between processes, so "
                "nothing is cached. Set %s",
                FULL_CONNECTOR,
            )
            return None
        geometry = one_group_geometry(worker.kv_config)
        policy = self._vllm_config.kv_transfer_config.kv_load_failure_policy
        role = EngineRole(
            recomputes=policy == "recompute",
            stores_end_in_step=True,
            keeps_computed=self._vllm_config.use_v2_model_runner,
        )
        spec = EngineSpec.of(self._vllm_config, geometry, self._settings, role)
        side = SchedulerSide(spec)
        side.bind_watch(StoreWatch())
        side.take_handshake({0: handshake})
        return side


def check_alone(agent: Any) -> None:
    """Refuses to run as a child of a MultiConnector, because there this connector can read neither the step's orders
    nor the engine's policy for failed loads.

    Args:
        agent: the connector that vLLM's worker calls.

    Raises:
        ConfigError: the message says what to set.
    """
    if isinstance(agent, MultiConnector):
        raise ConfigError(
            "vLLM's built-in FlexKVConnectorV1 is one of the connectors of a MultiConnector, where a step's orders do "
            f"not reach it and nothing would be cached; set {FULL_CONNECTOR} in its place"
        )


KEPT = {
    "store.mode": "eager",
    "store.tokens": "prompt",
    "store.partial_blocks": False,
    "load.mode": "sync",
    # This connector is not called when the caches are reset. With disks, it would write KV of weights that changed
    # without a call that flexkv sees under keys of the old weights, and later processes would find it.
    "disk.folders": (),
}
"""The only values of these settings that this connector can use."""


def _reduced(asked: FlexKVConfig) -> FlexKVConfig:
    """Returns the settings with the values of `KEPT`. Logs a warning for each other value that the user has set."""
    for row in asked.rows():
        if row.key in KEPT and row.value != KEPT[row.key] and asked.given(row.key):
            logger.warning(
                "%s=%r (%s) needs %s; here it is %r",
                row.key,
                row.value,
                row.origin,
                FULL_CONNECTOR,
                KEPT[row.key],
            )
    return asked.replaced(KEPT)
