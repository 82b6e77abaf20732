"""Extracts the entries of a model's configuration that determine its KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

VOLATILE_FIELDS = {
    "_name_or_path",
    "transformers_version",
    "_commit_hash",
    "_attn_implementation",
    "torch_dtype",
}
"""Entries of a model's configuration that never enter a key: they describe how the model was loaded, not its
computation."""

LONG_ROPE = ("longrope", "su")
"""Names of the rotary embeddings that have one set of factors for short requests and another set for long requests."""

DYNAMIC_ROPE = "dynamic"
"""Name of the rotary embeddings that are scaled by a maximum length. Some of vLLM's models take this length from the
longest request that the engine allows (PLaMo 3, MiniMax-M2), others from their configuration."""

FIRST_LENGTH = "original_max_position_embeddings"
"""Entry of a model's configuration with the number of tokens up to which the factors for short requests apply."""


def plain_config(value: Any) -> Any:
    """A configuration as plain values, the same in every process, without `VOLATILE_FIELDS`."""
    if isinstance(value, Mapping):
        return {str(key): plain_config(item) for key, item in value.items() if key not in VOLATILE_FIELDS}
    if isinstance(value, (list, tuple)):
        return [plain_config(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain_config(getattr(value, item.name)) for item in fields(value)}
    # A plugin of the engine may keep its settings in an object of its own class that can compute their digest.
    if not isinstance(value, type) and callable(digest := getattr(value, "compute_hash", None)):
        return str(digest())
    # str() of a function contains its address, which differs in every process.
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return str(value)


def has_long_rope(config: Mapping[str, Any]) -> bool:
    """Whether the model's rotary embedding is one of LONG_ROPE (as in Phi-3 with 128k tokens), so that a token's KV
    depends on the length of requests."""
    return any(value in LONG_ROPE for value in _rope_types(config))


def rope_choice(config: Mapping[str, Any], longest: int) -> Any:
    """What an engine chooses for the model's rotary embedding, once and according to the longest request that it
    allows. None if it chooses nothing.

    Args:
        longest: number of tokens of the longest request.

    Returns:
        For a rotary embedding in `LONG_ROPE`: for each value of FIRST_LENGTH in the configuration, ascending, whether
        the factors for long requests are used. `longest` if the configuration has no such value, or if the rotary
        embedding is DYNAMIC_ROPE.
    """
    if has_long_rope(config):
        first_lengths = sorted(
            {value for value in _values(config, (FIRST_LENGTH,)) if isinstance(value, int)}
        )
        return [longest > tokens for tokens in first_lengths] or longest
    return longest if DYNAMIC_ROPE in _rope_types(config) else None


def _rope_types(config: Mapping[str, Any]) -> list[Any]:
    return list(_values(config, ("rope_type", "type")))


def _values(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yields the values of all entries with one of these names, at any depth of nested mappings."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in names:
                yield value
            yield from _values(value, names)
