"""What the benchmark of the time to the first token refuses to report."""

from __future__ import annotations

from benchmarks.vllm_ttft import BLOCK_TOKENS, DISK_SYNC, SYNC, Times, from_elsewhere

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
