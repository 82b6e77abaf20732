"""What one token of a model takes in the cache, from its configuration; so that tiers can be sized before a start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexkv.config.names import shown
from flexkv.config.values import MAX_COUNT
from flexkv.errors import ConfigError
from flexkv.unit.capacity import PromptLimit, TierCapacity

BLOCK_TOKENS = 16
"""The block that engines take on a GPU unless they are told another."""
SLOT_MULTIPLE_BYTES = 4096
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """
    Attributes:
        token_bytes: of K and V, or of the latent, in all layers, in the type that the weights are in.
        prompt_tokens: the longest prompt that the model takes.
    """

    token_bytes: int
    prompt_tokens: int

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """
        Raises:
            ConfigError: there is no configuration, or it does not say what a token takes.
        """
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text())
            return cls._of(config.get("text_config", config))
        except OSError as error:
            raise ConfigError(f"--model: {file} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--model: {file} cannot be read: {error}") from error
        except (KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"--model: {file} does not say what a token takes: {error}") from error

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
        token_bytes = _count(config, "num_hidden_layers") * elements * ELEMENT_BYTES[dtype]
        return cls(token_bytes, _count(config, "max_position_embeddings"))

    @property
    def limit(self) -> PromptLimit:
        return PromptLimit(self.prompt_tokens, "max_position_embeddings")

    def host_tier(self, host_bytes: int) -> TierCapacity:
        """What so much host memory holds."""
        block_bytes = -(-BLOCK_TOKENS * self.token_bytes // SLOT_MULTIPLE_BYTES) * SLOT_MULTIPLE_BYTES
        return TierCapacity("host tier", host_bytes // block_bytes, BLOCK_TOKENS, block_bytes, "host.bytes")


def _count(config: dict[str, Any], name: str) -> int:
    """
    Raises:
        KeyError: it is missing.
        TypeError: it is no whole number from 1 to MAX_COUNT.
    """
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise TypeError(f"{name} is {shown(value)}; expected a whole number from 1 to {MAX_COUNT}")
    return value
