"""Tests layerwise loads, for which the forward pass waits at each layer. Some forward passes do not call the layers'
hooks, and some fail midway.
"""

from __future__ import annotations

from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.adapters.common.layerwise import LayerLoads
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.scheduler import SchedulerSide
from flexkv.adapters.tensorrt_llm.worker import WorkerSide
from flexkv.config import load_config
from flexkv.errors import TransferError
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.executor import BY_GROUP, FLAT, Version
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    SHAPE,
    WHOLE,
    Make,
    World,
    arguments,
    end,
    lookup,
    rest_over,
    stored,
)
from tests.unit.transfer.transfer_world import DELAY, FAIL, STALL

LAYERWISE = {"FLEXKV_LOAD_MODE": "layerwise"}
TRUSTING = LAYERWISE | {"FLEXKV_LOAD_LAYER_HOOKS": "trust"}
LONGER = [*PROMPT, *range(500, 540)]
MORE = 68
"""Number of LONGER's 70 tokens that are in full blocks of 4."""


def eager() -> Any:
    """Returns arguments with which every forward pass calls the hooks of its layers."""
    return arguments(cuda_graph_config=None)


def by_layer(make_world: Make, environment: dict[str, str] = LAYERWISE, **options: Any) -> World:
    """Makes a world that has stored PROMPT, and whose forward passes wait at each layer for their loads."""
    return stored(make_world, environment, **({"llm_args": eager()} | options))


@pytest.mark.parametrize(("ranks", "hooked"), [(1, True), (2, False)])
def test_with_several_ranks_loads_end_before_the_forward(ranks: int, hooked: bool) -> None:
    """With several ranks, loads end before the forward pass. A rank whose load fails in a layer could not tell the
    other ranks before they sample.
    """
    given = EngineArguments.of(arguments(ranks, cuda_graph_config=None))
    assert SchedulerSide(load_config({}, TRUSTING), given).by_layer is hooked


@pytest.mark.parametrize("version", [FLAT, BY_GROUP], ids=["flat", "by group"])
@pytest.mark.parametrize("chunk", [5, 1_000])
def test_a_prefix_is_loaded_layer_by_layer(make_world: Make, version: Version, chunk: int) -> None:
    world = by_layer(make_world, version=version, chunk=chunk)
    for tail in range(3):
        world.request([*PROMPT[:20], 1, tail, 3, 4, 5])
    world.executor.run()
    assert world.hit(world.serve(LONGER)) == WHOLE
    assert world.hit(world.serve(LONGER)) == MORE
    world.check()


def test_a_layer_is_read_while_the_next_is_still_coming(make_world: Make) -> None:
    faults = Faults(STALL, OpKind.H2D, times=1, layer=1)
    world = by_layer(make_world, movers=faults)

    def in_layer(layer: int) -> None:
        if layer == 0:
            assert faults.mover.wait_stalled(1, LONG_S)
            Timer(0.05, faults.mover.release).start()

    request = world.request(PROMPT)
    world.executor.in_layer = in_layer
    world.executor.step()
    world.executor.in_layer = lambda layer: None
    world.executor.run()
    assert world.hit(request) == WHOLE
    world.check()


def test_control_a_forward_that_does_not_wait_reads_wrong_numbers(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_says_so(loads: LayerLoads, layer: int, stream: int | None = None) -> None:
        loads._waited.add(layer)

    monkeypatch.setattr(LayerLoads, "wait", only_says_so)
    world = by_layer(make_world, movers=Faults(DELAY, OpKind.H2D, layer=0, page=0, delay_s=0.2))
    request = world.serve(PROMPT)
    assert {request_id for request_id, _ in world.executor.wrong} == {request.request_id}


@pytest.mark.parametrize(
    "llm_args",
    [
        arguments(),
        arguments(cuda_graph_config={"max_batch_size": 8}),
        arguments(cuda_graph_config=None, torch_compile_config={}),
        arguments(cuda_graph_config=None, speculative_config={"decoding_type": "MTP"}),
    ],
    ids=["unknown", "graphs", "compiled", "draft"],
)
def test_where_hooks_may_not_fire_loads_end_before_the_forward(
    make_world: Make, llm_args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If the engine possibly does not call the hooks of its layers, loads end before the forward pass. To make early
    reads visible, this test never calls the hooks, and slows the copies of every layer.
    """
    slow = Faults(DELAY, OpKind.H2D, delay_s=0.01)
    world = by_layer(make_world, llm_args=llm_args, hooks=False, movers=slow)
    assert "may run without the hooks of its layers" in caplog.text
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def end_failed(world: World) -> None:
    """Ends all requests, as the engine does after a step that raises."""
    for request in list(world.executor.requests):
        world.executor.cancel(request)
    world.executor.run()
    world.executor.wrong.clear()


def test_trusted_hooks_that_do_not_fire_end_the_step_before_anything_is_sampled(make_world: Make) -> None:
    world = stored(
        make_world,
        TRUSTING,
        llm_args=arguments(),
        hooks=False,
        movers=Faults(DELAY, OpKind.H2D, layer=0, page=0, delay_s=0.1),
    )
    request = world.request(LONGER)
    with pytest.raises(TransferError, match="did not call the hooks of its layers"):
        world.executor.step()
    assert world.executor.wrong != [], "it has read what was not there yet"
    assert len(request.tokens) == len(LONGER)
    end_failed(world)
    rest_over(world)
    # From this step on, loads end before the forward pass. Nothing that the failed step computed was stored.
    assert world.hit(world.serve(LONGER)) == WHOLE
    assert world.hit(world.serve(LONGER)) == MORE
    world.check()


@pytest.mark.parametrize("layer", range(SHAPE.layers))
def test_a_page_that_fails_in_a_layer_ends_the_step(make_world: Make, layer: int) -> None:
    world = by_layer(make_world, movers=Faults(FAIL, OpKind.H2D, times=1, layer=layer, page=2))
    request = world.request(LONGER)
    with pytest.raises(TransferError, match="the forward has read them"):
        world.executor.step()
    assert len(request.tokens) == len(LONGER), "nothing was sampled"
    end_failed(world)
    assert world.hit(world.serve(LONGER)) == 8, (
        "the page that failed is forgotten, and nothing stored in its place"
    )
    assert world.hit(world.serve(LONGER)) == MORE
    world.check()


class BrokenForwardError(Exception):
    """Raised in these tests to interrupt a forward pass."""


def break_at(world: World, layer: int) -> None:
    """Makes the forward pass of the next step raise at this layer, and runs the step."""

    def in_layer(reached: int) -> None:
        if reached == layer:
            raise BrokenForwardError

    world.executor.in_layer = in_layer
    with pytest.raises(BrokenForwardError):
        world.executor.step()
    world.executor.in_layer = lambda reached: None


@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
def test_a_step_that_breaks_off_stores_nothing(make_world: Make, mode: str) -> None:
    """If a forward pass raises, nothing is stored. The engine ends the requests as if the step had run. Without a
    check, blocks that were never written would be stored under the prompt's keys.
    """
    world = make_world({"FLEXKV_LOAD_MODE": mode}, llm_args=eager())
    world.warm_up()
    world.request(LONGER)
    break_at(world, 1)
    end_failed(world)
    lost = world.scheduler.side.counters.value("flexkv_dropped_store_pages_total", reason="broken_step")
    assert lost == MORE // SHAPE.tokens
    assert world.hit(world.serve(LONGER)) == 0
    assert world.hit(world.serve(LONGER)) == MORE
    world.check()


@pytest.mark.parametrize("breaks", [True, False])
def test_a_request_that_had_begun_before_a_broken_step_is_not_stored(make_world: Make, breaks: bool) -> None:
    """If a step's forward pass raises, a request that began in an earlier step is not stored either, although it had no
    tokens in the failed step. In the control, the step ends, and the request is stored.
    """
    world = make_world()
    world.warm_up()
    request, other = Request(900, list(PROMPT)), Request(901, list(PROMPT))
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    request.blocks = [world.executor.free.pop() for _ in range(8)]
    for each, ends in ((request, True), (other, not breaks)):
        said = SimpleNamespace(request_id=each.request_id, computed_position=0, num_scheduled_tokens=30)
        batch = SimpleNamespace(new_requests=[said], cached_requests=[])
        world.worker.bind_connector_meta(world.scheduler.build_connector_meta(batch))
        world.worker.start_load_kv(None)
        if ends:
            world.worker.wait_for_save(None)
    end(world, request)
    assert lookup(world) == (0 if breaks else WHOLE)


def test_control_what_it_had_stored_would_be_seen(make_world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "_end_broken_step", lambda side: None)
    world = make_world(LAYERWISE, llm_args=eager())
    world.warm_up()
    world.request(LONGER)
    break_at(world, 1)
    end_failed(world)
    assert world.hit(world.serve(LONGER)) == MORE
    assert world.executor.wrong != []


def test_loads_of_a_step_that_broke_off_end_before_its_blocks_are_used_again(make_world: Make) -> None:
    faults = Faults(STALL, OpKind.H2D, times=1, layer=2)
    world = by_layer(make_world, movers=faults)
    world.request(PROMPT)
    break_at(world, 1)
    assert faults.mover.wait_stalled(1, LONG_S)
    Timer(0.05, faults.mover.release).start()
    end_failed(world)
    for number in range(4):
        world.request([number, *LONGER[1:30]])
    world.executor.run()
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()
