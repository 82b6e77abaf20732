"""Tests waits for ops, layers and results. A wait ends at its deadline, while the op continues."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from flexkv.errors import BlockRangeError, ContractError
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpKind, OpStatus
from tests import testing_ext
from tests.unit.transfer.transfer_world import FAIL, GENEROUS_S, STALL, World


def test_a_deadline_ends_the_wait_and_not_the_op(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL)])
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
        refused = f"\\({ticket}\\): tickets given are"
        with pytest.raises(ContractError, match=refused):
            world.engine.wait(ticket, 0.0)
        with pytest.raises(ContractError, match=refused):
            world.engine.cancel(ticket)
        with pytest.raises(ContractError, match=refused):
            world.engine.wait_layer(ticket, 0, 0.0)


def test_wait_layer_returns_when_that_layer_is_in_place(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.H2D, layer=2)])
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
    world = make_world(rules=[testing_ext.FaultRule(FAIL, kind=OpKind.H2D, page=1, layer=1)])
    load = world.op(OpKind.H2D, [10, 11, 12], layerwise=True)
    ticket = world.submit(load)
    answer = world.engine.wait_layer(ticket, 3, GENEROUS_S)
    assert answer.in_time
    assert {op: pages.tolist() for op, pages in answer.failed.items()} == {load.op_id: [1]}
    assert not answer.ok
    # The page that failed in layer 1 is not moved in the later layers.
    assert world.counter.count(OpKind.H2D)[0] == 2 * 4 + 1
    result = world.results(1)[load.op_id]
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [1])


def test_wait_layer_of_an_op_that_is_not_layerwise_waits_for_all_of_it(
    make_world: Callable[..., World],
) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.H2D, page=1)])
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
    # When a result is ready, the descriptor wakes a thread that sleeps on it.
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


@pytest.mark.parametrize("call", ["wait", "wait_layer", "close"])
def test_an_interrupt_ends_a_wait_at_once(call: str) -> None:
    script = (
        "import os, signal, sys, threading, time\n"
        "from tests import testing_ext\n"
        "from flexkv.transfer.graph import OpKind\n"
        "from tests.unit.transfer.transfer_world import STALL, World\n"
        "world = World(rules=[testing_ext.FaultRule(STALL)])\n"
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


def test_graphs_without_ops_are_forgotten_too(world: World) -> None:
    first = world.submit()
    for _ in range(256):
        world.submit()
    with pytest.raises(ContractError, match="was forgotten"):
        world.engine.wait_layer(first, 0, 0.0)
