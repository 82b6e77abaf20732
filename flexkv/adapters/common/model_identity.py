"""What of a model's configuration decides its KV."""

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
"""Entries of a model's configuration that say where it was read from, and with what, not what it computes."""

LONG_ROPE = ("longrope", "su")
"""Rotary embeddings with one set of factors for short requests and another for long ones, by name."""

FIRST_LENGTH = "original_max_position_embeddings"
"""Tokens up to which the short factors hold."""


def plain_config(value: Any) -> Any:
    """A configuration as plain values, alike in every process, without what does not change a model's KV."""
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
    # An engine's plugin may have settings of a class of its own, which can say what they are.
    if not isinstance(value, type) and callable(digest := getattr(value, "compute_hash", None)):
        return str(digest())
    # Python writes an address into the name of a function, and another one in every process.
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return str(value)


def has_long_rope(config: Mapping[str, Any]) -> bool:
    """Whether the KV of a token depends on how long requests are, as Phi-3's with 128k tokens does."""
    return any(value in LONG_ROPE for value in _values(config, ("rope_type", "type")))


def long_rope_choice(config: Mapping[str, Any], longest: int) -> Any:
    """Which factors an engine takes that chooses once, by the longest request it allows; None without a choice.

    Args:
        longest: request, in tokens.
    """
    if not has_long_rope(config):
        return None
    first_lengths = sorted({value for value in _values(config, (FIRST_LENGTH,)) if isinstance(value, int)})
    return [longest > tokens for tokens in first_lengths] or longest


def _values(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Of all entries with one of these names, however deep."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in names:
                yield value
            yield from _values(value, names)
