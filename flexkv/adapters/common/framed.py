"""Encodes plain values (numbers, texts, lists, dictionaries) as bytes, for keys and namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexkv.cache.keys import namespace_digest


def plain_namespace(fields: Mapping[str, Any]) -> bytes:
    """The namespace made from plain values, 32 bytes.

    Raises:
        TypeError: the type of a value has no stable encoding; see `framed`.
    """
    return namespace_digest({name: framed(value) for name, value in fields.items()})


def framed(value: Any) -> bytes:
    """Encodes a value as kind, length and content. Different values never give the same bytes, except that a list and a
    tuple of the same items do.

    Raises:
        TypeError: the value's type has no stable encoding.
    """
    if value is None:
        return _frame(b"N", b"")
    if isinstance(value, bool):
        return _frame(b"B", bytes([value]))
    if isinstance(value, int):
        return _frame(b"I", str(value).encode())
    if isinstance(value, float):
        return _frame(b"F", value.hex().encode())
    if isinstance(value, str):
        return _frame(b"S", value.encode())
    if isinstance(value, bytes):
        return _frame(b"Y", value)
    if isinstance(value, (tuple, list)):
        return _frame(b"T", b"".join(framed(item) for item in value))
    if isinstance(value, dict):
        items = sorted((framed(key), framed(item)) for key, item in value.items())
        return _frame(b"D", b"".join(key + item for key, item in items))
    raise TypeError(f"{type(value).__name__} has no stable form in a key: {value!r}")


def _frame(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content
