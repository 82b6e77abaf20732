"""Token slots of an engine's allocation as pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.errors import GeometryError
from flexkv.transfer.graph import BlockIds


def pages_of(slots: Any, page_size: int) -> BlockIds:
    """The pages that token slots fill, in order, int32 [slots / page_size].

    Args:
        slots: integer tensor [tokens] on any device: whole pages, each with its slots in a row.

    Raises:
        GeometryError: the slots are no whole pages.
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
