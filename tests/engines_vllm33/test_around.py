"""Draft models, disks, engines of several processes, other connectors, connector names, and starts that flexkv
refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines_vllm33.conftest import (
    APART,
    FAULTY,
    FLEXKV,
    OFF,
    RUNNER_V1,
    WHOLE_BLOCKS,
    Cases,
    assert_same_tokens,
    cached,
    flexkv,
    multi,
)

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
}
BUILTIN = {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}
BY_NAME = {key: value for key, value in FLEXKV.items() if key != "kv_connector_module_path"}


def drafting(cases: Cases, kind: str) -> dict[str, Any]:
    """Returns engine arguments for drafts. The drafts come from n-grams, with a model that repeats itself, or from a
    draft model. The draft model is the model itself, so it guesses every token right as long as its KV is right.
    """
    if kind == "ngram":
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        speculation = {"method": "ngram", "num_speculative_tokens": 3, **lookup}
        return {"speculative_config": speculation, "model": cases.laconic}
    speculation = {"method": "draft_model", "model": cases.model, "num_speculative_tokens": 2}
    return {"speculative_config": speculation}


@pytest.mark.parametrize("kind", [pytest.param("ngram", marks=pytest.mark.long), "draft_model"])
def test_drafted_and_accepted_tokens_are_served(cases: Cases, kind: str) -> None:
    found = cases.run("turns", flexkv(), **drafting(cases, kind))
    alone = cases.alone("turns", **drafting(cases, kind))
    assert found["metrics"]["spec_decode_num_accepted_tokens"] > 0
    assert found["metrics"]["spec_decode_num_drafts"] == alone["metrics"]["spec_decode_num_drafts"]
    assert min(cached(found, "second")) >= 160
    assert_same_tokens(found, alone)


def test_control_a_store_before_the_draft_model_has_run_spoils_its_guesses(cases: Cases) -> None:
    early = {**flexkv(FAULTY), "kv_connector": "EarlyConnector"}
    found = cases.run("turns", early, {"FAULT_RULES": "[]"}, **drafting(cases, "draft_model"))
    alone = cases.alone("turns", **drafting(cases, "draft_model"))
    assert found["metrics"]["spec_decode_num_drafts"] > alone["metrics"]["spec_decode_num_drafts"]
    assert_same_tokens(found, alone)


@pytest.mark.long
def test_turns_without_speculation(cases: Cases) -> None:
    assert_same_tokens(cases.run("turns", flexkv()), cases.alone("turns"))


def test_a_disk_serves_after_a_restart(cases: Cases, tmp_path: Path) -> None:
    on_disk = flexkv(disk__folders=[str(tmp_path)], disk__bytes_per_folder=1 << 26, disk__mode="through")
    lives = [cases.run("from_disk", on_disk) for _ in range(2)]
    assert cached(lives[0], "asked") == [0, 0, 0]
    assert cached(lives[1], "asked") == WHOLE_BLOCKS
    for life in lives:
        assert_same_tokens(life, cases.alone("from_disk"))


def test_a_core_in_a_process_of_its_own(cases: Cases) -> None:
    found = cases.run("apart", flexkv(), APART)
    assert found["is_apart"]
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("apart", APART))


@pytest.mark.long
def test_two_ranks(cases: Cases) -> None:
    two_gpus = {**APART, "CUDA_VISIBLE_DEVICES": "0,1", "VLLM_DISABLE_PYNCCL": "1"}
    ranks = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    found, alone = cases.run("apart", flexkv(), two_gpus, **ranks), cases.alone("apart", two_gpus, **ranks)
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert cached(alone, "hit") == cached(alone, "together") == [0, 0, 0]
    assert_same_tokens(found, alone)


def test_the_name_alone_is_enough(cases: Cases) -> None:
    found = cases.run("from_disk", flexkv(BY_NAME))
    assert found["metrics"]["flexkv_lookup_tokens"] > 0
    assert_same_tokens(found, cases.alone("from_disk"))


def test_control_without_the_plugin_vllm_does_not_know_the_name(cases: Cases) -> None:
    with pytest.raises(AssertionError, match="Unsupported connector type: FlexKVConnector"):
        cases.run("from_disk", flexkv(BY_NAME), {"VLLM_PLUGINS": "none"})


@pytest.mark.parametrize(
    ("policy", "runner"),
    [("fail", {}), pytest.param("recompute", RUNNER_V1, marks=pytest.mark.long)],
    ids=["V2", "V1"],
)
def test_vllms_own_class_serves_prompts(cases: Cases, policy: str, runner: dict[str, str]) -> None:
    scheduling = OFF if runner else {}
    found = cases.run("served", {**flexkv(BUILTIN), "kv_load_failure_policy": policy}, runner, **scheduling)
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served", runner, **scheduling))


@pytest.mark.parametrize(
    ("policy", "settings", "remedy"),
    [
        ("recompute", OFF, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("fail", {"enable_sleep_mode": True}, "leave --enable-sleep-mode out"),
    ],
    ids=["recompute on V2", "sleep mode"],
)
def test_vllms_own_class_is_refused_where_it_would_answer_wrongly(
    cases: Cases, policy: str, settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(AssertionError, match=remedy):
        cases.run("served", {**flexkv(BUILTIN), "kv_load_failure_policy": policy}, **settings)


@pytest.mark.parametrize(("order", "layout"), [("flexkv first", "BLHNC"), ("flexkv last", "LBHNC")])
def test_beside_vllms_offloading_connector(cases: Cases, order: str, layout: str) -> None:
    both = [flexkv(), OFFLOADING] if order == "flexkv first" else [OFFLOADING, flexkv()]
    found = cases.run("served", multi(*both), {"VLLM_KV_CACHE_LAYOUT": layout})
    assert found["layout"] == layout
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert (found["metrics"].get("flexkv_hit_tokens", 0) > 0) == (order == "flexkv first")
    assert_same_tokens(found, cases.alone("served"))


def test_a_refusal_of_two_layouts_comes_with_what_to_set(cases: Cases) -> None:
    with pytest.raises(AssertionError, match="KV cache layout mismatch") as raised:
        cases.run("served", multi(flexkv(), OFFLOADING))
    assert "set VLLM_KV_CACHE_LAYOUT to one of the two" in str(raised.value)
