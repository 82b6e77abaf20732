"""SGLang's pages: converts token slots to pages of the pool, and page hashes to index keys.

SGLang's page hashes are a chain of SHA-256 over the tokens, seeded with the extra key, the salt and the LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flexkv.adapters.common.prompt_keys import GROUP
from flexkv.cache.keys import EngineKeyChain
from flexkv.errors import GeometryError, KeySchemeError
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds

HASH_BYTES = 32
"""Length in bytes of one page's hash, which is a SHA-256."""


def page_keys(namespace: bytes, hashes: Sequence[str]) -> Keys:
    """Index keys of pages.

    Args:
        namespace: as in `EngineKeyChain`.
        hashes: SGLang's hash of each page, 64 hexadecimal digits.

    Raises:
        KeySchemeError: a hash has a different form.
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


def pages_of(slots: Any, page_size: int) -> BlockIds:
    """The pages that token slots fill, in order, int32 [tokens / page_size].

    Args:
        slots: integer tensor [tokens] on any device, with all slots of each page in ascending order.
        page_size: tokens per page.

    Raises:
        GeometryError: the slots do not fill complete pages in order.
    """
    table = np.asarray(slots.cpu(), np.int64)
    if len(table) % page_size:
        raise GeometryError(f"{len(table)} token slots are no whole pages of {page_size}")
    firsts, lasts = table[::page_size], table[page_size - 1 :: page_size]
    if np.any(firsts % page_size) or np.any(lasts - firsts != page_size - 1):
        raise GeometryError(
            f"token slots do not fill pages of {page_size} in order: {table[:8].tolist()}, ..."
        )
    return np.ascontiguousarray(firsts // page_size, np.int32)
