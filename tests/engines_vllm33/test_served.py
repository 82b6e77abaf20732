"""Computed, found by vLLM itself, and served by flexkv: equal tokens on vLLM 0.33."""

from __future__ import annotations

import json

import pytest

from tests.engines_vllm33.conftest import FAULTY, Cases, assert_same_tokens, cached, flexkv, tokens

WHOLE_BLOCKS = [144, 64, 320]
"""Tokens served of the prompts' 150, 70 and 330."""


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
