"""The type of block keys, and the rules that say which pages of a KV group a hit needs."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Keys = NDArray[np.uint8]
"""Namespaced block keys, shape [blocks, KEY_BYTES], uint8, C-contiguous."""


def first_words(keys: Keys) -> NDArray[np.uint64]:
    """Returns the first 8 bytes of each key, uint64 [blocks]. Their bits are uniformly distributed."""
    words: NDArray[np.uint64] = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    return words


class Rule(Enum):
    """The rule that says which pages of a KV group a hit needs, so that the engine can continue after the hit."""

    FULL = "full"
    """Full attention: every page from the start to the hit's end."""
    WINDOW = "window"
    """Sliding window: the last `reach` pages before the hit's end."""
    CHUNK = "chunk"
    """Chunked attention: the pages from the start of the chunk in which the hit ends, up to the hit's end; no page if
    the hit ends where a chunk ends. A chunk has `reach` tokens."""
    STATE = "state"
    """Recurrent state: only the page that ends where the hit ends."""
