"""Modes of loads and stores. Also cases in which requests wait, are aborted or are preempted, and run again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines_vllm33.conftest import (
    OFF,
    RUNNER_V1,
    WHOLE_BLOCKS,
    Cases,
    assert_same_tokens,
    cached,
    flexkv,
    within_step,
)

LONG = pytest.mark.long
WAITS = "WAITING_FOR_REMOTE_KVS"


@pytest.mark.parametrize(
    ("mode", "scheduling"),
    [
        ("async", OFF),
        pytest.param("sync", OFF, marks=LONG),
        pytest.param("layerwise", OFF, marks=LONG),
        pytest.param("sync", {}, marks=LONG),
        pytest.param("layerwise", {}, marks=LONG),
    ],
    ids=["async-off", "sync-off", "layerwise-off", "sync-on", "layerwise-on"],
)
def test_loads_are_async_where_a_failed_one_is_recomputed(
    cases: Cases, mode: str, scheduling: dict[str, Any]
) -> None:
    """Loads are async if the engine recomputes requests whose load fails. The test runs with async scheduling off and
    on. `test_served.py` has the default of the two settings: async loads and async scheduling.
    """
    found = cases.run("served", flexkv(load__mode=mode), **scheduling)
    assert found["async_scheduling"] is not bool(scheduling)
    assert ("loads are async here" in found["log"]) == (mode != "async")
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served", **scheduling))


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_loads_within_the_step_where_a_failed_one_ends_its_request(cases: Cases, mode: str) -> None:
    found = cases.run("served", within_step(mode), **OFF)
    assert found["v2"]
    assert "loads are async here" not in found["log"]
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served", **OFF))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_loads_within_the_step_of_model_runner_v1(cases: Cases, mode: str) -> None:
    found = cases.run("served", flexkv(load__mode=mode), RUNNER_V1, **OFF)
    assert not found["v2"]
    assert "loads are async here" not in found["log"]
    assert cached(found, "hit") == cached(found, "together") == WHOLE_BLOCKS
    assert_same_tokens(found, cases.alone("served", RUNNER_V1, **OFF))


def test_ten_requests_at_once(cases: Cases) -> None:
    found = cases.run("crowd", flexkv())
    assert min(cached(found, "hit")) >= 224
    assert_same_tokens(found, cases.alone("crowd"))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_ten_requests_at_once_that_load_within_the_step(cases: Cases, mode: str) -> None:
    found = cases.run("crowd", within_step(mode), **OFF)
    assert min(cached(found, "hit")) >= 224
    assert_same_tokens(found, cases.alone("crowd", **OFF))


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=LONG)])
def test_what_a_small_pool_evicts_is_served(cases: Cases, mode: str) -> None:
    found, alone = cases.run("evicted", flexkv(store__mode=mode)), cases.alone("evicted")
    assert cached(alone, "again")[:6] == [0] * 6
    assert min(cached(found, "again")[:6]) >= 160
    assert_same_tokens(found, alone)


@pytest.mark.parametrize("scheduling", [{}, pytest.param(OFF, marks=LONG)], ids=["on", "off"])
def test_an_abort_in_a_load_leaves_nothing_behind(cases: Cases, scheduling: dict[str, Any]) -> None:
    found = cases.run("aborted", flexkv(), **scheduling)
    assert WAITS in found["states"]
    assert cached(found, "hit") == [320]
    assert_same_tokens(found, cases.alone("aborted", **scheduling))


@pytest.mark.long
def test_an_abort_after_a_load_within_the_step_leaves_nothing_behind(cases: Cases) -> None:
    found = cases.run("aborted", within_step("sync"), **OFF)
    assert found["states"][1:] == ["RUNNING"] * 3
    assert cached(found, "hit") == [320]
    assert_same_tokens(found, cases.alone("aborted", **OFF))


@pytest.mark.parametrize(
    ("transfer", "scheduling"),
    [(flexkv(), {}), pytest.param(within_step("sync"), OFF, marks=LONG)],
    ids=["async", "sync"],
)
def test_preempted_requests_come_back_with_the_same_tokens(
    cases: Cases, transfer: dict[str, Any], scheduling: dict[str, Any]
) -> None:
    found = cases.run("preempted", transfer, **scheduling)
    alone = cases.alone("preempted", **scheduling)
    assert found["metrics"]["num_preemptions"] > 0
    assert alone["metrics"]["num_preemptions"] > 0
    assert min(cached(found, "again")) >= 96
    assert_same_tokens(found, alone)


def test_deferred_allocations_and_ends(cases: Cases) -> None:
    """A load fills blocks whose allocation vLLM has deferred. If the request is aborted before the load, no block stays
    allocated.
    """
    found = cases.run("deferred", flexkv())
    assert "_drain_deferred_loads" in found["callers"]
    assert found["most_deferred_frees"] > 0
    assert found["aborted"] == 1
    assert cached(found, "hit") == cached(found, "again") == [320]
    assert_same_tokens(found, cases.alone("deferred"))
