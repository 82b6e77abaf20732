"""Block keys, made from an engine's own keys or from tokens. Keys decide which requests may share a block.

A key is the hash of namespace, group and engine key. Each field is preceded by its length, so that different fields
never give the same bytes to hash. The native core hashes with SHA-256. With a hash that is weaker or shorter, one
tenant could construct a block with the key of another tenant's block.
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
    """Returns the 32-byte digest of all fields that separate callers (model, epoch, salt, ...).

    The order of the fields does not matter. Each field is preceded by its length and its type. So the digest changes
    if a character moves from one field to the next, or if a number is given as text.

    Raises:
        KeySchemeError: a field is not bytes, str or int, or has 4 GiB or more.
    """
    framed = [_frame(name.encode()) + _typed(name, fields[name]) for name in sorted(fields)]
    return sha256(_LABEL + len(framed).to_bytes(4, "little") + b"".join(framed))


def named_mark(name: str) -> bytes:
    """Returns the mark of a named namespace: the last 2 bytes of all keys in it, by which they are found and erased.

    Adapters append the mark to the 32-byte namespace from which keys are made. Returns no bytes for an empty name. One
    in 65,536 keys of other namespaces ends with the same 2 bytes by chance, and is found and erased too.
    """
    return sha256(_MARK_LABEL + name.encode())[:_MARK_BYTES] if name else b""


def chain_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Returns the seed that a `TokenChain` hashes before the first block: 32 bytes that separate callers, or no bytes
    if both arguments are None.

    SGLang seeds its page hashes in the same way. The seed is the SHA-256 of a label and the two encoded strings. None
    is encoded as one byte 0. A string is encoded as one byte 1, its length in bytes (u64, little endian) and its UTF-8
    bytes.
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
    """Returns the key under which a partial block of exactly `tokens` is stored, shape [1, 16].

    Args:
        parent_key: the engine's key of the block before the partial block; None if the partial block is the first.
        extra: the encoded data that the engine hashes with a block besides its tokens (salt, LoRA, multi-modal ids).
        base_block: number of the partial block within the request.

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
    """Returns a candidate key for each number of leading `tokens` that a partial block may contain, longest first; None
    if `tokens` is empty or a block has only one token.

    Args:
        tokens: the request's tokens from block `base_block` on; only the first `block_tokens - 1` are used.
        parent_key, extra, base_block: see `tail_key`.

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
