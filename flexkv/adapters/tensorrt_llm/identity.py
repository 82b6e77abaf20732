"""Namespaces, which decide which requests may share a block: the engine's, and within it that of a request's salt and
adapter.
"""

from __future__ import annotations

import os
from typing import Any

from flexkv.adapters.common.common_keys import COMMON, SharedModel, common_namespace, draft_refusal
from flexkv.adapters.common.framed import framed, plain_namespace
from flexkv.adapters.common.model_files import code_files, quantization_files
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.weights import weights_content, weights_identity
from flexkv.adapters.tensorrt_llm.api import engine_version
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.cache.keys import namespace_digest
from flexkv.config import FlexKVConfig
from flexkv.weights.files import NAMED, WeightsContent

RUN = os.urandom(16)
"""Random bytes that tell this run from all others."""

DEFAULT_REVISION = "default"
"""Revision of a draft model given by its hub name. Nothing says which commit is meant, so this names no weights."""

NOT_IN_TOKENS = (
    "multimodal_hashes",
    "multimodal_embedding",
    "mrope_rotary_cos_sin",
    "prompt_embedding_table",
    "encoder_input_features",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
)
"""Attributes of a request whose KV depends on more than its tokens. Different images may have equal placeholder tokens,
so such a request is neither looked up nor stored."""


def engine_namespace(
    arguments: EngineArguments, settings: FlexKVConfig, block_tokens: int, pool_dtype: str = ""
) -> bytes:
    """32 bytes, equal in all processes that would compute equal KV.

    Args:
        pool_dtype: dtype of the pool's elements, by name.

    Raises:
        ConfigError: nothing identifies the weights, or other engines could not share this one's pages.
    """
    weights = settings.identity.model or weights_identity(arguments.model, arguments.revision)
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
        )
        return common_namespace(shared, settings)
    # Where the user names the weights, the key has no commit for the files beside them.
    place = (arguments.model, arguments.revision, bool(settings.identity.model))
    fields: dict[str, Any] = {
        "engine": "tensorrt-llm",
        # Another version may compute different KV for the same model.
        "version": engine_version(),
        "weights": weights,
        "architecture": plain_config(dict(arguments.architecture)),
        "overrides": plain_config(dict(arguments.overrides)),
        "block_tokens": block_tokens,
        "draft": arguments.draft,
        **arguments.in_key,
        "files": {
            "quantization": quantization_files(*place),
            "code": code_files(*place) if arguments.remote_code else {},
        },
        "run": RUN if arguments.random_weights else None,
        "namespace": settings.identity.namespace,
    }
    if arguments.draft_model:
        # The draft model's path says nothing about its content.
        fields["draft_weights"] = weights_identity(arguments.draft_model, None, DEFAULT_REVISION)
    return plain_namespace(fields)


def engine_weights(arguments: EngineArguments, settings: FlexKVConfig) -> WeightsContent:
    """The weights that the namespace names only by samples: the model's, and those of a draft model, which may have
    layers in the same pool.
    """
    content = NAMED
    if not settings.identity.model:
        content = weights_content(arguments.model, arguments.revision)
    if not arguments.draft_model:
        return content
    return content.joined(weights_content(arguments.draft_model, None, DEFAULT_REVISION))


def request_namespace(engine: bytes, request: Any) -> bytes | None:
    """The namespace of one request's keys; None if its KV depends on more than the keys express.

    The engine knows an adapter by a number that says nothing about its content, so the pages of a request with an
    adapter serve only this run.
    """
    if any(getattr(request, name, None) is not None for name in NOT_IN_TOKENS):
        return None
    # The engine's own caches use the salt's number, and during a lookup a request knows only this number of its salt.
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
