"""A forked child cannot use its parent's engine and pool. If the child drops them, the parent can still use them."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

import pytest

from flexkv.errors import ClosedError
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpKind, OpStatus
from flexkv.transfer.host_pool import HostPool
from tests import testing_ext
from tests.unit.transfer.transfer_world import GENEROUS_S, STALL, World


def in_forked_child(check: Callable[[], None]) -> int:
    """Runs `check` in a forked child of this process. Returns the child's exit code, or 99 if the child had to be
    killed."""
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
    world = make_world(rules=[testing_ext.FaultRule(STALL, nth_op=1)], shared=shared)
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
