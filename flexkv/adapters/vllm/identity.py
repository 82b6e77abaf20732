"""The namespace of an engine's keys: everything that must be equal before two blocks' KV may be exchanged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm import envs

from flexkv.adapters.common.common_keys import (
    COMMON,
    SharedModel,
    common_namespace,
    draft_refusal,
    other_config_refusal,
)
from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.model_identity import long_rope_choice, plain_config
from flexkv.adapters.common.weights import resolved_commit, weights_identity
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError, KeySchemeError
from flexkv.observe import get_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

logger = get_logger(__name__)

RUN_NAME_BYTES = 16
"""Random bytes that tell one run from all others."""

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")


def check_hash(algorithm: str) -> None:
    """Refuses block hashes that somebody could make collide.

    Raises:
        KeySchemeError: says what to set.
    """
    if algorithm not in CRYPTOGRAPHIC_HASHES:
        raise KeySchemeError(
            f"vLLM hashes blocks with prefix_caching_hash_algo={algorithm!r}, with which two prompts can be made to "
            f"share a key and then each other's KV; set --prefix-caching-hash-algo to one of "
            f"{', '.join(CRYPTOGRAPHIC_HASHES)}"
        )


def engine_namespace(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> bytes:
    """The namespace of this engine's keys, 32 bytes: the same in every process that would compute the same KV.

    Raises:
        KeySchemeError: the engine's block hashes are not cryptographic.
        ConfigError: nothing identifies the weights, or other engines could not share this one's pages.
    """
    check_hash(config.cache_config.prefix_caching_hash_algo)
    if settings.keys.scheme == COMMON:
        return common_namespace(_shared_model(config, geometry, settings), settings)
    if _scales_of_the_run(config):
        logger.warning(
            "calculate_kv_scales: the KV scales come from the first forward of this run, so what is stored is of use "
            "to this run alone; it can be shared with no other engine and found by none after a restart"
        )
    return plain_namespace(_fields(config, geometry, settings))


def _shared_model(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> SharedModel:
    """
    Raises:
        ConfigError: this engine cannot take part in the common key scheme; says why.
    """
    model, overrides = config.model_config, config.model_config.hf_overrides
    if geometry.is_hybrid:
        rules = ", ".join(group.rule.value for group in geometry.groups)
        raise ConfigError(
            f"keys.scheme=common: the rules of the model's KV groups are {rules}; engines share pages of models with "
            "one group of full attention. Leave keys.scheme out"
        )
    (group,) = geometry.groups
    if config.speculative_config is not None:
        raise draft_refusal(str(config.speculative_config.method))
    if settings.store.mode == "lazy":
        raise ConfigError(
            "keys.scheme=common needs store.mode=eager or layerwise: lazy stores see vLLM's block hashes and no tokens"
        )
    if model.hf_config_path and model.hf_config_path != model.model:
        raise other_config_refusal("hf_config_path", str(model.hf_config_path))
    if not isinstance(overrides, dict):
        raise ConfigError(
            "keys.scheme=common: hf_overrides is a function, which no other engine could be compared by"
        )
    model_dtype = str(model.dtype).removeprefix("torch.")
    if config.cache_config.kv_cache_dtype_skip_layers:
        raise ConfigError(
            "keys.scheme=common: kv_cache_dtype_skip_layers gives layers KV of another type; it must be the same in all"
        )
    if group.kv_dtype != model_dtype:
        raise ConfigError(
            f"keys.scheme=common: the KV is {group.kv_dtype} and the model {model_dtype}; they must be the same"
        )
    return SharedModel(
        path=str(model.model),
        weights=settings.identity.model or _weights_of(model),
        kv_dtype=group.kv_dtype,
        quantization=str(model.quantization),
        block_tokens=group.block_tokens,
        overrides=overrides,
        config=model.hf_text_config.to_dict(),
        apart=_apart(config),
    )


def _apart(config: VllmConfig) -> Any:
    """What else this engine's KV depends on; None where nothing does."""
    seed = config.model_config.seed if str(config.load_config.load_format) == "dummy" else None
    # No other engine has vLLM's kernels, and who asks for this mode asks for the same bits each time.
    return {"batch_invariant": "vllm", "random_weights": seed} if envs.VLLM_BATCH_INVARIANT else seed


def _fields(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> dict[str, Any]:
    model, cache = config.model_config, config.cache_config
    speculative = config.speculative_config
    weights = settings.identity.model or _weights_of(model)
    # Other kernels give other bits.
    mode: dict[str, Any] = {"batch_invariant": True} if envs.VLLM_BATCH_INVARIANT else {}
    if geometry.is_hybrid:
        mode["groups"] = [group.signature.hex() for group in geometry.groups]
    first, model_dtype = geometry.groups[0], str(model.dtype)
    if cache.cache_dtype == "auto" and first.kv_dtype not in ("", model_dtype.removeprefix("torch.")):
        # The model says it, or has layers beside its attention, such as an indexer, with a type of their own.
        mode["pool_dtype"] = first.kv_dtype
    return mode | {
        "engine": "vllm",
        "weights": weights,
        # Random weights are the same only for the same seed.
        "random_weights": model.seed if str(config.load_config.load_format) == "dummy" else None,
        "architecture": plain_config(model.hf_text_config.to_dict()),
        "long_rope": long_rope_choice(model.hf_text_config.to_dict(), model.max_model_len),
        "model_dtype": model_dtype,
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "kv_dtype_skipped": [str(layer) for layer in cache.kv_cache_dtype_skip_layers],
        "run": os.urandom(RUN_NAME_BYTES) if _scales_of_the_run(config) else None,
        "layers": list(first.layer_names),
        "block_tokens": first.block_tokens,
        "hash": cache.prefix_caching_hash_algo,
        # A draft model's layers have KV in the same blocks.
        "draft": _draft(speculative) if speculative is not None else None,
        "namespace": settings.identity.namespace,
    }


def _scales_of_the_run(config: VllmConfig) -> bool:
    """Whether the scales of quantised KV are measured at run time; not every version of vLLM can."""
    return bool(getattr(config.cache_config, "calculate_kv_scales", False))


def _weights_of(model: ModelConfig) -> str:
    # Without a commit the revision's name stands in: there is no setting that would name a draft's weights.
    return weights_identity(
        model.model, model.revision, resolved_commit(model) or model.revision or "default"
    )


def _draft(speculative: SpeculativeConfig) -> dict[str, Any]:
    """Method and, where drafts come from a model, that model's weights, shape and data types."""
    draft = speculative.draft_model_config
    fields: dict[str, Any] = {"method": str(speculative.method), "model": str(speculative.model)}
    if draft is not None:
        fields |= {
            "weights": _weights_of(draft),
            "architecture": plain_config(draft.hf_text_config.to_dict()),
            "dtype": str(draft.dtype),
            "quantization": str(draft.quantization),
            "kv_dtype": str(speculative.kv_cache_dtype),
        }
    return fields
