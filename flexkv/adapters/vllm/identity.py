"""Computes the namespace of an engine's keys from everything that must be equal in engines that share KV."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm import envs

from flexkv.adapters.common.common_keys import (
    COMMON,
    SharedModel,
    common_namespace,
    draft_refusal,
    other_config_refusal,
)
from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.identity_table import is_quantised
from flexkv.adapters.common.model_files import (
    code_files,
    file_digest,
    processor_files,
    quantization_files,
)
from flexkv.adapters.common.model_identity import plain_config, rope_choice
from flexkv.adapters.common.weights import resolved_commit, weights_content, weights_identity
from flexkv.adapters.vllm.identity_fields import (
    BACKENDS,
    LOAD,
    LORA,
    MODEL,
    SPECULATIVE,
    environment,
    settings_of,
    unusual_settings,
)
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError, KeySchemeError
from flexkv.weights.files import NAMED, WeightsContent

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

RUN = os.urandom(16).hex()
"""Random digits that distinguish this run of the engine from all others."""

QUANTIZATION_FILE = "quantization_config_file"
"""The entry of `hf_overrides` with the path of a file that describes the quantisation."""

OF_A_PROCESS = frozenset({"ipc_cache", "modelexpress"})
"""Values of `--load-format` with which the engine takes its weights from another process. That process may have read
the weights before the model's files changed, or updated them since."""

MODELS_OF_PARTS = ("text_model_id", "audio_model_id")
"""Entries of a model's configuration that name another model. vLLM reads a part of the weights from that model, in no
particular revision."""

TUNING = "attn_temperature_tuning"
"""Entry of a Llama 4 model's configuration: whether queries are scaled by their position."""

TUNED_ABOVE_TOKENS = 32768
"""vLLM scales a Llama 4 model's queries if requests may have more tokens than this, unless the generation config has
`TUNING`."""

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")


def check_hash(algorithm: str) -> None:
    """Refuses hash functions for which a user could construct two prompts with the same hash.

    Raises:
        KeySchemeError: `algorithm` is such a function; the message says what to set.
    """
    if algorithm not in CRYPTOGRAPHIC_HASHES:
        raise KeySchemeError(
            f"vLLM hashes blocks with prefix_caching_hash_algo={algorithm!r}, with which two prompts can be made to "
            f"share a key and then each other's KV; set --prefix-caching-hash-algo to one of "
            f"{', '.join(CRYPTOGRAPHIC_HASHES)}"
        )


def engine_namespace(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> bytes:
    """Returns the namespace of this engine's keys, 32 bytes. It is equal in all processes that compute equal KV.

    Raises:
        KeySchemeError: the engine's block hashes are not cryptographic.
        ConfigError: nothing identifies the weights, or `keys.scheme` is `common` and other engines could not use this
            engine's pages.
    """
    check_hash(config.cache_config.prefix_caching_hash_algo)
    if not settings.identity.model:
        _check_source(str(config.load_config.load_format))
    if settings.keys.scheme == COMMON:
        return common_namespace(_shared_model(config, geometry, settings), settings)
    return plain_namespace(_fields(config, geometry, settings))


def _check_source(load_format: str) -> None:
    """Refuses load formats with which the engine takes its weights from another process.

    Raises:
        ConfigError: nothing identifies the weights, because they are those of another process.
    """
    if load_format in OF_A_PROCESS:
        raise ConfigError(
            f"--load-format is {load_format}, with which the weights are those of another process and may differ from "
            "the model's files, so nothing identifies them; set identity.model"
        )


def _shared_model(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> SharedModel:
    """Returns the description of the model from which the common key scheme computes the namespace.

    Raises:
        ConfigError: this engine cannot use the common key scheme; the message says why.
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
    """Returns everything on which this engine's KV depends in addition to the fields of `SharedModel`; None if there is
    nothing."""
    seed = _seed_of_weights(config)
    model = config.model_config
    more = unusual_settings(config) | _mistral_files(config) | environment()
    if more := more | _tuning(model) | _library(model, inputs=False) | _files(model, inputs=False):
        return {"vllm": more, "random_weights": seed, "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT)}
    # With batch invariance a user expects the same bits each time, which only vLLM's own kernels give.
    return {"batch_invariant": "vllm", "random_weights": seed} if envs.VLLM_BATCH_INVARIANT else seed


def _seed_of_weights(config: VllmConfig) -> int | str | None:
    """Returns the seed if the weights are random, because only the same seed gives the same weights; None if the
    weights are read from files. If the engine can receive weights while it runs, the random weights are probably
    replaced before the first request, and nothing identifies the new ones. The result is then `RUN`."""
    if str(config.load_config.load_format) != "dummy":
        return None
    return config.model_config.seed if getattr(config, "weight_transfer_config", None) is None else RUN


def _fields(config: VllmConfig, geometry: PoolGeometry, settings: FlexKVConfig) -> dict[str, Any]:
    model, cache = config.model_config, config.cache_config
    speculative = config.speculative_config
    # VLLM_BATCH_INVARIANT selects other kernels, which give different bits.
    mode: dict[str, Any] = {"batch_invariant": True} if envs.VLLM_BATCH_INVARIANT else {}
    mode |= _mistral_files(config) | _tuning(model) | _library(model, inputs=_takes_inputs(model))
    if variables := environment():
        mode["environment"] = variables
    if is_quantised(cache.cache_dtype, *(group.kv_dtype for group in geometry.groups)):
        mode |= _attention(config)
    if geometry.is_hybrid:
        mode["groups"] = [group.signature.hex() for group in geometry.groups]
    first = geometry.groups[0]
    if cache.cache_dtype == "auto" and first.kv_dtype not in ("", str(model.dtype).removeprefix("torch.")):
        # Either the model sets the dtype of its KV, or it has other layers with their own dtype, such as an indexer.
        mode["pool_dtype"] = first.kv_dtype
    return mode | {
        "engine": "vllm",
        # Another version may compute different KV for the same model, or arrange a page's bytes differently.
        "version": vllm_version.partition("+")[0],
        "weights": settings.identity.model or _weights_of(model),
        "random_weights": _seed_of_weights(config),
        "architecture": _architecture(model),
        "files": _files(model, inputs=_takes_inputs(model), named=bool(settings.identity.model)),
        "long_rope": rope_choice(model.hf_text_config.to_dict(), model.max_model_len),
        "settings": settings_of(config),
        "layers": list(first.layer_names),
        "block_tokens": first.block_tokens,
        # The draft model is part of the namespace, because its layers have KV in the same blocks.
        "draft": _draft(speculative, model.seed) if speculative is not None else None,
        "namespace": settings.identity.namespace,
    }


def adapter_settings(config: VllmConfig) -> dict[str, Any]:
    """Returns the settings that, in addition to an adapter's content, determine the KV of requests with the adapter, as
    plain values. Empty if the engine has no adapters."""
    lora = getattr(config, "lora_config", None)
    return LORA.values(lora) if lora is not None else {}


def _takes_inputs(model: ModelConfig) -> bool:
    """Whether requests may have images or other inputs in addition to their tokens."""
    return getattr(model, "multimodal_config", None) is not None


def _attention(config: VllmConfig) -> dict[str, Any]:
    """Returns the attention backends that the user chose, for quantised KV, because some backends then quantise the
    queries too; empty if the user chose none."""
    owner = getattr(config, "attention_config", None)
    chosen = {name: getattr(owner, name, None) for name in BACKENDS}
    said = {name: str(value) for name, value in chosen.items() if value}
    return {"attention": said} if said else {}


def _architecture(model: ModelConfig) -> Any:
    """Returns the model's configuration, including overrides: only the text model's or, if the model takes images or
    other inputs, all of it."""
    whole = model.hf_config if _takes_inputs(model) else model.hf_text_config
    said = plain_config(whole.to_dict())
    if getattr(model, "model_impl", None) != "transformers":
        # vLLM's own model class does not read this entry. It overwrites the entry, but only in the process that loads
        # the model.
        for part in (said, said.get("text_config")):
            if isinstance(part, dict):
                part.pop(TUNING, None)
    return said


def _tuning(model: ModelConfig) -> dict[str, bool]:
    """Returns whether vLLM scales a Llama 4 model's queries by their position, which changes the KV of later layers;
    empty for other models."""
    if TUNING not in model.hf_text_config.to_dict():
        return {}
    said = model.try_get_generation_config() | model.override_generation_config
    return {TUNING: bool(said.get(TUNING, model.max_model_len > TUNED_ABOVE_TOKENS))}


def _mistral_files(config: VllmConfig) -> dict[str, str]:
    """Returns an entry that says that vLLM reads Mistral's weights files; empty if vLLM does not read them. With
    `load_format` auto, it reads them if the model's folder has any, even beside other weights files."""
    is_auto = str(config.load_config.load_format) == "auto"
    folder = Path(str(config.model_config.model))
    return {"weights_files": "mistral"} if is_auto and any(folder.glob("consolidated*.safetensors")) else {}


def _library(model: ModelConfig, inputs: bool) -> dict[str, str]:
    """Returns the version of transformers if its code computes the model, or processes images and other inputs; empty
    if vLLM's code does all.

    Args:
        inputs: whether requests may have images or other inputs.
    """
    is_model = getattr(model, "using_transformers_backend", None)
    return {"transformers": version("transformers")} if inputs or (is_model and is_model()) else {}


def _files(model: ModelConfig, inputs: bool, named: bool = False) -> dict[str, Any]:
    """Returns the digests of files beside the weights whose content determines KV, by purpose; empty if there are none.

    Args:
        inputs: whether requests may have images or other inputs, so that the processor's files count.
        named: whether the user has named the weights (`identity.model`), so that the namespace contains no commit.
    """
    path, revision = str(model.model), resolved_commit(model) or model.revision
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    found: dict[str, Any] = {}
    if getattr(model, "quantization", None) is not None:
        found["quantization"] = quantization_files(path, revision, named)
    if file := overrides.get(QUANTIZATION_FILE):
        found["quantization of hf_overrides"] = file_digest(str(file))
    if getattr(model, "trust_remote_code", False):
        found["code"] = code_files(path, revision, named)
        if (config_path := model.hf_config_path) and config_path != model.model:
            commit = getattr(model.hf_text_config, "_commit_hash", None)
            found["code of hf_config_path"] = code_files(str(config_path), commit, named=True)
    if inputs:
        found["processor"] = processor_files(path, revision, named)
        scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
        found["encoder scales"] = file_digest(str(scales)) if scales else None
    return {name: content for name, content in found.items() if content}


def engine_weights(config: VllmConfig, settings: FlexKVConfig) -> WeightsContent:
    """Returns the weights of which the namespace contains only samples: the model's, and those of a draft model, whose
    layers have KV in the same blocks."""
    model, speculative = config.model_config, config.speculative_config
    named = settings.identity.model or str(config.load_config.load_format) == "dummy"
    content = NAMED if named else weights_content(*_place_of(model))
    if not named and (elsewhere := _elsewhere(config)):
        unnamed = f"some of the weights come from {elsewhere}, which may change; set identity.model"
        content = content.joined(WeightsContent(unnamed=unnamed))
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or draft.model == model.model:
        return content
    return content.joined(weights_content(*_place_of(draft)))


def _elsewhere(config: VllmConfig) -> str:
    """Returns the sources of weights that vLLM does not read from the model's folder or repository; empty if there are
    none."""
    load, model = config.load_config, config.model_config.hf_config
    if str(load.load_format) == "tensorizer":
        extra = getattr(load, "model_loader_extra_config", None) or {}
        return str(extra.get("tensorizer_uri") or extra.get("tensorizer_dir") or "tensorizer's file")
    return ", ".join(str(name) for entry in MODELS_OF_PARTS if (name := getattr(model, entry, None)))


def _weights_of(model: ModelConfig) -> str:
    return weights_identity(*_place_of(model))


def _place_of(model: ModelConfig) -> tuple[str, str | None, str]:
    """Returns the model, its revision and its commit. If no commit is known, returns the revision's name in place of
    the commit: without one, `weights_identity` would raise an error, and no setting can name a draft's weights.
    `weights_content` then treats the weights as changeable."""
    return model.model, model.revision, resolved_commit(model) or model.revision or "default"


def _draft(speculative: SpeculativeConfig, seed: int) -> dict[str, Any]:
    """Returns the settings of speculative decoding and, if drafts come from a model, the model's weights, shape and
    dtypes.

    Args:
        seed: the seed of random weights.
    """
    draft, load = speculative.draft_model_config, getattr(speculative, "draft_load_config", None)
    said: dict[str, Any] = SPECULATIVE.values(speculative)
    if draft is None:
        said["model"] = str(speculative.model)
    else:
        is_random = load is not None and str(load.load_format) == "dummy"
        said |= {
            "weights": _weights_of(draft),
            "random_weights": seed if is_random else None,
            "architecture": plain_config(draft.hf_text_config.to_dict()),
            "files": _files(draft, inputs=False),
            "settings": MODEL.values(draft),
            # A draft without its own load configuration is loaded with the model's.
            "load": LOAD.values(load) if load is not None else None,
        }
    return said
