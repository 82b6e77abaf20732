"""Each test covers one trap in TensorRT-LLM's connector interface."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest

from flexkv.adapters.tensorrt_llm import worker
from flexkv.adapters.tensorrt_llm.requests import present_runs
from flexkv.errors import TransferError
from flexkv.observe import failed_ops
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.executor import Version
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    WHOLE,
    Make,
    World,
    end,
    lookup,
    promised,
    rest_over,
    stalled_load,
    steps,
    stored,
)
from tests.unit.transfer.transfer_world import DELAY, FAIL, STALL


def loaded_by(world: World, request_id: int) -> list[int]:
    """Names the request's load to the worker. Returns the ids that the worker returns first as loaded."""
    ends_s = time.monotonic() + LONG_S
    loaded: list[int] = world.worker.get_finished([], [request_id])[1]
    while not loaded and time.monotonic() < ends_s:
        time.sleep(0.001)
        loaded = world.worker.get_finished([], [])[1]
    return loaded


def test_a_lone_async_load_needs_no_metadata(make_world: Make) -> None:
    """An async load begins even if the engine builds no metadata, as when nothing is scheduled. A load that is ordered
    only in metadata would never begin.
    """
    world = stored(make_world, version=Version(quiet=True))
    built = world.executor.calls["build_connector_meta"]
    request = world.request(PROMPT, new_tokens=1)
    world.executor.run(until=lambda: request.state != "context" or request.position > 0)
    world.executor.run()
    assert world.hit(request) == WHOLE
    assert world.executor.calls["build_connector_meta"] == built + 1, "only for its one forward"
    world.check()


def test_an_id_is_remembered_and_returned_once(make_world: Make) -> None:
    """The worker remembers an id that the engine names only once. If the load takes many iterations, the worker returns
    the id in a later iteration, and only in that one.
    """
    world, request, faults = stalled_load(make_world)
    steps(world)
    assert request.state == "loading"
    other = world.request([5, 6, 7, 8, 9])
    world.executor.run(until=lambda: other.state == "saving")
    faults.mover.release()
    world.executor.run()
    steps(world)  # the executor would raise KeyError if the id were returned again
    assert world.hit(request) == WHOLE
    world.check()


def test_a_save_in_flight_keeps_its_blocks(make_world: Make) -> None:
    """The blocks of a save in flight are not freed. The executor fills freed blocks with garbage, so if the blocks were
    freed too early, the stored page would be garbage.
    """
    faults = Faults(STALL, OpKind.D2H, times=1)
    world = make_world(movers=faults)
    world.warm_up()
    request = world.request(PROMPT)
    world.executor.run(until=lambda: request.state == "saving")
    assert faults.mover.wait_stalled(1, LONG_S)
    steps(world)
    assert request.state == "saving"
    faults.mover.release()
    world.executor.run()
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_never_async_without_tokens(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    assert world.scheduler.get_num_new_matched_tokens(world.executor.add(Request(1, [1, 2, 3, 4, 5])), 0) == (
        0,
        False,
    )
    world.executor.requests.clear()


def test_blocks_that_the_engine_has_in_part_are_not_looked_up(make_world: Make) -> None:
    world = stored(make_world)
    assert world.scheduler.get_num_new_matched_tokens(Request(1, list(PROMPT)), 3) == (0, False)
    assert world.scheduler.get_num_new_matched_tokens(Request(1, list(PROMPT)), 8) == (WHOLE - 8, True)
    end(world, Request(1, list(PROMPT)))
    world.check()


def test_metadata_that_stays_bound_is_carried_out_once(make_world: Make) -> None:
    world = stored(
        make_world, {"FLEXKV_LOAD_MODE": "sync"}, movers=(faults := Faults(FAIL, OpKind.DISK_SEAL))
    )
    request = world.request(PROMPT, new_tokens=1)
    world.executor.run(until=lambda: request.state != "context")
    calls = faults.mover.calls
    for _ in range(3):
        world.worker.start_load_kv(None)
    assert faults.mover.calls == calls
    world.executor.run()
    world.check()


def test_a_failed_async_load_is_not_reported(make_world: Make) -> None:
    """A failed async load is not reported, because the interface has no way to report it. The request waits until it is
    cancelled, and other requests continue.
    """
    world = stored(make_world, movers=Faults(FAIL, OpKind.H2D, times=1))
    request = world.request(PROMPT)
    steps(world)
    assert request.state == "loading"
    assert world.hit(world.serve_beside([3, *PROMPT[1:]])) == 0
    world.executor.cancel(request)
    world.executor.run()
    assert world.hit(world.serve(PROMPT)) < WHOLE, "the page that failed is no longer promised"
    world.check()


@pytest.mark.parametrize("at_end", [False, True])
def test_failed_loads_without_a_line_are_counted_in_the_log(
    make_world: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """The log states how many loads failed without a line of their own. It does so in the first call after the current
    minute, or when the rank is closed. The number includes loads that end only when the lanes are closed.
    """
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    monkeypatch.setattr(failed_ops, "MOST_LINES", 0)
    world = stored(make_world, movers=Faults(FAIL, OpKind.H2D, times=1))
    now_s = [100.0]
    side = world.worker.side
    side._failed = failed_ops.FailedOps(worker.logger, lambda: now_s[0])
    request = world.request(PROMPT)
    if at_end:
        with monkeypatch.context() as held:
            held.setattr(side, "_end_ops", lambda: ())
            steps(world)
        assert "more failed" not in caplog.text, "the control: it has not ended yet"
        world.worker.shutdown()
    else:
        ends_s = time.monotonic() + LONG_S
        while not side._failed._periods:  # until the failure is counted
            assert time.monotonic() < ends_s, "the load never failed"
            world.executor.step()
        assert request.state == "loading"
        assert "more failed" not in caplog.text, "the control: the minute is not over"
        now_s[0] += failed_ops.PERIOD_S
        world.worker.get_finished([], [])
    assert "load between steps: 1 more failed" in caplog.text


def test_a_failed_sync_load_stops_the_step(make_world: Make) -> None:
    world = stored(make_world, {"FLEXKV_LOAD_MODE": "sync"}, movers=Faults(FAIL, OpKind.H2D, times=1))
    world.request(PROMPT)
    with pytest.raises(TransferError, match="must not read them"):
        world.executor.step()
    assert world.executor.wrong == []


def test_a_load_that_came_too_late_is_not_promised_to_its_request_again(make_world: Make) -> None:
    """A load that was too late is not promised to its request again. For a while, its pages are not promised to other
    requests either, because this engine ends a request whose load fails. The pages themselves are good.
    """
    late = {"FLEXKV_LOAD_MODE": "sync", "FLEXKV_LOAD_DEADLINE_S": "0.02"}
    world = stored(make_world, late, movers=Faults(DELAY, OpKind.H2D, delay_s=0.1))
    request = world.request(PROMPT)
    with pytest.raises(TransferError, match="must not read them"):
        world.executor.step()
    ends_s = time.monotonic() + LONG_S
    while world.scheduler.side.ranks.unit.manager.inflight_ops():
        assert time.monotonic() < ends_s, "the load's end is never heard of"
        world.scheduler.side.ranks.poll()
    world.scheduler.request_reset(request)
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert lookup(world) == 0
    rest_over(world)
    assert lookup(world) == WHOLE


def test_a_planned_load_that_its_reset_took_away_is_no_failed_one(
    make_world: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = stored(make_world, {"FLEXKV_LOAD_MODE": "sync"})
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    world.scheduler.request_reset(request)
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (WHOLE, False)
    assert not [record for record in caplog.records if "failed" in record.message]


def test_an_order_waits_for_its_id(make_world: Make) -> None:
    """A rank copies nothing for a load's order until the engine names the load's id. A slow rank may get the order
    before it has enqueued the forward pass that last used the blocks.
    """
    world = stored(make_world, movers=(faults := Faults(FAIL, OpKind.DISK_SEAL)))
    calls = faults.mover.calls
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    for _ in range(5):
        assert world.worker.get_finished([], []) == ([], [])
    assert faults.mover.calls == calls, "the order has come, and nothing was copied"
    assert loaded_by(world, 900) == [900]
    assert world.executor.pool.wrong(request, WHOLE) == []


def test_an_engine_that_takes_less_than_was_promised(make_world: Make) -> None:
    """If the engine takes fewer tokens than were promised, only blocks that certainly have KV are stored. The request's
    first report does not say how many tokens the engine took.
    """
    world = stored(make_world, {"FLEXKV_LOAD_MODE": "sync"})
    request = Request(900, [*PROMPT[:28], *range(500, 530)])
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (WHOLE, False)
    blocks = [world.executor.free.pop() for _ in range(15)]
    world.scheduler.update_state_after_alloc(request, blocks)
    # The engine took 8 of the 28 promised tokens and computes 24 more in a chunk, so 32 of the 58 tokens have KV.
    said = SimpleNamespace(request_id=900, computed_position=0, num_scheduled_tokens=24)
    world.worker.bind_connector_meta(
        world.scheduler.build_connector_meta(SimpleNamespace(new_requests=[said], cached_requests=[]))
    )
    world.worker.start_load_kv(None)
    side = world.scheduler.side
    tracker = side.ranks.requests[900]
    assert tracker.computed == 28, "24 + 28 would be 52, of which 20 were never computed"
    assert not world.scheduler.request_finished(request, blocks), "the 7 blocks are stored already"


def test_blocks_without_a_page_are_skipped(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    request = world.request(PROMPT, new_tokens=50)
    world.executor.run(until=lambda: request.state == "generation")
    blocks = list(request.blocks)
    blocks[2] = -1
    assert world.scheduler.request_finished(request, blocks)
    stored = world.scheduler.side.ranks.unit.manager
    world.worker.get_finished([request.request_id], [])
    ends_s = time.monotonic() + LONG_S
    while stored.inflight_ops():
        assert time.monotonic() < ends_s
        time.sleep(0.001)
        world.worker.get_finished([], [])
    assert stored.stats().stored_pages == 6
    fresh = Request(901, list(PROMPT))
    assert world.scheduler.get_num_new_matched_tokens(fresh, 0) == (8, True)
    world.scheduler.update_state_after_alloc(fresh, [-1, world.executor.free.pop(), -1])
    assert loaded_by(world, 901) == [901]
    stored.check_integrity()


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [([], []), ([-1, -1], []), ([3, 4], [(0, 2)]), ([-1, 3, -1, -1, 7, 8], [(1, 2), (4, 6)])],
)
def test_blocks_that_are_there_are_found_in_runs(blocks: list[int], runs: list[tuple[int, int]]) -> None:
    assert present_runs(np.asarray(blocks, np.int32)) == runs
