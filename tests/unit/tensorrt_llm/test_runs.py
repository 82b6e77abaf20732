"""Tests the connector with a stand-in executor, which computes and loads blocks and checks every byte."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.adapters.tensorrt_llm import FlexKVScheduler, FlexKVWorker
from flexkv.errors import ConfigError
from flexkv.transfer.graph import OpKind
from tests import testing_ext
from tests.unit.tensorrt_llm.executor import BY_GROUP, FLAT, Version
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.pool import Shape
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    SHAPE,
    WHOLE,
    Make,
    arguments,
    lookup,
    steps,
    stored,
    wait_for_the_disk,
    write_model,
)
from tests.unit.transfer.transfer_world import CORRUPT, DELAY


@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
@pytest.mark.parametrize("version", [FLAT, BY_GROUP], ids=["flat", "by group"])
def test_a_prefix_is_loaded(make_world: Make, mode: str, version: Version) -> None:
    world = make_world({"FLEXKV_LOAD_MODE": mode}, version=version)
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


@pytest.mark.parametrize("version", [FLAT, BY_GROUP], ids=["flat", "by group"])
def test_fp8_blocks_are_moved_as_they_are(make_world: Make, tmp_path: Path, version: Version) -> None:
    given = arguments(
        model=write_model(tmp_path, head_dim=4 * SHAPE.size, layers=SHAPE.layers), cache={"dtype": "fp8"}
    )
    world = stored(make_world, llm_args=given, shape=Shape(fp8=True), version=version)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert (
        world.worker.side.views[0].stripe_bytes
        == SHAPE.layers * 2 * SHAPE.heads * SHAPE.tokens * 4 * SHAPE.size
    )
    world.check()


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_layers_of_a_draft_model_in_the_same_pool_come_with_the_others(
    make_world: Make, tmp_path: Path, mode: str
) -> None:
    """If the pool also holds a draft model's layers, loads bring these layers too. The model has 3 layers, and the pool
    has 4, because one is the draft's. Without it, drafts would be computed from the block's former content.
    """
    draft = Shape(layers=SHAPE.layers + 1)
    model = write_model(tmp_path, head_dim=SHAPE.size, layers=SHAPE.layers)
    given = arguments(model=model, cuda_graph_config=None, speculative_config={"decoding_type": "MTP"})
    world = stored(make_world, {"FLEXKV_LOAD_MODE": mode}, llm_args=given, shape=draft)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert world.worker.side.views[0].num_layers == draft.layers
    world.check()
    with pytest.raises(ConfigError, match="the pool has 4 layers, the model 3"):
        make_world(llm_args=arguments(model=model), shape=draft)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_loads_that_end_before_the_forward_need_no_hooks(make_world: Make, mode: str) -> None:
    """Loads that end before the forward pass do not need the hooks of the layers. A replayed CUDA graph does not call
    these hooks.
    """
    slow = Faults(DELAY, OpKind.H2D, delay_s=0.01)
    world = stored(make_world, {"FLEXKV_LOAD_MODE": mode}, hooks=False, movers=slow)
    assert world.hit(world.serve([*PROMPT, 5])) == WHOLE
    assert world.executor.calls["layer"] == 0
    world.check()


def test_worker_and_scheduler_are_made_at_once() -> None:
    """The scheduler class and the worker class can be made at the same time. The engine constructs them in two threads,
    before it has a pool.
    """
    ready = threading.Barrier(2)

    def make(kind: Any) -> Any:
        ready.wait(LONG_S)
        return kind(arguments())

    with ThreadPoolExecutor(2) as threads:
        worker, scheduler = threads.map(make, (FlexKVWorker, FlexKVScheduler))
    assert scheduler.get_num_new_matched_tokens(Request(1, list(PROMPT)), 0) == (0, False)
    assert worker.get_finished([], []) == ([], [])
    worker.shutdown()
    scheduler.shutdown()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_chunked_context(make_world: Make, mode: str) -> None:
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


def test_it_warns_of_weights_that_change(make_world: Make, caplog: pytest.LogCaptureFixture) -> None:
    make_world().warm_up()
    assert caplog.text.count("when weights change") == 1


def test_at_least_one_prompt_token_is_left(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    world.serve(PROMPT[:16])
    assert world.hit(world.serve(PROMPT[:16])) == 12
    assert world.hit(world.serve(PROMPT[:17])) == 16
    world.check()


def test_salt_and_adapter_are_kept_apart(make_world: Make) -> None:
    world = stored(make_world)
    for who in ({"cache_salt_id": 5}, {"cache_salt_id": 6}, {"lora_task_id": 5}, {"lora_task_id": 6}):
        assert world.hit(world.serve(PROMPT, **who)) == 0, who
        assert world.hit(world.serve(PROMPT, **who)) == WHOLE, who
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_what_is_not_in_the_tokens_is_not_cached(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    for _ in range(2):
        assert world.hit(world.serve(PROMPT, multimodal_hashes=[[1, 2]])) == 0
    assert world.hit(world.serve(PROMPT)) == 0, "nor was it stored"
    world.check()


def test_many_requests_at_once(make_world: Make) -> None:
    world = stored(make_world)
    for turn in range(3):
        for tail in range(3):
            world.request([*PROMPT[:20], turn, tail, *range(6)])
        world.executor.run()
    assert sum(world.executor.loaded.values()) >= 9 * 20
    world.check()


def test_eviction_under_pressure(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    for number in range(world.scheduler.side.ranks.unit.slots // 7 + 20):
        world.serve([number, *PROMPT[1:]], new_tokens=1)
    assert world.scheduler.side.ranks.unit.manager.stats().evicted_blocks > 0
    assert world.hit(world.serve([0, *PROMPT[1:]])) == 0
    world.check()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_hooks_are_called_as_often_as_the_engine_counts(make_world: Make, mode: str) -> None:
    """The connector's hooks are called as often as the engine's own tests expect: three hooks once per forward pass,
    and layer hooks once per layer and forward pass.
    """
    world = make_world({"FLEXKV_LOAD_MODE": mode})
    world.warm_up()
    for _ in range(2):
        world.serve(PROMPT, new_tokens=4)
    executor = world.executor
    # The iteration that begins an async load calls two of the hooks without a forward pass.
    without = 1 if mode == "async" else 0
    assert executor.calls["build_connector_meta"] == executor.passes + without
    assert executor.calls["start_load_kv"] == executor.passes + without
    assert executor.calls["wait_for_save"] == executor.passes
    assert executor.calls["layer"] == 2 * SHAPE.layers * executor.passes
    assert executor.calls["get_finished"] >= executor.passes


def test_the_driver_sees_wrong_bytes(make_world: Make) -> None:
    """The control: if loads bring wrong bytes and no digest is verified, the executor reports the wrong positions."""
    rule = testing_ext.FaultRule(CORRUPT, kind=int(OpKind.H2D))
    world = stored(make_world, movers=lambda: testing_ext.FaultyMover(c_ext.HostMover(), [rule]))
    warm = world.serve(PROMPT)
    assert world.hit(warm) == WHOLE
    assert {request_id for request_id, _ in world.executor.wrong} == {warm.request_id}


def test_disk_tier_after_a_restart(make_world: Make, tmp_path: Path) -> None:
    disk = {
        "FLEXKV_DISK_FOLDERS": str(tmp_path),
        "FLEXKV_DISK_BYTES_PER_FOLDER": "4MiB",
        "FLEXKV_LOAD_LOOKUP_WAIT_S": "1e-9",
    }
    first = make_world(disk)
    first.warm_up()
    first.serve(PROMPT)
    first.check()
    first.close()
    second = make_world(disk)
    second.warm_up()
    assert lookup(second) == 0, "only what is in host memory and verified is promised"
    # No request computes PROMPT before this hit, so its pages can only come from disk.
    wait_for_the_disk(second)
    assert second.hit(second.serve(PROMPT)) == WHOLE
    second.check()


def test_metrics_are_logged_while_the_engine_runs(make_world: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flexkv")
    world = stored(make_world, {"FLEXKV_OBSERVE_METRICS_LOG_S": "0.001"})
    assert world.hit(world.serve(PROMPT)) == WHOLE

    def logged(unit: str, words: str) -> bool:
        start = f"metrics of unit {unit}, last "
        return any(line.startswith(start) and words in line for line in caplog.messages)

    ends_s = time.monotonic() + LONG_S
    while not (logged("scheduler", "hit_tokens=") and logged("rank0", "moved_pages[load]=")):
        assert time.monotonic() < ends_s, caplog.messages
        steps(world)
        time.sleep(0.01)
    world.close()
    assert any(line.startswith("metrics of unit scheduler, since the start: ") for line in caplog.messages)
