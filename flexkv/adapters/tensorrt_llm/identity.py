"""Makes the namespaces, which determine which requests may share a block: one for the engine, and within it one for
each salt and adapter that requests use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flexkv.adapters.common.common_keys import COMMON, SharedModel, common_namespace, draft_refusal
from flexkv.adapters.common.framed import framed, plain_namespace
from flexkv.adapters.common.loader_settings import USUAL
from flexkv.adapters.common.model_files import code_files, quantization_files
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.weights import NO_COMMIT, weights_content, weights_identity
from flexkv.adapters.tensorrt_llm.api import engine_version
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.cache.keys import namespace_digest
from flexkv.config import FlexKVConfig
from flexkv.weights.files import NAMED, WeightsContent

RUN = os.urandom(16)
"""Random bytes that distinguish this run of the engine from all others."""

NOT_IN_TOKENS = (
    "multimodal_hashes",
    "multimodal_embedding",
    "mrope_rotary_cos_sin",
    "prompt_embedding_table",
    "encoder_input_features",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
)
"""Attributes of a request. If any of them is set, the request's KV depends on more than its tokens (different images
may have equal placeholder tokens), so the request is neither looked up nor stored."""


def engine_namespace(
    arguments: EngineArguments, settings: FlexKVConfig, block_tokens: int, pool_dtype: str = ""
) -> bytes:
    """The engine's namespace: 32 bytes, equal in all processes that would compute equal KV.

    Args:
        pool_dtype: name of the dtype of the pool's elements; only the common key scheme uses it.

    Raises:
        ConfigError: nothing identifies the weights, or the settings demand the common key scheme and other engines
            could not share this engine's pages.
    """
    weights = settings.identity.model or weights_identity(arguments.model, arguments.revision)
    # The last item is whether the user names the weights. If so, the key does not contain the commit, which would also
    # identify the files beside the weights.
    place = (arguments.model, arguments.revision, bool(settings.identity.model))
    files = {
        "quantization": quantization_files(*place),
        "code": code_files(*place) if arguments.remote_code else {},
    }
    if settings.keys.scheme == COMMON:
        if arguments.draft:
            raise draft_refusal(arguments.draft)
        shared = SharedModel(
            path=arguments.model,
            weights=weights,
            kv_dtype=pool_dtype,
            quantization=arguments.quant_algo,
            block_tokens=block_tokens,
            overrides=arguments.overrides,
            config=arguments.architecture,
            apart=_apart(arguments, files) or None,
        )
        return common_namespace(shared, settings)
    fields: dict[str, Any] = {
        "engine": "tensorrt-llm",
        # A different version of TensorRT-LLM may compute different KV for the same model.
        "version": engine_version(),
        "weights": weights,
        "architecture": plain_config(dict(arguments.architecture)),
        "overrides": plain_config(dict(arguments.overrides)),
        "block_tokens": block_tokens,
        "draft": arguments.draft,
        **arguments.in_key,
        "files": files,
        "run": RUN if arguments.random_weights else None,
        "namespace": settings.identity.namespace,
    }
    if arguments.attention:
        fields["attention"] = dict(arguments.attention)
    if arguments.draft_model:
        # `arguments.draft` contains only the draft model's path, which says nothing about its content.
        fields["draft_weights"] = weights_identity(arguments.draft_model, None, NO_COMMIT)
    return plain_namespace(fields)


def _apart(arguments: EngineArguments, files: Mapping[str, Any]) -> dict[str, Any]:
    """Everything on which the KV depends in addition to the other fields of `SharedModel`; empty if there is nothing.

    Args:
        files: the content of the files beside the weights, by purpose; empty for a purpose without files.
    """
    found: dict[str, Any] = {"run": RUN.hex()} if arguments.random_weights else {}
    if arguments.attention:
        found["attention"] = dict(arguments.attention)
    if read := {name: content for name, content in files.items() if content}:
        found["files"] = read
    settings = dict(arguments.in_key.get("settings", {}))
    usual = {"load_format": (USUAL, "dummy"), "checkpoint_format": (None, "HF")}
    other = {name: settings.pop(name, None) for name in usual}
    found |= {name: value for name, value in other.items() if value is not None and value not in usual[name]}
    # The remaining settings select kernels, some of which quantise their inputs if the weights are quantised.
    if (
        arguments.quant_algo != "None"
        or files["quantization"]
        or "quantization_config" in arguments.architecture
    ):
        found |= {name: value for name, value in settings.items() if value not in (None, "AUTO")}
    return found


def engine_weights(arguments: EngineArguments, settings: FlexKVConfig) -> WeightsContent:
    """The weights that the namespace identifies only by samples of their content: the model's, and those of a draft
    model, which may have layers in the same pool.
    """
    content = NAMED
    if not settings.identity.model:
        content = weights_content(arguments.model, arguments.revision)
    if not arguments.draft_model:
        return content
    return content.joined(weights_content(arguments.draft_model, None, NO_COMMIT))


def request_namespace(engine: bytes, request: Any) -> bytes | None:
    """The namespace of one request's keys; None if the request's KV depends on more than keys can express.

    The engine identifies a LoRA adapter by a number that says nothing about the adapter's content. So the pages of a
    request with an adapter are found only in this run of the engine.
    """
    if any(getattr(request, name, None) is not None for name in NOT_IN_TOKENS):
        return None
    # The engine's number for the salt is preferred, because during a lookup the request has only the number, not the
    # salt itself. The engine's own caches use the number too.
    salt = getattr(request, "cache_salt_id", None)
    if salt is None:
        salt = getattr(request, "cache_salt", None)
    adapter = getattr(request, "lora_task_id", None)
    if salt is None and adapter is None:
        return engine
    fields = {"engine": engine, "salt": framed(salt), "adapter": framed(adapter)}
    if adapter is not None:
        fields["run"] = RUN
    return namespace_digest(fields)
