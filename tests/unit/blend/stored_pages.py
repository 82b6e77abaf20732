"""Stores pages under keys that a test chooses."""

from __future__ import annotations

from typing import Any

from flexkv.blend.cache import SegmentCache
from flexkv.blend.keys import SegmentKeys
from flexkv.blend.segment_store import SegmentStore

DEADLINE_S = 60.0


def publish(cache: SegmentCache, keys: Any, blocks: Any, first: int, tokens: int) -> None:
    """Stores the staging blocks `blocks` under `keys`, and frees the blocks.

    Args:
        first: the first key's block, as its number within the segment.
        tokens: number of tokens in each block.
    """
    none = SegmentKeys(keys[:0], None)
    store = SegmentStore(
        cache._moves, cache.manager, none, blocks, cache.block_tokens, cache._store_name, DEADLINE_S
    )

    def part() -> bool:
        store._begin(keys, blocks, first, tokens)
        return True

    store._parts = [part]
    assert store.advance(wait=True)
