"""Which prefix lengths the groups of a request can restore together.

Everything is counted in blocks after the request's start block; what lies before that the engine has already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupPolicy, GroupSpec


def window_blocks(spec: GroupSpec) -> int:
    """Blocks that a trailing window reaches back from a block boundary."""
    return -(-spec.window_tokens // spec.block_tokens)


def first_needed(spec: GroupSpec, blocks: int) -> int:
    """First block that must be loaded to restore a prefix of `blocks` blocks."""
    if spec.policy is GroupPolicy.PREFIX:
        return 0
    if spec.policy is GroupPolicy.TRAILING_WINDOW:
        return max(0, blocks - window_blocks(spec))
    return max(0, blocks - 1)


def restorable(spec: GroupSpec, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each length 0..n whether the group can restore it, given which of its n blocks are present. Bool [n + 1]."""
    lengths = np.arange(len(present) + 1)
    if spec.policy is GroupPolicy.EXACT_BOUNDARY:
        return np.concatenate(([True], present))
    # Blocks in a row that are present and end right before each length.
    last_miss = np.maximum.accumulate(np.concatenate(([0], np.where(present, 0, lengths[1:]))))
    in_a_row = lengths - last_miss
    reach = len(present) if spec.policy is GroupPolicy.PREFIX else window_blocks(spec)
    return np.asarray(in_a_row >= np.minimum(lengths, reach))


def longest_restorable(
    specs: Sequence[GroupSpec], present: Sequence[NDArray[np.bool_]], room_pages: int
) -> int:
    """The longest prefix that every group can restore and whose pages, over all groups, are at most `room_pages`."""
    longest = min(len(p) for p in present)
    good = np.ones(longest + 1, np.bool_)
    pages = np.zeros(longest + 1, np.int64)
    lengths = np.arange(longest + 1)
    for spec, blocks in zip(specs, present, strict=True):
        good &= restorable(spec, blocks[:longest])
        if spec.policy is GroupPolicy.PREFIX:
            pages += lengths
        else:
            reach = 1 if spec.policy is GroupPolicy.EXACT_BOUNDARY else window_blocks(spec)
            pages += np.minimum(lengths, reach)
    good &= pages <= max(room_pages, 0)
    return int(np.flatnonzero(good)[-1])
