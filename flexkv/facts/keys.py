"""Names of blocks, and which of them a hit needs."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Keys = NDArray[np.uint8]
"""Namespaced block keys, shape [blocks, KEY_BYTES], uint8, C-contiguous."""


def first_words(keys: Keys) -> NDArray[np.uint64]:
    """The first word of each key, whose bits are as good as random, uint64 [blocks]."""
    words: NDArray[np.uint64] = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    return words


class Rule(Enum):
    """Which pages of a KV group a hit needs, so that the engine can continue after it."""

    FULL = "full"
    """Full attention: every page from the start to the hit's end."""
    WINDOW = "window"
    """Sliding window: the last `reach` pages before the hit's end."""
    CHUNK = "chunk"
    """Chunked attention: the pages from the start of the chunk of `reach` tokens that the hit ends in; none if the hit
    ends where a chunk ends."""
    STATE = "state"
    """Recurrent state: the one page that ends where the hit ends."""
