"""Checks an engine at its start. Refuses engines whose KV cannot be reused or whose ranks cannot reach each other, and
warns of settings with which pages or requests may be lost.

`pool_geometry.py` checks KV cache configurations, and `local_engines.py` refuses a second engine or connector in one
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.errors import ConfigError
from flexkv.observe import get_logger, warn_once

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

    from flexkv.adapters.vllm.pool_geometry import PoolGeometry
    from flexkv.config import FlexKVConfig

logger = get_logger(__name__)

TESTED_VERSIONS = ("0.32", "0.33")
"""The versions of vLLM with which the tests run, oldest first (docs/vllm.md has a table of them)."""


def check_engine(config: VllmConfig) -> None:
    """Refuses engines that flexkv would crash, engines that would give wrong answers, and engines that flexkv could
    never serve.

    Raises:
        ConfigError: the message names the setting or the model's property, and what to do.
    """
    check_parallelism(config.parallel_config)
    check_model(config.model_config)


def check_groups(config: VllmConfig, geometry: PoolGeometry) -> None:
    """Refuses features of the engine that flexkv does not support with several KV groups.

    Raises:
        ConfigError: the message names the feature, and what to do.
    """
    if geometry.is_hybrid and config.speculative_config is not None:
        raise ConfigError(
            f"speculative decoding ({config.speculative_config.method}) with {len(geometry.groups)} KV cache groups is "
            "not served; start vLLM with --disable-hybrid-kv-cache-manager, or without --speculative-config"
        )


def check_parallelism(parallel: ParallelConfig) -> None:
    """Refuses parallelism that splits a block over ranks in a way that a slot cannot represent, launchers whose ranks
    cannot reach each other, and engines that continue after a fault.

    If an engine continues after another rank's fault, vLLM 0.33 delivers the failed step's reports with those of the
    next step, so flexkv would publish blocks that the failed step computed. vLLM 0.32 drops the reports, so flexkv
    would wait for its copies for ever.

    Raises:
        ConfigError: the message names the setting and the value that works.
    """
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(
                f"vLLM's {name} is {size}; flexkv works with 1 (tensor and data parallelism are fine)"
            )
    ranks = parallel.tensor_parallel_size
    if ranks > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            f"vLLM's distributed_executor_backend is 'external_launcher' with tensor_parallel_size {ranks}: each rank "
            "runs an engine of its own and reaches no other rank, so the pages of a block never come together; "
            "flexkv works with 'mp' or 'ray' there, and with 'external_launcher' where tensor_parallel_size is 1"
        )
    if parallel.enable_fault_tolerance:
        raise ConfigError(
            "vLLM's enable_fault_tolerance is set: after a fault vLLM reports the step that failed like any other, so "
            "that flexkv would store wrong KV; leave --enable-fault-tolerance out, or --kv-transfer-config"
        )


def check_model(model: ModelConfig) -> None:
    """Refuses models that vLLM cannot compute from the middle of a prompt, and models whose KV depends on later tokens.

    vLLM itself turns prefix caching off for such models, but it would still load tokens that a connector promises. For
    other models, flexkv also works with `--no-enable-prefix-caching`.

    Raises:
        ConfigError: the message names the model's property.
    """
    if model.is_diffusion:
        raise ConfigError(
            f"{model.model} is a diffusion model: the KV of a token depends on later tokens of its canvas, so that of "
            "one prompt is of no use to another; leave --kv-transfer-config out"
        )
    if not model.is_prefix_caching_supported:
        raise ConfigError(
            f"vLLM does not support prefix caching for {model.model} ({_kind_of(model)}): a hit would have it compute "
            "a part of a prompt alone, which it cannot do; leave --kv-transfer-config out"
        )


BATCH_VARIANT_AFTER_A_HIT = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends with which vLLM turns prefix caching off if VLLM_BATCH_INVARIANT is set. If they compute only the
rest of a prompt, the results differ from those for the complete prompt."""


def check_batch_invariance(config: VllmConfig) -> None:
    """Refuses attention backends that break the promise of VLLM_BATCH_INVARIANT, which is that a hit does not change
    the output.

    Call order:
        In a worker whose model is loaded, because the backends are known only there.

    Raises:
        ConfigError: the message names the backend, and what to do.
    """
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        return
    names = {backend.get_name() for backend in backends_of_layers(config)}
    if refused := sorted(names & BATCH_VARIANT_AFTER_A_HIT):
        raise ConfigError(
            f"VLLM_BATCH_INVARIANT is set and the attention backend is {', '.join(refused)}, with which vLLM turns "
            "prefix caching off: after a hit it would give other output than without one; choose another "
            "--attention-backend, unset VLLM_BATCH_INVARIANT, or leave --kv-transfer-config out"
        )


def backends_of_layers(config: VllmConfig) -> list[type[AttentionBackend]]:
    """Returns the attention backend of each layer in this process; none if the model is not in this process."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    return [layer.get_attn_backend() for layer in layers]


def _kind_of(model: ModelConfig) -> str:
    """Returns, in words, the properties that decide whether vLLM supports prefix caching for the model: its kind of
    attention and, for pooling models, its kind of pooling."""
    pooler = model.pooler_config
    pooling = ""
    if pooler is not None:
        kinds = [str(kind) for kind in (pooler.seq_pooling_type, pooler.tok_pooling_type) if kind]
        pooling = f", {' and '.join(kinds)} pooling"
    return f"{model.attn_type} attention{pooling}"


def engine_release() -> str:
    """Returns the first two numbers of the installed vLLM's version, the form that `TESTED_VERSIONS` has."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def warn_of_version() -> None:
    """Warns once per process if flexkv was not tested with the installed vLLM, and lists the tested versions."""
    from vllm import __version__

    if engine_release() not in TESTED_VERSIONS:
        warn_once(
            logger,
            "untested vLLM",
            "vLLM %s: flexkv was tested with vLLM %s. The connector interface of vLLM is experimental, so another "
            "version may fail at its start or later; install a tested one to be sure",
            __version__,
            " and ".join(TESTED_VERSIONS),
        )


def warn_of_policy(transfer: KVTransferConfig) -> None:
    """Warns that a failed load ends its request, unless vLLM is configured to recompute the request's tokens."""
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request whose load fails ends with an error. "
            'Set "kv_load_failure_policy":"recompute" in --kv-transfer-config to compute it instead',
            policy,
        )


def warn_of_sudden_end(settings: FlexKVConfig, vllm_config: VllmConfig) -> None:
    """Warns that blocks not yet on disk are lost when the server stops, if vLLM ends its engine at once, as it does by
    default."""
    if settings.disk.folders and settings.disk.mode != "through" and vllm_config.shutdown_timeout == 0:
        logger.warning(
            "disk.mode=%s and vLLM's --shutdown-timeout is 0: a server that is told to stop ends its engine before "
            "blocks are written. Set --shutdown-timeout %.0f or more",
            settings.disk.mode,
            settings.transfer.close_s + 10,
        )
