"""On vLLM 0.33, an answer has the same tokens whether its prompt is computed, a hit in vLLM's own cache, or a hit in
flexkv."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.engines_vllm33.conftest import (
    FAULTY,
    WHOLE_BLOCKS,
    Cases,
    Found,
    assert_same_tokens,
    cached,
    flexkv,
    tokens,
)

SLOTS = 32
PAGE_BYTES = 32 << 10
"""Bytes per page: 16 tokens, 4 layers, K and V, 2 heads of 64 numbers in bfloat16."""


def test_without_flexkv_nothing_is_served_once_forgotten(cases: Cases) -> None:
    alone = cases.alone("served")
    assert alone["v2"]
    assert alone["device"] == "cuda"
    assert cached(alone, "own") == WHOLE_BLOCKS
    assert cached(alone, "hit") == cached(alone, "together") == [0, 0, 0]
    assert tokens(alone, "hit") == tokens(alone, "cold")
    assert len({tuple(answer) for answer in tokens(alone, "cold")}) == 3


@pytest.mark.parametrize("store", ["eager", "layerwise"])
def test_a_hit_gives_the_tokens_of_a_computed_prompt(cases: Cases, store: str) -> None:
    found = cases.run("served", flexkv(store__mode=store))
    assert found["layout"] == "BLHNC"
    assert found["async_scheduling"]
    assert cached(found, "cold") == [0, 0, 0]
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert found["metrics"]["flexkv_hit_tokens"] >= 2 * sum(WHOLE_BLOCKS)
    assert_same_tokens(found, cases.alone("served"))


def test_control_a_damaged_page_changes_the_tokens(cases: Cases) -> None:
    rules = json.dumps([{"action": "corrupt", "kind": "load"}])
    found = cases.run("served", flexkv(FAULTY), {"FAULT_RULES": rules})
    assert cached(found, "hit") == WHOLE_BLOCKS
    assert tokens(found, "own") == tokens(found, "cold")
    assert tokens(found, "hit") != tokens(found, "cold")


def test_windows_beside_full_attention_are_served(cases: Cases) -> None:
    found = cases.run("served", flexkv(), model=cases.windowed)
    assert found["groups"] == ["SlidingWindowSpec", "FullAttentionSpec"]
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served", model=cases.windowed))


def hashes(found: Found, kind: str, medium: str) -> list[str]:
    """Returns the block hashes in the events of one kind and medium, in order. A hash may occur several times."""
    said = (event for event in found["events"] if (event["kind"], event["medium"]) == (kind, medium))
    return [name for event in said for name in event["hashes"]]


def test_events_say_what_host_memory_has(cases: Cases) -> None:
    """KV events announce exactly the blocks in host memory. 33 blocks compete for 32 slots, so flexkv evicts blocks,
    and must announce this, too."""
    found, alone = cases.run("announced", flexkv(host__bytes=SLOTS * PAGE_BYTES)), cases.alone("announced")
    assert_same_tokens(found, alone)
    assert not hashes(alone, "BlockStored", "CPU")
    cleared = [number for number, event in enumerate(found["events"]) if event["kind"] == "AllBlocksCleared"]
    assert len(cleared) == 1 + sum(event["kind"] == "AllBlocksCleared" for event in alone["events"])
    stored, removed = (hashes(found, kind, "CPU") for kind in ("BlockStored", "BlockRemoved"))
    assert set(stored) <= set(hashes(found, "BlockStored", "GPU")), "flexkv's names of blocks are vLLM's"
    assert removed
    before_reset = {**found, "events": found["events"][: cleared[-1]]}
    there = Counter(hashes(before_reset, "BlockStored", "CPU"))
    there.subtract(hashes(before_reset, "BlockRemoved", "CPU"))
    assert set(there.values()) <= {0, 1}, "what is announced was not there, and what is removed was"
    assert there.total() <= SLOTS
    assert len(hashes({**found, "events": found["events"][cleared[-1] :]}, "BlockStored", "CPU")) == 4
