"""What of a model's configuration decides its KV."""

from __future__ import annotations

from typing import Any

VOLATILE_FIELDS = {
    "_name_or_path",
    "transformers_version",
    "_commit_hash",
    "_attn_implementation",
    "torch_dtype",
}
"""Entries of a model's configuration that say where it was read from, and with what, not what it computes."""


def plain_config(value: Any) -> Any:
    """A model's configuration as plain values, without what does not change its KV."""
    if isinstance(value, dict):
        return {str(key): plain_config(item) for key, item in value.items() if key not in VOLATILE_FIELDS}
    if isinstance(value, (list, tuple)):
        return [plain_config(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return str(value)
