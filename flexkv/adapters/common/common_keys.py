"""The common key scheme: its namespace contains everything that determines the KV except the engine, so that different
engines share pages.

Blocks are hashed with the token chain of `flexkv.cache.keys.TokenChain`, which SGLang computes too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.model_files import model_config
from flexkv.adapters.common.model_identity import LONG_ROPE, has_long_rope, plain_config
from flexkv.adapters.common.weights import COMMIT_PREFIX
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError

COMMON = "common"
"""The value of `keys.scheme` that selects this module."""

PLAIN_DTYPES = ("float32", "float16", "bfloat16")
"""KV dtypes whose values can be read without further data. Quantised values need scales, which engines keep outside the
pages."""

HUB_COMMIT = re.compile(r"hub:[^/:@]+(?:/[^/:@]+)?(?P<inside>.*)@(?P<commit>[0-9a-f]{40})")
"""A model's name on Hugging Face's hub, with its commit. The regex group `inside` selects one of the repository's
models, such as `:Q4_K_M`."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """An engine's model, described in terms that all engines share.

    Attributes:
        path: the model's folder or hub name.
        weights: the model's `weights_identity`.
        kv_dtype: name of the dtype of K and V.
        quantization: name of the quantisation of the weights; "None" if they are not quantised.
        block_tokens: tokens per block.
        overrides: entries of the model's configuration that the user overrode in the engine's arguments.
        config: the model's configuration as the engine read it.
        apart: anything else on which the KV depends, and the unit's share of the KV, as a plain value. None if the KV
            depends on nothing else and the unit holds all of it.
    """

    path: str
    weights: str
    kv_dtype: str
    quantization: str
    block_tokens: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    apart: Any = None


def common_namespace(model: SharedModel, settings: FlexKVConfig) -> bytes:
    """The namespace of the common key scheme: 32 bytes, equal for all engines that would compute equal KV.

    Raises:
        ConfigError: the KV is quantised, engines would compute it by different rules, or the weights cannot be
            identified reliably. The message says what to set.
    """
    if model.kv_dtype not in PLAIN_DTYPES:
        raise _refusal(
            f"the KV is {model.kv_dtype}: its numbers mean nothing without scales that no page holds; "
            f"allowed are {', '.join(PLAIN_DTYPES)}"
        )
    if has_long_rope(model.config) or has_long_rope(model.overrides):
        raise _refusal(
            f"the model's rotary embedding is one of {', '.join(LONG_ROPE)}: vLLM takes its long factors by the "
            "longest request allowed, SGLang by the positions in a batch, so the same tokens have different KV"
        )
    weights = _weights(model, settings)
    config = {} if weights.startswith(COMMIT_PREFIX) else model_config(model.path)
    fields = {
        "scheme": "token chain, sha256",
        "weights": weights,
        # The configuration is read from the model's own file, because each engine's library adds entries to the
        # configuration that it reads.
        "architecture": plain_config(config) if config else None,
        "overrides": plain_config(dict(model.overrides)),
        "kv_dtype": model.kv_dtype,
        "quantization": model.quantization,
        "block_tokens": model.block_tokens,
        "apart": model.apart,
        "namespace": settings.identity.namespace,
    }
    return plain_namespace(fields)


def draft_refusal(method: str) -> ConfigError:
    """The error to raise for an engine that uses speculative decoding."""
    return _refusal(
        f"speculative decoding ({method}) keeps KV of the draft in the same blocks, or pairs of tokens in the hashes"
    )


def other_config_refusal(option: str, path: str) -> ConfigError:
    """The error to raise for an engine that reads a configuration other than the one beside the model's weights."""
    return _refusal(
        f"{option}={path} is another configuration than the model's own, by which engines are compared"
    )


def _weights(model: SharedModel, settings: FlexKVConfig) -> str:
    if settings.identity.model:
        return f"named:{settings.identity.model}"
    if not model.weights.startswith("hub:"):
        return model.weights
    if (commit := HUB_COMMIT.fullmatch(model.weights)) is None:
        raise _refusal(
            f"the weights are {model.weights}, which may move; set identity.model, or a commit as revision"
        )
    # The name of the repository is left out: one engine may be started with the hub name, and another with the folder
    # of the same commit.
    return f"{COMMIT_PREFIX}{commit['commit']}{commit['inside']}"


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"keys.scheme=common: {reason}. Other engines would take its pages for theirs; use keys.scheme=engine"
    )
