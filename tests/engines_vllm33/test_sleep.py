"""Sleep mode: engines release their memory and get it back, and later hits are right."""

from __future__ import annotations

import pytest

from tests.engines_vllm33.conftest import (
    APART,
    OFF,
    Cases,
    Found,
    assert_same_tokens,
    cached,
    flexkv,
    multi,
)
from tests.engines_vllm33.test_around import OFFLOADING


def assert_hits_are_right(found: Found, alone: Found) -> None:
    """Asserts that each time after the engine has woken up, a prompt is first computed and then a hit. Without flexkv
    it is never a hit.
    """
    for phase in found["phases"]:
        assert cached(found, phase) == ([320] if phase.endswith("hit") else [0]), phase
        assert cached(alone, phase) == [0], phase
    assert_same_tokens(found, alone)


def assert_order(found: Found) -> None:
    for name, asked in found["asked"].items():
        order = [call.partition(" ")[0] for call in asked]
        (taken,) = (order.index(call) for call in ("sleep", "discard") if call in order)
        assert order.index("reset_cache") < order.index("unregister_kv_caches") < taken, name
        assert order.index("wake_up") < order.index("restore_kv_caches"), name


def test_after_each_sleep_the_next_hit_is_right(cases: Cases) -> None:
    found, alone = cases.run("asleep", flexkv()), cases.alone("asleep")
    assert_order(found)
    assert (found["state"], alone["state"]) == ("WAITING_FOR_REMOTE_KVS", "RUNNING")
    # An engine in the caller's process cannot wait for a load. So the first call of `sleep` is refused, and the next
    # one succeeds.
    assert "Failed to reset KV cache" in found["refused"]
    assert not alone["refused"]
    assert_hits_are_right(found, alone)


def test_after_the_kv_memory_was_released_the_next_hit_is_right(cases: Cases) -> None:
    """After the engine has released its KV memory and got it back, the next hit is right. Async scheduling is off,
    because with it vLLM refuses the release in one process, with flexkv or without it."""
    found = cases.run("released", flexkv(), **OFF)
    assert_order(found)
    assert_hits_are_right(found, cases.alone("released", **OFF))


@pytest.mark.long
def test_a_core_of_its_own_waits_for_a_load_before_it_sleeps(cases: Cases) -> None:
    found = cases.run("asleep_apart", flexkv(), APART)
    hits = [phase for phase in found["phases"] if phase.endswith("hit")]
    assert found["metrics"]["flexkv_hit_tokens"] > 320 * len(hits), "no sleep met a load"
    assert_hits_are_right(found, cases.alone("asleep_apart", APART))


@pytest.mark.long
def test_sleeps_beside_vllms_offloading_connector(cases: Cases) -> None:
    found = cases.run("asleep", multi(flexkv(), OFFLOADING), {"VLLM_KV_CACHE_LAYOUT": "BLHNC"})
    assert_order(found)
    assert_hits_are_right(found, cases.alone("asleep"))
