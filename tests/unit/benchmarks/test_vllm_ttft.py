"""How the benchmark of the time to the first token computes its figures, and which hits it refuses to report."""

from __future__ import annotations

import pytest

from benchmarks.vllm_ttft import (
    BLOCK_TOKENS,
    DISK_SYNC,
    SYNC,
    Times,
    added_over_memcpy,
    from_elsewhere,
    token_bytes,
)
from demo.model import PRESETS

SERVED = 31 * BLOCK_TOKENS


def times(*from_disk: int) -> Times:
    return Times(served=[SERVED] * len(from_disk), from_disk=list(from_disk))


def test_hits_from_where_their_names_say_are_reported() -> None:
    assert from_elsewhere({SYNC: times(0, 0), DISK_SYNC: times(31, 31)}) == []


def test_a_hit_that_host_memory_still_had_is_no_figure_of_the_disk() -> None:
    assert from_elsewhere({SYNC: times(0, 0), DISK_SYNC: times(31, 0)}) == [DISK_SYNC]
    assert from_elsewhere({DISK_SYNC: times(31, 30)}) == [DISK_SYNC]


def test_a_hit_that_came_from_disk_is_no_figure_of_host_memory() -> None:
    assert from_elsewhere({SYNC: times(0, 31)}) == [SYNC]


def test_a_hit_is_compared_with_the_engines_own_in_times_of_a_memcpy() -> None:
    """The benchmark compares the hits of flexkv and of the engine's own connector run by run, because a slow run slows
    both hits. It reports the median of the differences, which ignores an outlier, in multiples of a memcpy's time."""
    runs = Times(hit=[0.080, 0.180, 0.500], own=[0.070, 0.170, 0.071], memcpy=[0.008, 0.008, 0.008])
    assert added_over_memcpy(runs) == pytest.approx(1.25)


def test_a_tokens_bytes_are_keys_and_values_of_all_layers() -> None:
    shape = PRESETS["medium"]
    assert token_bytes(shape) == shape.layers * 2 * shape.kv_heads * shape.head_size * 4 == 16384
