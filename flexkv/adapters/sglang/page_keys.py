"""SGLang's page hashes as index keys. They are chained SHA-256 over tokens, seeded with extra key, salt and LoRA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexkv.cache.base import Keys
from flexkv.cache.keys import EngineKeyChain
from flexkv.errors import KeySchemeError

HASH_BYTES = 32
"""Of one page: SHA-256."""

GROUP = 0
"""The one KV group of a model that this adapter accepts."""


def page_keys(namespace: bytes, hashes: Sequence[str]) -> Keys:
    """Index keys of pages.

    Args:
        namespace: 32 bytes.
        hashes: of each page, 64 hexadecimal digits, as SGLang names pages.

    Raises:
        KeySchemeError: a hash is of another form.
    """
    try:
        joined = bytes.fromhex("".join(hashes))
    except ValueError as error:
        raise KeySchemeError(f"page hashes must be hexadecimal: {error}") from error
    if any(len(page_hash) != 2 * HASH_BYTES for page_hash in hashes):
        odd = next(page_hash for page_hash in hashes if len(page_hash) != 2 * HASH_BYTES)
        raise KeySchemeError(f"page hash {odd!r}: expected {2 * HASH_BYTES} hexadecimal digits of SHA-256")
    chain = EngineKeyChain(namespace, GROUP)
    chain.extend(np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES))
    return chain.keys
