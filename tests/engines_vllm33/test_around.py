"""The engine's surroundings: sleep, drafts, disks, other processes, other connectors, vLLM's own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines_vllm33.conftest import FLEXKV, Cases, assert_same_tokens, cached, flexkv, tokens

LONG = pytest.mark.long
WHOLE_BLOCKS = [144, 64, 320]
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
}


def test_after_each_sleep_the_next_hit_is_right(cases: Cases) -> None:
    found = cases.run("asleep", flexkv())
    for name, asked in found["asked"].items():
        order = [call.partition(" ")[0] for call in asked]
        assert order.index("reset_cache") < order.index("unregister_kv_caches") < order.index("sleep"), name
        assert order.index("wake_up") < order.index("restore_kv_caches"), name
        assert cached(found, f"{name}: computed") == [0]
        assert cached(found, f"{name}: hit") == [320]
    assert_same_tokens(found, cases.alone("asleep"))


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_what_was_drafted_and_accepted_is_served(cases: Cases, kind: str) -> None:
    speculation = {
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
        "draft_model": {"method": "draft_model", "model": cases.model, "num_speculative_tokens": 2},
    }[kind]
    found = cases.run("turns", flexkv(), speculative_config=speculation)
    assert found["metrics"]["spec_decode_num_accepted_tokens"] > 0
    assert min(cached(found, "second")) >= 160
    assert_same_tokens(found, cases.alone("turns", speculative_config=speculation))


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
    separate = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    found = cases.run("apart", flexkv(), separate)
    assert found["client"] == "SyncMPClient"
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    for phase in ("cold", "hit", "together"):
        assert tokens(found, phase) == tokens(cases.alone("served"), "cold"), phase


def test_the_name_alone_is_enough(cases: Cases) -> None:
    named = {key: value for key, value in FLEXKV.items() if key != "kv_connector_module_path"}
    found = cases.run("from_disk", flexkv(named))
    assert found["metrics"]["flexkv_lookup_tokens"] > 0
    assert_same_tokens(found, cases.alone("from_disk"))


def test_vllms_own_class_serves_prompts(cases: Cases) -> None:
    builtin = {**flexkv(), "kv_connector": "FlexKVConnectorV1", "kv_load_failure_policy": "fail"}
    del builtin["kv_connector_module_path"]
    found = cases.run("served", builtin)
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served"))


def multi(*connectors: dict) -> dict:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize("order", ["flexkv first", pytest.param("flexkv last", marks=LONG)])
def test_beside_vllms_offloading_connector(cases: Cases, order: str) -> None:
    both = [flexkv(), OFFLOADING] if order == "flexkv first" else [OFFLOADING, flexkv()]
    found = cases.run("served", multi(*both), {"VLLM_KV_CACHE_LAYOUT": "BLHNC"})
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served"))


def test_a_refusal_of_two_layouts_comes_with_what_to_set(cases: Cases) -> None:
    with pytest.raises(AssertionError, match="KV cache layout mismatch") as raised:
        cases.run("served", multi(flexkv(), OFFLOADING))
    assert "set VLLM_KV_CACHE_LAYOUT to one of the two" in str(raised.value)
