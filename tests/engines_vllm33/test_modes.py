"""Modes of loads and stores, and events that make requests wait, stop and come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines_vllm33.conftest import FAULTY, Cases, assert_same_tokens, cached, flexkv

OFF: dict[str, Any] = {"async_scheduling": False}
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "mode", ["async", pytest.param("sync", marks=LONG), pytest.param("layerwise", marks=LONG)]
)
@pytest.mark.parametrize(
    "scheduling", [pytest.param({}, id="async scheduling"), pytest.param(OFF, id="without")]
)
def test_every_way_to_load_gives_the_same_tokens(cases: Cases, mode: str, scheduling: dict[str, Any]) -> None:
    found = cases.run("served", flexkv(load__mode=mode), **scheduling)
    assert found["async_scheduling"] is not bool(scheduling)
    assert cached(found, "hit") == cached(found, "together") == [144, 64, 320]
    assert_same_tokens(found, cases.alone("served"))


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_loads_within_the_step_where_a_failed_one_ends_its_request(cases: Cases, mode: str) -> None:
    """Model Runner V2 cannot take back a running request, so flexkv loads within the step only without recompute."""
    transfer = {**flexkv(load__mode=mode), "kv_load_failure_policy": "fail"}
    found = cases.run("served", transfer, **OFF)
    assert found["v2"]
    assert cached(found, "hit") == cached(found, "together") == [144, 64, 320]
    assert_same_tokens(found, cases.alone("served"))


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=LONG)])
def test_ten_requests_at_once(cases: Cases, mode: str) -> None:
    found = cases.run("crowd", flexkv(load__mode=mode))
    assert min(cached(found, "hit")) >= 224
    assert_same_tokens(found, cases.alone("crowd"))


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=LONG)])
def test_what_a_small_pool_evicts_is_served(cases: Cases, mode: str) -> None:
    found, alone = cases.run("evicted", flexkv(store__mode=mode)), cases.alone("evicted")
    assert cached(alone, "again")[:6] == [0] * 6
    assert min(cached(found, "again")[:6]) >= 160
    assert_same_tokens(found, alone)


@pytest.mark.parametrize(
    "scheduling", [pytest.param({}, id="async scheduling"), pytest.param(OFF, marks=LONG, id="without")]
)
def test_an_abort_in_a_load_leaves_nothing_behind(cases: Cases, scheduling: dict[str, Any]) -> None:
    found = cases.run("aborted", flexkv(), **scheduling)
    assert "WAITING_FOR_REMOTE_KVS" in found["states"]
    assert cached(found, "hit") == [320]
    assert_same_tokens(found, cases.alone("aborted"))


def test_preempted_requests_come_back_with_the_same_tokens(cases: Cases) -> None:
    found, alone = cases.run("preempted", flexkv()), cases.alone("preempted")
    assert found["metrics"]["num_preemptions"] > 0
    assert alone["metrics"]["num_preemptions"] > 0
    assert min(cached(found, "again")) >= 96
    assert_same_tokens(found, alone)


def test_a_deferred_allocation_is_loaded_into(cases: Cases) -> None:
    found = cases.run("deferred", flexkv())
    assert "_drain_deferred_loads" in found["callers"]
    assert cached(found, "hit") == cached(found, "again") == [320]
    assert_same_tokens(found, cases.alone("deferred"))


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=LONG)])
def test_a_failed_load_is_recomputed_and_nothing_wrong_is_stored(cases: Cases, mode: str) -> None:
    rules = json.dumps([{"action": "fail", "kind": "load", "times": 1}])
    found = cases.run("failed", flexkv(FAULTY, load__mode=mode), {"FAULT_RULES": rules}, **OFF)
    assert found["metrics"]["flexkv_failed_pages"] >= 1
    assert cached(found, "after") == [320]
    assert_same_tokens(found, cases.alone("failed"))
