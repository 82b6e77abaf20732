"""The part of a model's configuration that decides its KV."""

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
"""Entries of a model's configuration that say where and with what it was read, not what it computes."""

LONG_ROPE = ("longrope", "su")
"""Rotary embeddings with one set of factors for short requests and another for long ones, by name."""

FIRST_LENGTH = "original_max_position_embeddings"
"""The entry with the number of tokens up to which the short factors apply."""


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
    # A plugin of the engine may keep settings in its own class, which can compute their digest.
    if not isinstance(value, type) and callable(digest := getattr(value, "compute_hash", None)):
        return str(digest())
    # The text of a function has an address in it, which differs in every process.
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return str(value)


def has_long_rope(config: Mapping[str, Any]) -> bool:
    """Whether a token's KV depends on the length of requests, as in Phi-3 with 128k tokens."""
    return any(value in LONG_ROPE for value in _values(config, ("rope_type", "type")))


def long_rope_choice(config: Mapping[str, Any], longest: int) -> Any:
    """The choice of factors in an engine that chooses once, by the longest request it allows; None without `LONG_ROPE`.

    Args:
        longest: tokens of the longest request.
    """
    if not has_long_rope(config):
        return None
    first_lengths = sorted({value for value in _values(config, (FIRST_LENGTH,)) if isinstance(value, int)})
    return [longest > tokens for tokens in first_lengths] or longest


def _values(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """The values of all entries with one of these names, at any depth of mappings."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in names:
                yield value
            yield from _values(value, names)
