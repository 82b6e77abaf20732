"""Waits, cancel and close: a deadline ends the wait and never the op; every op ends once."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from flexkv import c_ext
from flexkv.errors import BlockRangeError, ClosedError, ContractError
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import EdgeKind, OpKind, OpStatus
from flexkv.transfer.host_pool import HostPool
from tests.unit.transfer.transfer_world import FAIL, GENEROUS_S, STALL, World


def test_a_deadline_ends_the_wait_and_not_the_op(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL)])
    before = world.scribble()
    ticket = world.submit(world.op(OpKind.D2H, [3]))
    start = time.monotonic()
    assert not world.engine.wait(ticket, 0.05)
    assert time.monotonic() - start >= 0.05
    assert not world.engine.wait(ticket, -1.0)
    assert not world.engine.wait(ticket, float("nan"))
    assert world.engine.poll() == []
    world.mover.release()
    assert world.engine.wait(ticket, GENEROUS_S)
    assert (world.stored(3) == before[:, 3].reshape(-1)).all()
    assert world.engine.wait(ticket, 0.0)
    world.results(1)
    assert world.engine.wait(ticket, 0.0), "known to have ended after its result was polled, too"


def test_tickets_never_given_are_refused(world: World) -> None:
    for ticket in (Ticket(0), Ticket(1), Ticket(-3)):
        with pytest.raises(ContractError, match=f"\\({ticket}\\): tickets given are"):
            world.engine.wait(ticket, 0.0)
        with pytest.raises(ContractError):
            world.engine.cancel(ticket)
        with pytest.raises(ContractError):
            world.engine.wait_layer(ticket, 0, 0.0)


def test_wait_layer_returns_when_that_layer_is_in_place(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.H2D, layer=2)])
    before = world.scribble()
    world.run(world.op(OpKind.D2H, range(3)))
    load = world.op(OpKind.H2D, [10, 11, 12], range(3), layerwise=True)
    ticket = world.submit(load)
    for layer in (0, 1):
        assert world.engine.wait_layer(ticket, layer, GENEROUS_S).ok
        assert (world.memory[layer, 10:13] == before[layer, 0:3]).all()
    late = world.engine.wait_layer(ticket, 2, 0.05)
    assert (late.in_time, late.failed, late.ok) == (False, {}, False)
    assert (world.memory[3, 10:13] == before[3, 10:13]).all(), "layer 3 came before layer 2"
    world.mover.release()
    assert world.engine.wait_layer(ticket, 3, GENEROUS_S).ok
    assert (world.memory[:, 10:13] == before[:, 0:3]).all()
    world.results(1)
    assert world.engine.wait_layer(ticket, 3, 0.0).ok, "asked again after the poll"
    with pytest.raises(BlockRangeError, match=r"layer 4: .*\[0, 4\)"):
        world.engine.wait_layer(ticket, 4, 0.0)
    with pytest.raises(BlockRangeError, match="layer -1"):
        world.engine.wait_layer(ticket, -1, 0.0)


def test_wait_layer_names_failed_pages(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(FAIL, kind=OpKind.H2D, page=1, layer=1)])
    load = world.op(OpKind.H2D, [10, 11, 12], layerwise=True)
    ticket = world.submit(load)
    answer = world.engine.wait_layer(ticket, 3, GENEROUS_S)
    assert answer.in_time
    assert {op: pages.tolist() for op, pages in answer.failed.items()} == {load.op_id: [1]}
    assert not answer.ok
    # Layers after the failed one are not moved for that page.
    assert world.counter.count(OpKind.H2D)[0] == 2 * 4 + 1
    result = world.results(1)[load.op_id]
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [1])


def test_wait_layer_of_an_op_that_is_not_layerwise_waits_for_all_of_it(
    make_world: Callable[..., World],
) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.H2D, page=1)])
    ticket = world.submit(world.op(OpKind.H2D, [0, 1]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    assert not world.engine.wait_layer(ticket, 0, 0.05).in_time
    world.mover.release()
    assert world.engine.wait_layer(ticket, 0, GENEROUS_S).ok
    world.results(1)


def test_forgotten_graphs_are_bounded(world: World) -> None:
    first = world.submit(world.op(OpKind.H2D, [0]))
    assert world.engine.wait(first, GENEROUS_S)
    world.results(1)
    for _ in range(256):
        world.run(world.op(OpKind.H2D, [0]))
    with pytest.raises(ContractError, match="was forgotten"):
        world.engine.wait_layer(first, 0, 0.0)
    assert world.engine.wait(first, 0.0)
    assert world.engine.cancel(first) == 0


def test_the_event_descriptor_is_readable_exactly_while_results_wait(world: World) -> None:
    def readable(timeout_s: float) -> bool:
        return bool(select.select([world.engine.event_fd], [], [], timeout_s)[0])

    assert not readable(0)
    ticket = world.submit(*[world.op(OpKind.D2H, [i]) for i in range(3)])
    assert readable(GENEROUS_S)
    assert world.engine.wait(ticket, GENEROUS_S)
    assert len(world.engine.poll(2)) == 2
    assert readable(0)
    assert len(world.engine.poll()) == 1
    assert not readable(0)
    assert world.engine.poll() == []
    # It wakes a thread that sleeps on it.
    woken = threading.Event()

    def sleep() -> None:
        if readable(GENEROUS_S):
            woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    world.submit(world.op(OpKind.D2H, [4]))
    assert woken.wait(GENEROUS_S)
    sleeper.join()
    world.results(1)
    with pytest.raises(ContractError, match="max_results=0"):
        world.engine.poll(0)


def test_cancel_before_anything_was_issued(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, nth_op=0)])
    world.submit(world.op(OpKind.D2H, [0]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    ops = [world.op(OpKind.D2H, [1, 2]), world.op(OpKind.H2D, [3, 4], [1, 2]), world.op(OpKind.D2H, [])]
    ticket = world.submit(*ops, edges=[(0, 1, EdgeKind.STREAM), (1, 2, EdgeKind.BARRIER)])
    assert world.engine.cancel(ticket) == 4
    assert world.engine.wait(ticket, 0.0), "cancelled ops end at once"
    results = world.results(3)
    assert {result.status for result in results.values()} == {OpStatus.CANCELLED}
    assert [results[op.op_id].failed.tolist() for op in ops] == [[0, 1], [0, 1], []]
    assert world.engine.cancel(ticket) == 0
    calls = world.mover.calls
    world.mover.release()
    world.results(1)
    assert world.mover.calls == calls, "a cancelled page was moved"


def test_cancel_while_pages_move_names_what_did_not_arrive(make_world: Callable[..., World]) -> None:
    # 1 MiB pages: a piece is 8 of them. Page 3 hangs, so pages 0..7 are under way and 8..19 are not.
    world = make_world(
        layers=2,
        blocks=20,
        slots=20,
        run_bytes=512 * 1024,
        rules=[c_ext.FaultRule(STALL, kind=OpKind.D2H, page=3)],
    )
    before = world.scribble()
    op = world.op(OpKind.D2H, range(20))
    ticket = world.submit(op)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    assert world.engine.cancel(ticket) == 12
    assert not world.engine.wait(ticket, 0.05), "it has not ended: its bytes are moving"
    world.mover.release()
    result = world.results(1)[op.op_id]
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, list(range(8, 20)))
    assert result.reason == "cancelled"
    assert all((world.stored(slot) == before[:, slot].reshape(-1)).all() for slot in range(8))


def test_cancel_between_layers_stops_after_the_one_that_moves(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.H2D, layer=1, page=0)])
    op = world.op(OpKind.H2D, [0, 1], layerwise=True)
    ticket = world.submit(op)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.engine.cancel(ticket)
    world.mover.release()
    result = world.results(1)[op.op_id]
    # Bytes of both pages moved, so the op is not CANCELLED: its targets are spoiled.
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [0, 1])
    assert world.counter.count(OpKind.H2D)[0] == 4


def test_cancel_after_the_end_changes_nothing(world: World) -> None:
    op = world.op(OpKind.D2H, [1])
    ticket = world.submit(op)
    assert world.engine.wait(ticket, GENEROUS_S)
    assert world.engine.cancel(ticket) == 0
    assert world.results(1)[op.op_id].status is OpStatus.OK


def test_close_with_work_in_flight(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.D2H, page=0)])
    before = world.scribble()
    moving, queued = world.op(OpKind.D2H, [0]), world.op(OpKind.H2D, [1, 2])
    world.submit(moving)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.submit(queued)
    assert not world.engine.close(0.05)
    with pytest.raises(ClosedError):
        world.submit(world.op(OpKind.D2H, [5]))
    with pytest.raises(ClosedError):
        world.engine.attach_view(1, world.view, world.pool)
    assert world.results(1)[queued.op_id].status is OpStatus.CANCELLED
    world.mover.release()
    assert world.engine.close(GENEROUS_S)
    assert world.engine.close(0.0)
    assert world.results(1)[moving.op_id].status is OpStatus.OK
    assert (world.stored(0) == before[:, 0].reshape(-1)).all()
    with pytest.raises(ClosedError):
        world.submit(world.op(OpKind.D2H, [5]))


def test_an_engine_dropped_while_bytes_move_frees_nothing_under_them(
    make_world: Callable[..., World],
) -> None:
    class Memory:
        """Stands for the engine's pool; can be watched."""

    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.D2H)])
    owner = Memory()
    seen = weakref.ref(owner)
    world.engine.attach_view(1, world.view, world.pool, owners=[owner])
    del owner
    world.submit(world.op(OpKind.D2H, [0]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    engine = world.engine
    assert not engine.close(0.02)
    del engine
    kept, world.engine = world.engine, None  # type: ignore[assignment]
    del kept
    gc.collect()
    assert seen() is not None, "memory was freed under a moving copy"
    world.mover.release()
    world.close = lambda: None  # type: ignore[method-assign]


def test_owners_of_a_detached_view_go_with_the_last_op_that_uses_it(make_world: Callable[..., World]) -> None:
    class Memory:
        """Stands for the engine's pool; can be watched."""

    world = make_world(rules=[c_ext.FaultRule(STALL, kind=OpKind.D2H, times=1)])
    idle, used = Memory(), Memory()
    seen_idle, seen_used = weakref.ref(idle), weakref.ref(used)
    world.engine.attach_view(1, world.view, world.pool, owners=[idle])
    del idle
    world.engine.detach_view(1)
    assert seen_idle() is None, "nothing used it"

    world.engine.detach_view(0)
    world.engine.attach_view(0, world.view, world.pool, owners=[used])
    del used
    world.submit(world.op(OpKind.D2H, [0]), world.op(OpKind.D2H, [1]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.engine.detach_view(0)
    gc.collect()
    assert seen_used() is not None, "an op still moves its bytes"
    world.mover.release()
    world.results(2)
    assert seen_used() is None, "held longer than any op needs it"


@pytest.mark.parametrize("call", ["wait", "wait_layer", "close"])
def test_an_interrupt_ends_a_wait_at_once(call: str) -> None:
    script = (
        "import os, signal, sys, threading, time\n"
        "from flexkv import c_ext\n"
        "from flexkv.transfer.graph import OpKind\n"
        "from tests.unit.transfer.transfer_world import STALL, World\n"
        "world = World(rules=[c_ext.FaultRule(STALL)])\n"
        "ticket = world.submit(world.op(OpKind.H2D, [0]))\n"
        "assert world.mover.wait_stalled(1, 30.0)\n"
        "waits = {\n"
        "    'wait': lambda: world.engine.wait(ticket, 1000.0),\n"
        "    'wait_layer': lambda: world.engine.wait_layer(ticket, 0, 1000.0),\n"
        "    'close': lambda: world.engine.close(1000.0),\n"
        "}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    waits[sys.argv[1]]()\n"
        "    print('ended')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "sys.stdout.flush()\n"
        "world.mover.release()\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, call], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert done.stdout.strip() == "interrupted", done


def test_the_exit_of_the_interpreter_frees_nothing_under_a_moving_copy() -> None:
    script = (
        "import numpy as np\n"
        "from flexkv import c_ext\n"
        "from flexkv.transfer.graph import OpKind\n"
        "from tests.unit.transfer.transfer_world import STALL, World\n"
        "class Memory:\n"
        "    def __del__(self): print('freed', flush=True)\n"
        "world = World(rules=[c_ext.FaultRule(STALL)])\n"
        "world.engine.attach_view(1, world.view, world.pool, owners=[Memory()])\n"
        "other = World(rules=[c_ext.FaultRule(1, delay_s=0.3)])\n"
        "for each in (world, other): each.submit(each.op(OpKind.D2H, [0]))\n"
        "assert world.mover.wait_stalled(1, 30.0)\n"
        "print('ready', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GENEROUS_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def in_forked_child(check: Callable[[], None]) -> int:
    """Exit code of a child of this process that ran `check`; 99 if it had to be killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + GENEROUS_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 99
        time.sleep(0.01)


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child_can_drop_what_is_its_parents(make_world: Callable[..., World], shared: bool) -> None:
    world = make_world(rules=[c_ext.FaultRule(STALL, nth_op=1)], shared=shared)
    before = world.scribble()
    world.run(world.op(OpKind.D2H, [3]))
    moving = world.op(OpKind.D2H, [4])
    world.submit(moving)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    descriptor = world.pool.descriptor() if shared else None

    def drop_everything() -> None:
        engine = world.engine
        calls: list[Callable[[], object]] = [
            lambda: world.submit(world.op(OpKind.D2H, [5])),
            engine.poll,
            lambda: engine.wait(Ticket(1), 1.0),
            lambda: engine.wait_layer(Ticket(1), 0, 1.0),
            lambda: engine.cancel(Ticket(1)),
            engine.lanes,
            lambda: engine.attach_view(7, world.view, world.pool),
            lambda: engine.detach_view(0),
            world.pool.report,
            lambda: world.pool.slot(3),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="stayed in process"):
                call()
        world.pool.close()
        world.pool = world.engine = None  # type: ignore[assignment]
        gc.collect()

    def attach() -> None:
        assert descriptor is not None
        other = HostPool.attach(descriptor)
        assert other.native.attached
        assert (other.slot(3)[: 4 * 1024] == before[:, 3].reshape(-1)).all()

    assert in_forked_child(drop_everything) == 0
    if shared:
        assert in_forked_child(attach) == 0, "a child's exit closed the pool for others"
    world.mover.release()
    assert world.results(1)[moving.op_id].status is OpStatus.OK
    world.run(world.op(OpKind.H2D, [9], [3]))
    assert (world.memory[:, 9] == before[:, 3]).all()


def test_graphs_without_ops_are_forgotten_too(world: World) -> None:
    first = world.submit()
    for _ in range(256):
        world.submit()
    with pytest.raises(ContractError, match="was forgotten"):
        world.engine.wait_layer(first, 0, 0.0)


def test_engines_leave_no_descriptors() -> None:
    World().close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        world = World()
        world.run(world.op(OpKind.D2H, [0]))
        world.close()
        del world.engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
