"""Block keys: which requests may share a block, and how an engine's own keys (or its tokens) become index keys.

A key is H(namespace | group | engine key), every field framed by its length, so that no two different inputs give the
same bytes. All hashing is SHA-256 in the native core: with unkeyed or short hashes one tenant can make another's key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import EngineKeyChain, TokenChain, sha256, tail_keys
from flexkv.cache.base import TailCandidates
from flexkv.errors import KeySchemeError
from flexkv.facts.keys import Keys

__all__ = [
    "EngineKeyChain",
    "TokenChain",
    "chain_seed",
    "named_mark",
    "namespace_digest",
    "tail_candidates",
    "tail_key",
]

Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint32]

_LABEL = b"flexkv namespace v1"
_MARK_LABEL = b"flexkv namespace mark v1"
_MARK_BYTES = 2
_SEED_LABEL = b"sglang-cache-namespace-v1"
_MAX_FIELD_BYTES = 2**32 - 1


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def _typed(name: str, value: bytes | str | int) -> bytes:
    if isinstance(value, bytes):
        tag, content = b"b", value
    elif isinstance(value, str):
        tag, content = b"s", value.encode()
    elif isinstance(value, int) and not isinstance(value, bool):
        tag, content = b"i", str(value).encode()
    else:
        raise KeySchemeError(
            f"namespace field {name!r} is {value!r} ({type(value).__name__}); allowed are bytes, str and int"
        )
    if len(content) > _MAX_FIELD_BYTES:
        raise KeySchemeError(f"namespace field {name!r} has {len(content)} bytes; allowed are under 4 GiB")
    return tag + _frame(content)


def namespace_digest(fields: Mapping[str, bytes | str | int]) -> bytes:
    """The 32-byte digest of everything that must separate two callers (model, epoch, salt, ...).

    Independent of the order of insertion. Each field is framed by its length and its type, so neither moving a
    character from one field to the next nor writing a number as text gives the same digest.

    Raises:
        KeySchemeError: a field is neither bytes, str nor int.
    """
    framed = [_frame(name.encode()) + _typed(name, fields[name]) for name in sorted(fields)]
    return sha256(_LABEL + len(framed).to_bytes(4, "little") + b"".join(framed))


def named_mark(name: str) -> bytes:
    """The 2 bytes with which all keys end whose requests name this namespace; empty for no name.

    It follows the 32 bytes of the namespace, and lets such keys be found and erased. One of 65,536 other keys ends
    with the same bytes, as if it were of that namespace.
    """
    return sha256(_MARK_LABEL + name.encode())[:_MARK_BYTES] if name else b""


def chain_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The seed before the first block of a `TokenChain`: empty, or 32 bytes that separate callers.

    This is SGLang's own seed of its page hashes: SHA-256 over a label and the two strings, each absent (0) or present
    (1, then its length in bytes, u64 little endian, and its UTF-8).
    """
    if extra_key is None and cache_salt is None:
        return b""
    parts = [
        b"\x00" if part is None else b"\x01" + len(part.encode()).to_bytes(8, "little") + part.encode()
        for part in (extra_key, cache_salt)
    ]
    return sha256(_SEED_LABEL + b"".join(parts))


def tail_key(
    namespace: bytes, group: int, parent_key: bytes | None, extra: bytes, tokens: Tokens, base_block: int
) -> Keys:
    """The key, shape [1, 16], under which a partial block that holds exactly `tokens` is stored.

    Args:
        parent_key: the engine's key of the block before it; None when the request starts with the tail.
        extra: what else the engine adds to that block's hash (salt, LoRA, multi-modal ids), already encoded.
        base_block: number of the partial block in its request.

    Raises:
        KeySchemeError, TokenError: see `tail_candidates`.
    """
    count = len(tokens)
    return tail_keys(namespace, group, parent_key, extra, tokens, count, count, base_block)


def tail_candidates(
    namespace: bytes,
    group: int,
    parent_key: bytes | None,
    extra: bytes,
    tokens: Tokens,
    block_tokens: int,
    base_block: int,
) -> TailCandidates | None:
    """Keys of every partial block that could serve `tokens`, longest first; None if there can be none.

    Args:
        tokens: the request's tokens from block `base_block` on; those after the first `block_tokens - 1` are ignored.

    Raises:
        KeySchemeError: the parent key is missing, too short or too long.
        TokenError: a token is not an integer in [0, 2**32); the message names its position and value.
    """
    longest = min(len(tokens), block_tokens - 1)
    if longest < 1:
        return None
    keys = tail_keys(namespace, group, parent_key, extra, tokens, longest, 1, base_block)
    counts = np.arange(longest, 0, -1, dtype=np.int32)
    return TailCandidates(keys=keys, tokens=counts, base_block=base_block)
