"""Computes from a model's configuration how many bytes a token takes in the cache, to size tiers before a start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexkv.config.names import shown
from flexkv.config.values import MAX_COUNT
from flexkv.errors import ConfigError
from flexkv.facts.ranks import KvGroup
from flexkv.unit.capacity import PromptLimit, TierCapacity

BLOCK_TOKENS = 16
"""The block size that engines choose on a GPU unless they are configured otherwise."""
SLOT_MULTIPLE_BYTES = 4096
MOST_LAYERS = 10_000
"""The largest number of layers that is accepted. No model has as many, and a larger number in a damaged file would
exhaust memory."""
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SEEN = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Maps each kind of layer that sees a limited number of tokens to the configuration key with that number."""
STATES = ("full_attention_interval", "attn_layer_period", "mamba_d_state", "conv_L_cache")
"""Configuration keys that show recurrent states in models whose configuration does not list each layer's kind."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The bytes that a token of a model takes in the cache, and the tokens of its longest prompt.

    Attributes:
        token_bytes: bytes of K and V, or of MLA's latent, in all layers, in the weights' dtype. If a layer sees only a
            window or a chunk, its bytes are those of the window or chunk, spread over the longest prompt.
        prompt_tokens: tokens of the longest prompt.
    """

    token_bytes: int
    prompt_tokens: int

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """Reads `config.json` in the model's folder.

        Raises:
            ConfigError: there is no such file, or it does not say how many bytes a token takes.
        """
        file = folder / "config.json"
        try:
            if file.exists() and not file.is_file():  # reading a pipe would wait for a writer
                raise ConfigError(f"--model: {file} is not a file")
            config = json.loads(file.read_text())
            if not isinstance(config, dict):
                raise TypeError(f"it is {shown(config)}; expected a mapping")
            return cls._of(config.get("text_config", config))
        except OSError as error:
            raise ConfigError(f"--model: {file} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--model: {file} cannot be read: {error}") from error
        except (KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"--model: {file} does not say what a token takes: {error.args[0]}") from error

    @classmethod
    def _of(cls, config: dict[str, Any]) -> ModelSize:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        if dtype not in ELEMENT_BYTES:
            raise KeyError(f"type {dtype!r}")
        if "kv_lora_rank" in config:
            elements = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")
        else:
            queries = _count(config, "num_attention_heads")
            heads = (
                queries
                if config.get("num_key_value_heads") is None
                else _count(config, "num_key_value_heads")
            )
            if config.get("head_dim") is None:
                hidden = _count(config, "hidden_size")
                if hidden < queries:
                    raise TypeError(f"hidden_size {hidden} is less than num_attention_heads {queries}")
                size = hidden // queries
            else:
                size = _count(config, "head_dim")
            elements = 2 * heads * size
        longest = _count(config, "max_position_embeddings")
        layer_tokens = sum(_seen_tokens(config, kind, longest) for kind in _layer_kinds(config))
        return cls(-(-layer_tokens * elements * ELEMENT_BYTES[dtype] // longest), longest)

    @property
    def limit(self) -> PromptLimit:
        return PromptLimit(self.prompt_tokens, "max_position_embeddings")

    def host_tier(self, host_bytes: int) -> TierCapacity:
        """Returns how much of this model a host tier of `host_bytes` bytes can hold."""
        block_bytes = -(-BLOCK_TOKENS * self.token_bytes // SLOT_MULTIPLE_BYTES) * SLOT_MULTIPLE_BYTES
        return TierCapacity(
            "host tier", host_bytes // block_bytes, (KvGroup(BLOCK_TOKENS),), block_bytes, "host.bytes"
        )


def _layer_kinds(config: dict[str, Any]) -> list[str]:
    layers, kinds = _count(config, "num_hidden_layers", MOST_LAYERS), config.get("layer_types")
    if kinds is None:
        if named := [name for name in STATES if name in config]:
            raise KeyError(f"{named[0]} is of a model with recurrent states, and nothing tells their size")
        # In model families with `use_sliding_window` the window may be off. In others, it applies to all layers.
        sliding = config.get("sliding_window") is not None and "use_sliding_window" not in config
        return ["sliding_attention" if sliding else "full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise TypeError(f"layer_types is {shown(kinds)}; expected a list of {layers}")
    return kinds


def _seen_tokens(config: dict[str, Any], kind: Any, longest: int) -> int:
    """Returns how many tokens of the longest prompt a layer must keep so that all of the prompt can be a hit."""
    if kind == "full_attention":
        return longest
    if kind not in SEEN:
        raise KeyError(f"layer_types has {shown(kind)}, and nothing tells what such a layer keeps")
    return min(longest, _count(config, SEEN[kind]))


def _count(config: dict[str, Any], name: str, most: int = MAX_COUNT) -> int:
    """Returns the number `name` of the configuration.

    Raises:
        KeyError: the configuration has no `name`.
        TypeError: its value is not a whole number from 1 to `most`.
    """
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise TypeError(f"{name} is {shown(value)}; expected a whole number from 1 to {most}")
    return value
