"""Loads that fail, on both model runners: which tokens are computed after the failure, and which blocks are stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines_vllm33.conftest import (
    FAULTY,
    OFF,
    PROMISING,
    RUNNER_V1,
    Cases,
    assert_same_tokens,
    cached,
    flexkv,
    multi,
    tokens,
)

LONG = pytest.mark.long
FIRST_LOAD = {"FAULT_RULES": json.dumps([{"action": "fail", "kind": "load", "times": 1}])}
"""Fault rules with which one page of the first load fails."""


@pytest.mark.parametrize("scheduling", [OFF, pytest.param({}, marks=LONG)], ids=["off", "on"])
def test_a_failed_load_is_recomputed_and_nothing_wrong_is_stored(
    cases: Cases, scheduling: dict[str, Any]
) -> None:
    found = cases.run("failed", flexkv(FAULTY), FIRST_LOAD, **scheduling)
    assert found["metrics"]["flexkv_failed_pages"] >= 1
    assert cached(found, "after") == [320]
    assert_same_tokens(found, cases.alone("failed", **scheduling))


@pytest.mark.long
def test_a_failed_load_of_several_groups(cases: Cases) -> None:
    found = cases.run("failed", flexkv(FAULTY), FIRST_LOAD, model=cases.windowed)
    assert found["metrics"]["flexkv_failed_pages"] >= 1
    assert cached(found, "after") == [320]
    assert_same_tokens(found, cases.alone("failed", model=cases.windowed))


@pytest.mark.parametrize("mode", ["sync", pytest.param("layerwise", marks=LONG)])
def test_model_runner_v1_recomputes_what_failed_within_the_step(cases: Cases, mode: str) -> None:
    found = cases.run("failed", flexkv(FAULTY, load__mode=mode), FIRST_LOAD | RUNNER_V1, **OFF)
    assert not found["v2"]
    assert found["metrics"]["flexkv_failed_pages"] >= 1
    assert cached(found, "failed") == [160], "the load was not within the step"
    assert cached(found, "after") == [320]
    assert_same_tokens(found, cases.alone("failed", RUNNER_V1, **OFF))


def test_what_model_runner_v2_makes_of_anothers_failed_load_is_not_stored(cases: Cases) -> None:
    """flexkv does not store blocks that Model Runner V2 computes after another connector's failed load. This runner
    continues at the request's old position, with flexkv and without it. So the answer is wrong in both cases.
    """
    alone = cases.alone("broken_promise", **OFF)
    without = cases.run("broken_promise", {**PROMISING, "kv_load_failure_policy": "recompute"}, **OFF)
    found = cases.run("broken_promise", multi(PROMISING, flexkv()), **OFF)
    assert found["v2"]
    assert tokens(found, "broken") == tokens(without, "broken") != tokens(alone, "broken")
    assert tokens(found, "after") == tokens(without, "after") == tokens(alone, "after")
    assert cached(found, "after") == [0]
    assert found["metrics"]["flexkv_unpublished_pages"] > 0


def test_control_without_knowing_the_runner_wrong_kv_is_served(cases: Cases) -> None:
    found = cases.run("broken_promise", multi(PROMISING, flexkv()), knows_runner=False, **OFF)
    assert cached(found, "after") == [320]
    assert tokens(found, "after") != tokens(cases.alone("broken_promise", **OFF), "after")
