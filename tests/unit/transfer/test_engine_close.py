"""If an engine is closed or dropped, or its process exits, no memory is freed while a copy uses it. No thread or memory
remains.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from flexkv.errors import ClosedError
from flexkv.transfer.graph import OpKind, OpStatus
from tests import testing_ext
from tests.unit.transfer.transfer_world import GENEROUS_S, STALL, World


def test_close_with_work_in_flight(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=0)])
    before = world.scribble()
    moving, queued = world.op(OpKind.D2H, [0]), world.op(OpKind.H2D, [1, 2])
    world.submit(moving)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.submit(queued)
    assert not world.engine.close(0.05)
    with pytest.raises(ClosedError, match="submit: the transfer engine was closed"):
        world.submit(world.op(OpKind.D2H, [5]))
    with pytest.raises(ClosedError, match="attach_view: the transfer engine was closed"):
        world.engine.attach_view(1, world.view, world.pool)
    assert world.results(1)[queued.op_id].status is OpStatus.CANCELLED
    world.mover.release()
    assert world.engine.close(GENEROUS_S)
    assert world.engine.close(0.0)
    assert world.results(1)[moving.op_id].status is OpStatus.OK
    assert (world.stored(0) == before[:, 0].reshape(-1)).all()
    with pytest.raises(ClosedError, match="submit: the transfer engine was closed"):
        world.submit(world.op(OpKind.D2H, [5]))


def test_an_engine_dropped_while_bytes_move_frees_nothing_under_them(
    make_world: Callable[..., World],
) -> None:
    class Memory:
        """A stand-in for the memory of the engine's pool. A test can observe when it is freed."""

    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H)])
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
        """A stand-in for the memory of the engine's pool. A test can observe when it is freed."""

    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, times=1)])
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


class SlowAnswers:
    """Wraps the native engine. It delays the return of one of the engine's calls until the test lets it continue. The
    call itself is carried out at once.
    """

    def __init__(self, native: object, late: str) -> None:
        self._native = native
        self._late = late
        self.done, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._native, name)
        if name != self._late:
            return found

        def call(*arguments: object) -> object:
            answer = found(*arguments)
            self.done.set()
            assert self.go_on.wait(GENEROUS_S)
            return answer

        return call


@pytest.mark.parametrize("late", ["attach_view", "detach_view"])
def test_owners_go_where_another_thread_comes_between(make_world: Callable[..., World], late: str) -> None:
    class Memory:
        """A stand-in for the memory of the engine's pool. A test can observe when it is freed."""

    world = make_world()
    native = world.engine._native
    slow = SlowAnswers(native, late)
    memory = [Memory()]
    seen = weakref.ref(memory[0])
    faults: list[Exception] = []

    def attach() -> None:
        world.engine.attach_view(1, world.view, world.pool, owners=[memory.pop()])

    def detach() -> None:
        try:
            world.engine.detach_view(1)
        except Exception as fault:
            faults.append(fault)

    def look() -> None:
        world.engine._drop_released()

    if late == "detach_view":
        attach()
    world.engine._native = slow  # type: ignore[assignment]
    first = threading.Thread(target=attach if late == "attach_view" else detach)
    second = threading.Thread(target=detach if late == "attach_view" else look)
    first.start()
    assert slow.done.wait(GENEROUS_S)
    second.start()
    second.join(0.2)  # either the second thread still waits for the first one, or it has already returned
    slow.go_on.set()
    first.join(GENEROUS_S)
    second.join(GENEROUS_S)
    world.engine._native = native
    gc.collect()
    assert not faults
    assert seen() is None, "held by a table of owners that nothing names any more"


def test_the_exit_of_the_interpreter_frees_nothing_under_a_moving_copy() -> None:
    script = (
        "import numpy as np\n"
        "from tests import testing_ext\n"
        "from flexkv.transfer.graph import OpKind\n"
        "from tests.unit.transfer.transfer_world import STALL, World\n"
        "class Memory:\n"
        "    def __del__(self): print('freed', flush=True)\n"
        "world = World(rules=[testing_ext.FaultRule(STALL)])\n"
        "world.engine.attach_view(1, world.view, world.pool, owners=[Memory()])\n"
        "other = World(rules=[testing_ext.FaultRule(1, delay_s=0.3)])\n"
        "for each in (world, other): each.submit(each.op(OpKind.D2H, [0]))\n"
        "assert world.mover.wait_stalled(1, 30.0)\n"
        "print('ready', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GENEROUS_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


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
