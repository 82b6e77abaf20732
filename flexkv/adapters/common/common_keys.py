"""The common key scheme: a namespace that names what decides KV and no engine, so that engines find each other's pages.

The keys in it are those of the token chain (`flexkv.cache.keys.TokenChain`), which is SGLang's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.model_identity import LONG_ROPE, has_long_rope, plain_config
from flexkv.adapters.common.weights import COMMIT_PREFIX
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError

COMMON = "common"
"""`keys.scheme` of this module."""

PLAIN_DTYPES = ("float32", "float16", "bfloat16")
"""KV whose numbers say all. Quantised ones mean nothing without scales, which engines keep outside of pages."""

HUB_COMMIT = re.compile(r"hub:[^/:@]+(?:/[^/:@]+)?(?P<inside>.*)@(?P<commit>[0-9a-f]{40})")
"""Behind the repository's name may follow which of its models is meant, such as `:Q4_K_M`."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What an engine says of its model, in words that all engines share.

    Attributes:
        path: folder or hub name.
        weights: `weights_identity` of it.
        kv_dtype: of the elements of K and V, by name.
        quantization: of the weights, by name; "None" for none.
        block_tokens: of a block.
        overrides: of the model's configuration, as the engine was asked for them.
        config: of the model, as the engine has read it.
        apart: whatever else its KV depends on, or a unit holds of it; None where nothing does.
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
    """32 bytes, the same in every engine that would compute the same KV.

    Raises:
        ConfigError: the KV is quantised, engines would compute it by different rules, or nothing pins the weights
            down; says what to set.
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
    fields = {
        "scheme": "token chain, sha256",
        "weights": weights,
        "architecture": None if weights.startswith(COMMIT_PREFIX) else _architecture(model.path),
        "overrides": plain_config(dict(model.overrides)),
        "kv_dtype": model.kv_dtype,
        "quantization": model.quantization,
        "block_tokens": model.block_tokens,
        "apart": model.apart,
        "namespace": settings.identity.namespace,
    }
    return plain_namespace(fields)


def draft_refusal(method: str) -> ConfigError:
    """What an engine with speculative decoding is to raise."""
    return _refusal(
        f"speculative decoding ({method}) keeps KV of the draft in the same blocks, or pairs of tokens in the hashes"
    )


def other_config_refusal(option: str, path: str) -> ConfigError:
    """What an engine is to raise that reads the model's configuration elsewhere than beside its weights."""
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
    # One engine may be given the hub's name and another the folder of the same commit.
    return f"{COMMIT_PREFIX}{commit['commit']}{commit['inside']}"


def _architecture(path: str) -> Any:
    """What the model's own file says; engines' libraries add to it each in its way.

    Raises:
        ConfigError: it is damaged.
    """
    file = Path(path) / "config.json"
    try:
        return plain_config(json.loads(file.read_text())) if file.is_file() else None
    except ValueError as error:
        raise _refusal(f"{file} is no JSON: {error}") from error


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"keys.scheme=common: {reason}. Other engines would take its pages for theirs; use keys.scheme=engine"
    )
