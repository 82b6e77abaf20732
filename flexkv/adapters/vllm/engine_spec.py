"""Reads from vLLM's configuration, once at the engine's start, the facts that the cache needs: the engine's role, its
sizes, its share of the node, and the values of `load.mode` and `store.mode` that it can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexkv.adapters.vllm.blend.spec import BlendSpec
from flexkv.adapters.vllm.identity import adapter_settings, engine_namespace, engine_weights
from flexkv.adapters.vllm.input_names import InputNames
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.facts.ranks import UnitOwner
from flexkv.observe import get_logger
from flexkv.unit.base import CacheRole
from flexkv.unit.capacity import PromptLimit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineRole(CacheRole):
    """How a vLLM engine uses the cache. The engine loads pages unless its kv_role is kv_producer, and stores pages
    unless its kv_role is kv_consumer. It recomputes tokens whose load failed if its kv_load_failure_policy is
    recompute.

    Attributes:
        drop_last_block: whether vLLM drops the last block of each hit, as it does for some draft models; see `Loads`.
        ends_copies: whether a reset must end every copy before it returns. When a vLLM 0.32 engine goes to sleep, it
            resets the cache and then frees the KV memory without a call to the workers.
        stores_end_in_step: whether store operations end within the step that plans them; see `EagerStores`.
        keeps_computed: whether the engine keeps KV that a running request computed from a failed load, although its
            scheduler discards those tokens; see `RUNNER_V2`.
    """

    asks_again: bool = True
    drop_last_block: bool = False
    ends_copies: bool = False
    stores_end_in_step: bool = False
    keeps_computed: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EngineRole:
        """Returns the role of an engine that uses `FlexKVConnector`."""
        transfer, speculative = vllm_config.kv_transfer_config, vllm_config.speculative_config
        assert transfer is not None, "vLLM makes a connector where it is configured"
        return cls(
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            recomputes=transfer.kv_load_failure_policy == "recompute",
            drop_last_block=speculative is not None and speculative.use_eagle_block_drop(),
            ends_copies=sleeps_without_hooks(vllm_config),
            keeps_computed=vllm_config.use_v2_model_runner,
        )


def sleeps_without_hooks(vllm_config: VllmConfig) -> bool:
    """Whether this engine may sleep and free its KV memory without a call to its workers' connectors (vLLM 0.32)."""
    has_hooks = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    return bool(vllm_config.model_config.enable_sleep_mode) and not has_hooks


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The facts about an engine, or about one data-parallel rank of it, that the scheduler's side uses.

    Attributes:
        config: flexkv's settings.
        geometry: the engine's pool.
        owner: the model, namespace, data-parallel rank and weights to which the unit's pages belong.
        ranks: number of workers.
        step_tokens: largest number of tokens that the engine computes in one step.
        role: how the engine uses the cache.
        prompt_limit: the longest prompt that the engine accepts; None if it is not known.
        names: decides which names of images and other inputs are valid only in this run of the engine.
        adapters: the engine's settings that change the KV of requests with an adapter; see `adapter_settings`.
        with_events: whether the engine publishes KV cache events.
        block_hash: name of the engine's hash function for blocks.
        blend: facts and settings for blending; None if blending is off.
    """

    config: FlexKVConfig
    geometry: PoolGeometry
    owner: UnitOwner
    ranks: int
    step_tokens: int
    role: EngineRole = EngineRole()
    prompt_limit: PromptLimit | None = None
    names: InputNames = field(default_factory=InputNames)
    adapters: Mapping[str, Any] = field(default_factory=dict)
    with_events: bool = False
    block_hash: str = "sha256"
    blend: BlendSpec | None = None

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, geometry: PoolGeometry, config: FlexKVConfig, role: EngineRole
    ) -> EngineSpec:
        """Reads the facts from vLLM's configuration.

        Raises:
            KeySchemeError, ConfigError: see `engine_namespace`.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        events = vllm_config.kv_events_config
        namespace = engine_namespace(vllm_config, geometry, config)
        return cls(
            config,
            geometry,
            UnitOwner(
                str(model.model),
                namespace,
                f"dp{parallel.data_parallel_index}",
                engine_weights(vllm_config, config),
            ),
            parallel.tensor_parallel_size,
            vllm_config.scheduler_config.max_num_batched_tokens,
            role,
            PromptLimit(model.max_model_len, "max_model_len"),
            InputNames.of(vllm_config),
            adapter_settings(vllm_config),
            events is not None and events.enable_kv_cache_events,
            vllm_config.cache_config.prefix_caching_hash_algo,
            BlendSpec.of(vllm_config, config),
        )

    @property
    def namespace(self) -> bytes:
        """The namespace of the engine's keys, 32 bytes."""
        return self.owner.namespace


UNITS = "host.units_per_node"


def units_on_node(settings: FlexKVConfig, vllm_config: VllmConfig) -> int:
    """Returns the number of units on this node, as far as vLLM's configuration shows it.

    Raises:
        ConfigError: there are several data-parallel ranks, each of which would size its tiers as if it were alone. For
            a model without experts, vLLM does not pass the number of ranks to the ranks; only the name of their engine
            shows that there are several.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    units = int(parallel.data_parallel_size_local)
    # For a model with experts, vLLM passes the number of ranks to each rank, unless the ranks are started one by one.
    told = parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb
    one_of_several = transfer is not None and str(transfer.engine_id).endswith(
        f"_dp{parallel.data_parallel_index}"
    )
    if units > 1 or told or not one_of_several or settings.given(UNITS):
        return units
    host, disk, shared = settings.host, settings.disk, []
    if host.bytes is None and host.bytes_per_rank is None:
        shared.append("host.memory_share (host.bytes is not set)")
    if disk.folders and disk.bytes_per_folder is None:
        shared.append("disk.space_share (disk.bytes_per_folder is not set)")
    if shared:
        raise ConfigError(
            f"this is data-parallel rank {parallel.data_parallel_index}, and vLLM does not say how many there are on "
            f"this node, so {' and '.join(shared)} cannot be divided among them: set {UNITS} to their number"
        )
    return units


ASYNC_SCHEDULING = (
    "with async scheduling the next step is in flight before a failed load is reported, and vLLM would keep the token "
    "which that step sampled",
    "--no-async-scheduling",
)
RUNNER_V2 = (
    "vLLM's Model Runner V2 goes on at the position that a request had reached when its load failed, although vLLM's "
    "scheduler takes the request back, and would compute wrong tokens",
    "VLLM_USE_V2_MODEL_RUNNER=0",
)
"""`ASYNC_SCHEDULING` and `RUNNER_V2` are reasons why an engine cannot recover from a load that fails within a step.
Each consists of the reason in words and the setting of vLLM that avoids it."""


def step_load_needs(vllm_config: VllmConfig) -> tuple[str, str]:
    """Returns why this engine cannot discard tokens that it computed from a load that failed within a step, and the
    settings with which it could discard them. Both texts are parts of a sentence. They are empty if the engine can
    discard the tokens."""
    transfer = vllm_config.kv_transfer_config
    recomputes = transfer is not None and transfer.kv_load_failure_policy == "recompute"
    lacks = [ASYNC_SCHEDULING] if vllm_config.scheduler_config.async_scheduling else []
    if recomputes and vllm_config.use_v2_model_runner:
        lacks.append(RUNNER_V2)
    return "; ".join(why for why, _ in lacks), " and ".join(setting for _, setting in lacks)


def possible_load_mode(asked: str, vllm_config: VllmConfig, is_hybrid: bool = False) -> str:
    """Returns the `load.mode` that this engine can use. Logs a warning if it differs from `asked`, the configured
    mode."""
    if asked == "async":
        return asked
    if is_hybrid:
        because = "with several KV groups vLLM takes back a failed load only while the request waits for it"
        return _other_mode("load", asked, "async", because)
    because, settings = step_load_needs(vllm_config)
    if because:
        return _other_mode("load", asked, "async", f"for {asked} loads set {settings}, because {because}")
    if asked == "layerwise" and vllm_config.speculative_config is not None:
        because = "with speculative decoding vLLM asks how loads ended before the draft's layers have waited for theirs"
        return _other_mode("load", asked, "sync", because)
    return asked


def possible_store_mode(asked: str, vllm_config: VllmConfig, is_hybrid: bool = False) -> str:
    """Returns the `store.mode` that this engine can use. Logs a warning if it differs from `asked`, the configured
    mode."""
    if asked == "eager":
        return asked
    if is_hybrid:
        because = "windows are stored at the boundaries that a step reaches, as soon as it has"
    elif asked == "lazy" and not vllm_config.cache_config.enable_prefix_caching:
        because = "without vLLM's prefix caching a free block carries no hash, so nothing tells what it holds"
    elif asked == "layerwise" and vllm_config.speculative_config is not None:
        because = "a draft's layers are written in several passes, and the first says that they are whole"
    elif asked == "layerwise" and vllm_config.parallel_config.use_ubatching:
        because = (
            "a batch in parts (enable_dbo, ubatch_size) has layers that the first part to leave calls whole"
        )
    else:
        return asked
    return _other_mode("store", asked, "eager", because)


def _other_mode(setting: str, asked: str, instead: str, because: str) -> str:
    logger.warning("%s.mode=%s: %s; %ss are %s here", setting, asked, because, setting, instead)
    return instead


def with_possible_modes(
    settings: FlexKVConfig, vllm_config: VllmConfig, is_hybrid: bool = False
) -> FlexKVConfig:
    """Returns the settings with `load.mode` and `store.mode` replaced by modes that this engine can use."""
    return settings.replaced(
        {
            "load.mode": possible_load_mode(settings.load.mode, vllm_config, is_hybrid),
            "store.mode": possible_store_mode(settings.store.mode, vllm_config, is_hybrid),
        }
    )
