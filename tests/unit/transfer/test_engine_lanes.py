"""Tests of lanes: which op goes first, that every op gets its turn, and what happens if a device hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.transfer.graph import EdgeKind, OpId, OpKind, OpStatus, Priority
from tests import testing_ext
from tests.unit.transfer.transfer_world import GENEROUS_S, STALL, World

MIB = 1 << 20


def busy_world(make_world: Callable[..., World], blocks: int = 40) -> World:
    """Returns a world whose only copy thread is busy: it hangs in page 0 of an op. A page is 512 KiB."""
    world = make_world(
        layers=2,
        blocks=blocks,
        run_bytes=4 * MIB // 16,
        slots=blocks,
        rules=[testing_ext.FaultRule(STALL, nth_op=0)],
    )
    world.submit(world.op(OpKind.D2H, [0]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    return world


def test_loads_go_before_stores_whatever_came_first(make_world: Callable[..., World]) -> None:
    world = busy_world(make_world)
    ops = {
        "store": world.op(OpKind.D2H, [1]),
        "old store": world.op(OpKind.D2H, [2], priority=Priority.STORE),
        "load": world.op(OpKind.H2D, [4]),
        "store for a load": world.op(OpKind.D2H, [5]),
    }
    for name in ("store", "old store", "load"):
        world.submit(ops[name])
    follower = world.op(OpKind.H2D, [6], [5])
    world.submit(ops["store for a load"], follower, edges=[(0, 1, EdgeKind.BARRIER)])
    world.mover.release()
    order = list(world.results(6))[1:]
    names = {op.op_id: name for name, op in ops.items()} | {follower.op_id: "follower"}
    assert [names[op_id] for op_id in order] == [
        "load",
        "store for a load",
        "follower",
        "store",
        "old store",
    ]


def test_a_waiting_load_gets_in_between_the_pieces_of_a_running_store(
    make_world: Callable[..., World],
) -> None:
    # A page is 512 KiB, so a work item has 16 pages, and the store of 40 pages has three work items.
    world = make_world(
        layers=2,
        blocks=48,
        run_bytes=MIB // 4,
        slots=48,
        rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=0)],
    )
    store, load = world.op(OpKind.D2H, range(40)), world.op(OpKind.H2D, range(40, 48))
    world.submit(store)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.submit(load)
    world.mover.release()
    assert list(world.results(2)) == [load.op_id, store.op_id]


def test_endless_loads_do_not_starve_a_store(make_world: Callable[..., World]) -> None:
    world = busy_world(make_world)
    store = world.op(OpKind.D2H, [1])
    world.submit(store)
    loads = [world.op(OpKind.H2D, [2 + i % 30]) for i in range(100)]
    for load in loads:
        world.submit(load)
    world.mover.release()
    order = list(world.results(102))
    behind = order.index(store.op_id)
    assert 2 <= behind <= 18, f"the store ended after {behind} of 101 others"


def threads() -> dict[str, str]:
    """Returns the names of the threads of all transfer engines, by thread id. Leaves out threads that end during the
    call."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[task] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return {task: name for task, name in names.items() if name in ("flexkv-copy", "flexkv-watch")}


def test_idle_threads_sleep(world: World) -> None:
    def wakes() -> int:
        """Returns how many times the threads of this engine have gone to sleep so far."""
        said = [Path(f"/proc/self/task/{task}/status").read_text() for task in mine]
        return sum(int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for status in said)

    earlier = threads()
    world.run(world.op(OpKind.D2H, [0]))
    mine = threads().keys() - earlier.keys()
    assert mine
    before = wakes()
    time.sleep(0.5)
    # If the threads polled once per millisecond, each would have gone to sleep 500 times.
    assert wakes() - before < 50


def test_threads_start_on_first_use_and_end_with_the_engine(make_world: Callable[..., World]) -> None:
    earlier = threads()  # the difference excludes threads of other tests' engines, which may still be closing

    def started() -> list[str]:
        return sorted(name for task, name in threads().items() if task not in earlier)

    world = make_world(copy_threads=3)
    assert started() == []
    world.run(world.op(OpKind.D2H, [0]))
    assert started() == ["flexkv-copy", "flexkv-copy", "flexkv-copy", "flexkv-watch"]
    world.close()
    assert started() == []


def wait_until_down(world: World, kind: OpKind) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while any(lane.up for lane in world.engine.lanes() if lane.kind is kind):
        assert time.monotonic() < deadline, f"{kind} never went down"
        time.sleep(0.01)


def test_a_hung_op_takes_its_lane_down_and_stays_open_until_it_ends(make_world: Callable[..., World]) -> None:
    world = make_world(
        rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=0)], copy_threads=2, op_stuck_s=0.1
    )
    hung, queued = world.op(OpKind.D2H, [0, 1]), world.op(OpKind.D2H, [2])
    hung_ticket = world.submit(hung)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.engine.cancel(world.submit(world.op(OpKind.D2H, [])))
    world.results(1)
    wait_until_down(world, OpKind.D2H)
    down = next(lane for lane in world.engine.lanes() if lane.kind is OpKind.D2H)
    assert down.stuck == (hung.op_id,)
    assert f"op {hung.op_id} has not moved for 0.1" in down.reason
    # After the lane has gone down, its later ops end at once, and ops that wait for them are skipped. Loads still work,
    # because one thread is left.
    late, after = world.op(OpKind.D2H, [3]), world.op(OpKind.H2D, [4], [3])
    results = world.run(queued, late, after, edges=[(1, 2, EdgeKind.BARRIER)])
    assert results[queued.op_id].status is results[late.op_id].status is OpStatus.LANE_DOWN
    assert results[late.op_id].failed.tolist() == [0]
    assert results[after.op_id].status is OpStatus.SKIPPED
    load = world.op(OpKind.H2D, [5])
    assert world.run(load)[load.op_id].status is OpStatus.OK
    # The hung op has no result and cannot be cancelled, and close() does not succeed meanwhile.
    assert not world.engine.wait(hung_ticket, 0.05)
    assert world.engine.cancel(hung_ticket) == 0
    assert world.engine.poll() == []
    assert not world.engine.close(0.05)
    world.mover.release()
    result = world.results(1)[hung.op_id]
    assert result.status in (OpStatus.OK, OpStatus.FAILED)
    assert 0 not in result.failed, "page 0 did move in the end"


def test_ops_queued_behind_a_hung_one_end_as_lane_down(make_world: Callable[..., World]) -> None:
    # One thread serves both directions, so a hung store takes the loads down too: no thread is left to copy them.
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H)], op_stuck_s=0.2)
    hung, store, load = world.op(OpKind.D2H, [0]), world.op(OpKind.D2H, [1]), world.op(OpKind.H2D, [2])
    world.submit(hung)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.submit(store)
    world.submit(load)
    results = world.results(2)
    assert {results[op.op_id].status for op in (store, load)} == {OpStatus.LANE_DOWN}
    assert [lane.up for lane in world.engine.lanes()] == [False, False]
    world.mover.release()
    assert world.results(1)[hung.op_id].status is OpStatus.OK
    assert not any(lane.stuck for lane in world.engine.lanes())


def test_a_lane_comes_up_again_when_what_hung_has_ended(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, times=1)], op_stuck_s=1.0)
    before = world.scribble()
    with caplog.at_level(logging.WARNING, logger="flexkv.transfer.engine"):
        hung, meanwhile = world.op(OpKind.D2H, [0]), world.op(OpKind.D2H, [1])
        world.submit(hung)
        assert world.mover.wait_stalled(1, GENEROUS_S)
        wait_until_down(world, OpKind.D2H)
        assert world.run(meanwhile)[meanwhile.op_id].status is OpStatus.LANE_DOWN
        world.mover.release()
        assert world.results(1)[hung.op_id].status is OpStatus.OK
    assert [(lane.up, lane.reason, lane.times_down) for lane in world.engine.lanes()] == [(True, "", 1)] * 2
    said = [record.getMessage() for record in caplog.records]
    assert sum("is down" in line for line in said) == 2
    assert [line for line in said if "up again" in line] == ["lane H2D is up again", "lane D2H is up again"]
    after = [world.op(OpKind.D2H, [2]), world.op(OpKind.H2D, [5], [2])]
    results = world.run(*after, edges=[(0, 1, EdgeKind.STREAM)])
    assert {result.status for result in results.values()} == {OpStatus.OK}
    assert (world.memory[:, 5] == before[:, 2]).all()


def test_a_process_that_was_stopped_has_no_hung_copies() -> None:
    script = (
        "import sys, time\n"
        "from tests import testing_ext\n"
        "from flexkv.transfer.graph import OpKind\n"
        "from tests.unit.transfer.transfer_world import STALL, World\n"
        "world = World(rules=[testing_ext.FaultRule(STALL)], op_stuck_s=4.0)\n"
        "world.submit(world.op(OpKind.D2H, [0]))\n"
        "assert world.mover.wait_stalled(1, 30.0)\n"
        "print('moving', flush=True)\n"
        "sys.stdin.readline()\n"
        "time.sleep(0.3)\n"
        "print([lane.up for lane in world.engine.lanes()], flush=True)\n"
        "world.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "moving\n"
        os.kill(child.pid, signal.SIGSTOP)
        # This is longer than op_stuck_s. By the clock alone, the copy would count as hung.
        time.sleep(5.0)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "[True, True]\n"


def test_progress_page_by_page_is_not_a_hang(make_world: Callable[..., World]) -> None:
    world = make_world(
        rules=[testing_ext.FaultRule(1, delay_s=0.1)], op_stuck_s=5.0
    )  # the delay is far below the limit, because the machine may be busy
    op = world.op(OpKind.D2H, range(4))
    assert world.run(op)[op.op_id].status is OpStatus.OK
    assert all(lane.up for lane in world.engine.lanes())


@pytest.mark.parametrize("threads", [1, 2])
def test_many_submitters_and_one_poller(make_world: Callable[..., World], threads: int) -> None:
    world = make_world(copy_threads=threads, blocks=64, slots=64)
    accepted: list[OpId] = []

    def work(first: int) -> None:
        for turn in range(50):
            op = world.op(OpKind.D2H if turn % 2 else OpKind.H2D, range(first, first + 8))
            accepted.append(op.op_id)
            ticket = world.submit(op)
            assert world.engine.wait(ticket, GENEROUS_S)

    workers = [threading.Thread(target=work, args=(16 * i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    results = world.results(200)
    for worker in workers:
        worker.join(GENEROUS_S)
    assert sorted(results) == sorted(accepted)
