"""Which steps of a running request count as concurrent with a load or a store, and how the benchmark judges their
durations."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.gpu_vllm_page import RESULT, vllm_section
from benchmarks.step_times import Copy, Step, beside, cause, longest, quiet, spread
from benchmarks.vllm_beside_gpu import (
    BASE,
    CPU_SIZE,
    FLEXKV,
    GPU_SIZE,
    OFFLOADING,
    engine_arguments,
    failures,
    model_folder,
    summary,
    verdicts,
    write,
)

STEP_MS = 2.0


def steps(*lengths_ms: float, prefill: int = 0, running: int = 1, from_ms: float = 0.0) -> list[Step]:
    found = []
    for length in lengths_ms:
        found.append(Step(from_ms / 1e3, (from_ms + length) / 1e3, prefill, running))
        from_ms += length
    return found


def test_a_step_is_beside_a_copy_that_was_in_flight_during_any_of_it() -> None:
    five = steps(2, 2, 2, 2, 2)
    copies = [Copy("load", 0.003, 0.005, 8), Copy("store", 0.009, 0.1, 8)]
    assert beside(five, copies, "load") == five[1:3]
    assert beside(five, copies, "store") == five[4:]
    assert quiet(five, copies) == [five[0], five[3]]


def test_steps_with_another_request_in_them_are_not_quiet() -> None:
    assert quiet(steps(2, 2, running=2), []) == []


def test_a_step_that_computes_a_prompt_does_not_decode() -> None:
    assert not steps(2, prefill=16)[0].decodes
    assert steps(2, prefill=1)[0].decodes, "one token more of a request that has ended"


def test_a_step_that_launches_a_prompt_neither_decodes_nor_is_quiet() -> None:
    launching = Step(0.0, 0.040, 0, 1, launched_tokens=8191)
    assert not launching.decodes
    assert quiet([launching], []) == []
    assert cause(launching, [launching], []) == "launched a batch with 8191 tokens of other requests"


def test_the_time_in_which_a_request_is_handed_in_is_no_part_of_the_step() -> None:
    assert Step(0.0, 0.010, 0, 1, adding_s=0.0075).ms == pytest.approx(2.5)


def test_the_cause_of_a_step_names_all_that_went_on() -> None:
    three = [*steps(40, prefill=8192, running=2), *steps(9, 2, from_ms=40)]
    copies = [Copy("store", 0.041, 0.2, 512), Copy("load", 0.0405, 0.045, 7)]
    assert cause(three[0], three, copies) == "computed 8192 tokens of other requests"
    assert cause(three[1], three, copies) == (
        "follows a step of 8192 such tokens; 1 loads of 7 blocks in flight (1 began, 1 ended); "
        "1 stores of 512 blocks in flight (1 began, 0 ended)"
    )
    assert cause(three[2], three, []) == "nothing beside it"
    assert [row["ms"] for row in longest(three, copies)] == [40.0, 9.0, 2.0]


def test_percentiles_are_of_all_steps() -> None:
    found = spread(steps(*[2.0] * 99, 12.0))
    assert found.steps == 100
    assert found.p50_ms == pytest.approx(2.0)
    assert found.p99_ms == pytest.approx(2.1)
    assert found.max_ms == pytest.approx(12.0)
    assert spread([]).p50_ms is None


def window(quiet_ms: float, copied_ms: float, kind: str, cached: int, count: int = 600) -> dict[str, Any]:
    calm = steps(*[quiet_ms] * count)
    busy = steps(*[copied_ms] * count, from_ms=1e6)
    copy = Copy(kind, 1e3, 1e6, 512)
    return {
        "steps": [asdict(step) for step in (*calm, *busy)],
        "copies": [asdict(copy)] if kind else [],
        "path_bytes": {"batch": 1 << 30},
        "prompts": 3,
        "cached": [cached],
        "ttft_ms": [50.0],
    }


def of_engine(
    copied_ms: float = 2.0, store: str = "store", load: str = "load", cached: int = 8176
) -> dict[str, Any]:
    alone = {"steps": [asdict(step) for step in steps(*[STEP_MS] * 600)], "copies": []}
    return summary(
        {
            "alone": alone,
            "computed": window(STEP_MS, copied_ms, store, 0),
            "again": window(STEP_MS, copied_ms, load, cached),
        }
    )


def test_steps_beside_copies_are_judged_by_quiet_ones_and_by_the_engine_without_a_connector() -> None:
    base = of_engine(store="", load="", cached=0)
    good = verdicts({BASE: base, FLEXKV: of_engine(2.05)})
    assert len(good) == 8
    assert all(verdict.met for verdict in good)
    slow = {verdict.what: verdict for verdict in verdicts({BASE: base, FLEXKV: of_engine(2.15)})}
    assert not slow["beside stores: p50 / alone"].met
    assert slow["beside loads: p50 / alone"].met
    assert slow["beside stores: p50 / alone"].value == pytest.approx(1.075)
    hung = {verdict.what: verdict for verdict in verdicts({BASE: base, FLEXKV: of_engine(4.5)})}
    assert not hung["beside loads: p99 more than alone, ms"].met


def test_copies_by_kernel_have_a_limit_of_their_own() -> None:
    mine = of_engine(2.25)
    mine["again"]["bytes by path"] = {"kernel": 2, "batch": 1}
    assert all(verdict.met for verdict in verdicts({FLEXKV: mine}))


def test_what_says_nothing_is_named() -> None:
    assert failures({BASE: of_engine(store="", load="", cached=0), FLEXKV: of_engine()}, 500) == []
    assert failures({FLEXKV: of_engine(cached=0)}, 500) == ["flexkv: no prompt that came again was served"]
    (few,) = failures({FLEXKV: of_engine(load="")}, 500)
    assert few.startswith("flexkv: 0 decoding steps beside loads, 500 were wanted")
    assert verdicts({FLEXKV: of_engine(load="")})[2].met is None


@pytest.mark.parametrize("size", [CPU_SIZE, GPU_SIZE])
def test_prompts_that_come_again_have_left_the_engines_pool_and_not_the_host(size: Any) -> None:
    number_bytes = 4 if size is CPU_SIZE else 2
    tokens = size.prompt_tokens * size.loaded_prompts
    assert tokens > size.pool_tokens
    assert tokens * size.token_bytes(number_bytes) < size.host_bytes


def test_the_connectors_differ_and_nothing_else(tmp_path: Any) -> None:
    model = model_folder(tmp_path, GPU_SIZE, "bfloat16")
    found = {name: engine_arguments(name, GPU_SIZE, model, False) for name in (BASE, FLEXKV, OFFLOADING)}
    names = [found[name].pop("kv_transfer_config", {"kv_connector": ""})["kv_connector"] for name in found]
    assert names == ["", "FlexKVConnector", "OffloadingConnector"]
    assert found[BASE] == found[FLEXKV] == found[OFFLOADING]
    assert not found[BASE]["enforce_eager"]


def test_the_page_shows_steps_and_verdicts_of_what_was_written(tmp_path: Any) -> None:
    assert "Not measured." in vllm_section(tmp_path)
    summaries = {BASE: of_engine(store="", load="", cached=0), FLEXKV: of_engine(2.15)}
    write(tmp_path / RESULT, argparse.Namespace(cpu=False), GPU_SIZE, summaries)
    page = "\n".join(vllm_section(tmp_path))
    assert "| flexkv | prompts computed: decoding steps beside stores | 600 | 2.150 |" in page
    assert "| beside stores: p50 / alone | 1.05 | 1.075 | **missed** |" in page
    assert "| beside loads: p50 / alone | 1.1 | 1.075 | reached |" in page
    assert "- 2.150: 1 loads of 512 blocks in flight" in page
    (tmp_path / RESULT).write_text("{")
    assert f"No result, because {RESULT} cannot be read" in "\n".join(vllm_section(tmp_path))
