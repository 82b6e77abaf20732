"""The connector under a stand-in executor: what is computed, what is loaded, and that every byte is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv import c_ext
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.executor import LONG_S, Request
from tests.unit.tensorrt_llm.world import SHAPE, World
from tests.unit.transfer.transfer_world import CORRUPT

PROMPT = [(7 * n) % 1000 for n in range(30)]
WHOLE = 28
"""Of the prompt's 30 tokens, those in whole blocks of 4."""


@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
@pytest.mark.parametrize("layout", [False, True])
def test_a_prefix_is_loaded(make_world: Callable[..., World], mode: str, layout: bool) -> None:
    world = make_world({"FLEXKV_LOAD_MODE": mode}, layout=layout)
    world.warm_up()
    cold = world.serve(PROMPT)
    assert world.hit(cold) == 0
    warm = world.serve(PROMPT)
    assert world.hit(warm) == WHOLE
    assert warm.tokens == cold.tokens
    longer = world.serve([*cold.tokens, 1, 2, 3])
    assert world.hit(longer) == 28, "31 tokens of the first request have KV: 7 blocks"
    other = world.serve([9, *PROMPT[1:]])
    assert world.hit(other) == 0
    world.check()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_chunked_context(make_world: Callable[..., World], mode: str) -> None:
    world = make_world({"FLEXKV_LOAD_MODE": mode}, chunk=5)
    world.warm_up()
    world.serve(PROMPT[:10])
    warm = world.serve(PROMPT)
    assert world.hit(warm) == 8
    again = world.serve(PROMPT)
    assert world.hit(again) == WHOLE, "what was computed in chunks behind a loaded prefix was stored too"
    one = world.serve(PROMPT + [5] * 20, new_tokens=1)
    assert world.hit(one) == 32 - 4
    assert world.hit(world.serve(PROMPT + [5] * 20)) == 48
    world.check()


def test_it_warns_of_weights_that_change(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    make_world().warm_up()
    assert caplog.text.count("when weights change") == 1


def test_at_least_one_prompt_token_is_left(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.warm_up()
    world.serve(PROMPT[:16])
    assert world.hit(world.serve(PROMPT[:16])) == 12
    assert world.hit(world.serve(PROMPT[:17])) == 16
    world.check()


def test_salt_and_adapter_are_kept_apart(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.warm_up()
    world.serve(PROMPT)
    for who in ({"cache_salt_id": 5}, {"cache_salt_id": 6}, {"lora_task_id": 5}, {"lora_task_id": 6}):
        assert world.hit(world.serve(PROMPT, **who)) == 0, who
        assert world.hit(world.serve(PROMPT, **who)) == WHOLE, who
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_what_is_not_in_the_tokens_is_not_cached(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.warm_up()
    for _ in range(2):
        assert world.hit(world.serve(PROMPT, multimodal_hashes=[[1, 2]])) == 0
    assert world.hit(world.serve(PROMPT)) == 0, "nor was it stored"
    world.check()


def test_many_requests_at_once(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.warm_up()
    world.serve(PROMPT)
    for turn in range(3):
        for tail in range(3):
            world.request([*PROMPT[:20], turn, tail, *range(6)])
        world.executor.run()
    assert sum(world.executor.loaded.values()) >= 9 * 20
    world.check()


def test_eviction_under_pressure(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.warm_up()
    for number in range(world.scheduler.side.unit.slots // 7 + 20):
        world.serve([number, *PROMPT[1:]], new_tokens=1)
    assert world.scheduler.side.unit.manager.stats().evicted_blocks > 0
    assert world.hit(world.serve([0, *PROMPT[1:]])) == 0
    world.check()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_conformance_counts(make_world: Callable[..., World], mode: str) -> None:
    """As the engine's own tests count: three hooks once a forward pass, layer hooks once a layer and pass."""
    world = make_world({"FLEXKV_LOAD_MODE": mode})
    world.warm_up()
    for _ in range(2):
        world.serve(PROMPT, new_tokens=4)
    executor = world.executor
    # An async load's own iteration starts without a forward.
    without = 1 if mode == "async" else 0
    assert executor.calls["build_connector_meta"] == executor.passes + without
    assert executor.calls["start_load_kv"] == executor.passes + without
    assert executor.calls["wait_for_save"] == executor.passes
    assert executor.calls["layer"] == 2 * SHAPE.layers * executor.passes
    assert executor.calls["get_finished"] >= executor.passes


def test_the_driver_sees_wrong_bytes(make_world: Callable[..., World]) -> None:
    """The control: where loads bring wrong bytes and nothing verifies them, the executor reports positions."""
    rule = c_ext.FaultRule(CORRUPT, kind=int(OpKind.H2D))
    world = make_world(movers=lambda: c_ext.FaultyMover(c_ext.HostMover(), [rule]))
    world.warm_up()
    world.serve(PROMPT)
    warm = world.serve(PROMPT)
    assert world.hit(warm) == WHOLE
    assert {request_id for request_id, _ in world.executor.wrong} == {warm.request_id}


def test_disk_tier_after_a_restart(make_world: Callable[..., World], tmp_path: Path) -> None:
    disk = {"FLEXKV_DISK_FOLDERS": str(tmp_path), "FLEXKV_DISK_BYTES_PER_FOLDER": "4MiB"}
    first = make_world(disk)
    first.warm_up()
    first.serve(PROMPT)
    first.check()
    first.close()
    second = make_world(disk)
    second.warm_up()
    assert lookup(second) == 0, "only what is in host memory and verified is promised"
    ends_s = time.monotonic() + LONG_S
    # Nothing is computed meanwhile: what is found was on disk.
    while lookup(second) < WHOLE:
        assert time.monotonic() < ends_s, "what lies on disk never came up"
        time.sleep(0.005)
    assert second.hit(second.serve(PROMPT)) == WHOLE
    second.check()


def lookup(world: World) -> int:
    """Tokens of the prompt that are promised to a request, which then goes."""
    request = Request(99, list(PROMPT))
    tokens, _ = world.scheduler.get_num_new_matched_tokens(request, 0)
    assert not world.scheduler.request_finished(request, [])
    return int(tokens)
