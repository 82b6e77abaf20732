"""Requests are cancelled or reset, and ranks lose their scheduler. In all cases every block goes back to the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv.adapters.tensorrt_llm.link import Listener, connect
from flexkv.errors import ClosedError
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    SHAPE,
    WHOLE,
    Make,
    World,
    promised,
    stalled_load,
    steps,
    stored,
)
from tests.unit.transfer.transfer_world import STALL


def test_a_request_that_is_cancelled_while_it_loads(make_world: Make) -> None:
    world, request, faults = stalled_load(make_world)
    world.executor.cancel(request)
    steps(world)
    assert request.state == "saving", "bytes may still arrive: the blocks stay"
    faults.mover.release()
    world.executor.run()
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_a_request_that_is_cancelled_while_it_computes(make_world: Make) -> None:
    """If a request is cancelled while it computes, only its computed blocks are stored."""
    world = make_world(chunk=6)
    world.warm_up()
    request = world.request(PROMPT)
    steps(world, 2)
    assert request.position == 12
    world.executor.cancel(request)
    world.executor.run()
    assert world.hit(world.serve(PROMPT)) == 12
    world.check()


def test_a_request_that_is_cancelled_while_its_load_waits_for_a_place(
    make_world: Make,
) -> None:
    """Other requests do not wait for a cancelled request whose load still waits for a queue entry, because no forward
    pass will read the load's blocks.
    """
    faults = Faults(STALL, OpKind.H2D, times=1)
    world = stored(make_world, {"FLEXKV_TRANSFER_QUEUE_OPS": "1"}, movers=faults)
    first = world.request(PROMPT)
    world.executor.step()
    assert faults.mover.wait_stalled(1, LONG_S)
    second = world.request(PROMPT)
    steps(world)
    assert second.state == "loading"
    world.executor.cancel(second)
    other = world.request([5, 6, 7, 8, 9])
    world.executor.run(until=lambda: other.state in ("saving", "done"))
    faults.mover.release()
    world.executor.run()
    assert world.hit(first) == WHOLE
    world.check()


def test_a_reset_request_starts_again(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    request = world.request(PROMPT)
    world.executor.step()
    world.scheduler.request_reset(request)
    assert not world.scheduler.request_finished(request, list(request.blocks)), (
        "nothing is known of its new blocks"
    )
    world.executor.requests.clear()


def test_pages_that_find_no_slot_are_counted_by_that_name(make_world: Make) -> None:
    first = make_world()
    first.warm_up()
    slot_bytes = first.scheduler.side.ranks.unit.pool.slot_bytes
    world = make_world({"FLEXKV_HOST_BYTES": str(4 * slot_bytes)})
    world.warm_up()
    counters = world.scheduler.side.counters
    before = counters.value("flexkv_dropped_store_pages_total", reason="no_slot")
    world.serve(PROMPT)
    lost = counters.value("flexkv_dropped_store_pages_total", reason="no_slot") - before
    assert lost == WHOLE // SHAPE.tokens - world.scheduler.side.ranks.unit.slots == 3
    assert counters.value("flexkv_dropped_store_pages_total", reason="busy") == 0


@pytest.mark.parametrize("asks", [False, True], ids=["reset", "asks again"])
def test_pages_that_a_preempted_request_computed_are_counted(make_world: Make, asks: bool) -> None:
    world = make_world(chunk=6)
    world.warm_up()
    request = world.request(PROMPT)
    steps(world, 2)
    _lose_blocks(world, request, asks)
    computed = 12 // SHAPE.tokens
    assert _preempted(world) == computed
    _lose_blocks(world, request, asks)
    assert _preempted(world) == computed, "it had computed nothing since"
    world.executor.requests.clear()


@pytest.mark.parametrize("asks", [False, True], ids=["reset", "asks again"])
def test_control_pages_that_another_request_stored_are_not_lost(make_world: Make, asks: bool) -> None:
    world = stored(make_world)
    request = world.request(PROMPT, new_tokens=50)
    world.executor.run(until=lambda: request.state == "generation")
    _lose_blocks(world, request, asks)
    assert _preempted(world) == 0
    world.executor.requests.clear()


def _lose_blocks(world: World, request: Request, asks: bool) -> None:
    if asks:
        world.scheduler.get_num_new_matched_tokens(request, 0)
    else:
        world.scheduler.request_reset(request)


def _preempted(world: World) -> float:
    return world.scheduler.side.counters.value("flexkv_dropped_store_pages_total", reason="preempted")


def test_a_request_that_lost_its_blocks_stores_nothing_of_its_new_ones(
    make_world: Make,
) -> None:
    """If the engine paused a request and gave it new blocks, these blocks are not stored when the client disconnects
    before the next forward pass. They hold no KV yet.
    """
    world = make_world()
    world.warm_up()
    request = world.request(PROMPT, new_tokens=50)
    world.executor.run(until=lambda: request.state == "generation")
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    world.scheduler.update_state_after_alloc(request, list(request.blocks))
    assert not world.scheduler.request_finished(request, list(request.blocks))
    world.executor.requests.clear()


@pytest.mark.parametrize("ended", [False, True])
def test_a_load_that_was_planned_for_a_request_that_goes_is_dropped(make_world: Make, ended: bool) -> None:
    """A planned load is dropped if its request ends, or loses its blocks, before the step that would load. At that step
    the blocks already belong to another request.
    """
    world = stored(make_world, {"FLEXKV_LOAD_MODE": "sync"})
    manager = world.scheduler.side.ranks.unit.manager
    request, blocks = promised(world)
    world.scheduler.update_state_after_alloc(request, blocks)
    assert manager.inflight_ops() == 1
    if ended:
        assert not world.scheduler.request_finished(request, blocks)
    else:
        world.scheduler.request_reset(request)
    nothing = SimpleNamespace(new_requests=[], cached_requests=[])
    assert world.scheduler.build_connector_meta(nothing).loads == ()
    assert manager.inflight_ops() == 0
    world.executor.free += blocks
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_a_rank_without_its_scheduler_gives_blocks_back(make_world: Make) -> None:
    world = make_world()
    world.warm_up()
    world.scheduler.shutdown()
    saved: list[int] = []
    for _ in range(100):
        saved += world.worker.get_finished([7] if _ == 0 else [], [])[0]
    assert saved == [7]


def test_a_rank_without_its_scheduler_gives_back_loads_that_it_never_started(
    make_world: Make,
) -> None:
    world = stored(make_world)
    request, blocks = promised(world)
    world.worker.side._wire.close("for the test")
    world.scheduler.update_state_after_alloc(request, blocks)
    for loading in ([900], [], []):
        assert world.worker.get_finished([], loading) == ([], []), "its blocks hold nothing"
    assert world.worker.get_finished([900], []) == ([900], [900]), "it was cancelled"


def test_a_rank_that_hangs_up_right_after_it_joined_is_broken() -> None:
    listener = Listener()
    wire = connect(listener.address)
    wire.send(SimpleNamespace(word="hello"))
    wire.close("its process died")
    [(heard, _)] = listener.poll()
    assert heard.closed
    listener.admit(heard)
    assert listener.broken == "the other side ended"
    listener.close()


def test_nobody_listens() -> None:
    listener = Listener()
    address = listener.address
    wire = connect(address)
    wire.send(SimpleNamespace(word="hello"))
    [(heard, message)] = listener.poll()
    assert message.word == "hello"
    listener.broadcast(b"to ranks only")
    assert wire.receive() == []
    listener.admit(heard)
    listener.broadcast(b"x" * 1_000_000)
    found: list[bytes] = []
    for _ in range(1000):
        found += wire.receive()
        listener.poll()
        if found:
            break
    assert found == [b"x" * 1_000_000]
    listener.close()
    assert wire.receive() == []
    assert wire.closed
    with pytest.raises(ClosedError, match="no scheduler listens"):
        connect(address)
