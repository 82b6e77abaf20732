"""Each op of a rank ends in exactly one result. Blocks that may be wrong are reported, whichever call collects the
result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.rank_ops import RankOps
from flexkv.config import load_config
from flexkv.observe import Counters
from flexkv.transfer.graph import OpKind, OpResult, OpStatus, TransferGraph
from tests import testing_ext
from tests.unit.transfer.transfer_world import STALL, World


@pytest.fixture
def world() -> Iterator[World]:
    made = World(rules=[testing_ext.FaultRule(STALL, kind=int(OpKind.H2D), nth_op=1)], queue_ops=1)
    yield made
    made.close()


@pytest.fixture
def ops(world: World) -> RankOps:
    made = RankOps(load_config({}, {}), 0, Counters())
    made.engine = world.engine
    return made


def load_of(world: World, request_id: str, blocks: list[int], sync: bool = True) -> LoadJob:
    return LoadJob(request_id, TransferGraph((world.op(OpKind.H2D, blocks),)), sync)


@pytest.mark.parametrize("taken", [False, True])
def test_a_load_that_ended_well_may_be_invalidated(world: World, ops: RankOps, taken: bool) -> None:
    job = load_of(world, "one", [3, 4, 5])
    ops.submit_load(job)
    ops.finish_load(job)
    assert ops.reports.take_failed_blocks() == set(), "the control"
    if taken:
        assert [result.status for result in ops.reports.take_results()] == [OpStatus.OK]
    ops.invalidate(job, "nobody waited")
    assert ops.reports.take_failed_blocks() == {3, 4, 5}
    results = ops.reports.take_results()
    assert [(result.status, result.failed.tolist()) for result in results] == (
        [] if taken else [(OpStatus.CANCELLED, [0, 1, 2])]
    )


def test_lanes_are_polled_only_while_an_op_is_in_flight(
    world: World, ops: RankOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[int] = []
    poll = world.engine.poll

    def counted() -> list[OpResult]:
        results = poll()
        polls.append(len(results))
        return results

    monkeypatch.setattr(world.engine, "poll", counted)
    ops.poll()
    assert polls == []
    job = load_of(world, "one", [3, 4, 5])
    ops.submit_load(job)
    ops.finish_load(job)
    assert sum(polls) == 1, "the control"
    seen = len(polls)
    ops.poll(0.1)
    assert len(polls) == seen


def test_every_op_has_its_result_when_the_lanes_have_ended(world: World, ops: RankOps) -> None:
    first, stalled, waiting = (load_of(world, name, [at, at + 1], False) for at, name in enumerate("abc"))
    ops.submit_load(first)
    ops.finish_load(first)
    ops.submit_load(stalled)
    ops.submit_load(waiting)  # the queue has one entry, so this op waits
    assert world.mover.wait_stalled(1, 60.0)
    world.mover.release()
    ops.close()
    assert not ops.reports.take_failed_blocks() - {1, 2, 3}
    found = {result.op_id: result.status for result in ops.reports.take_results()}
    assert found.keys() == {op.op_id for job in (first, stalled, waiting) for op in job.graph.ops}
    assert found[first.graph.ops[0].op_id] is OpStatus.OK
    assert found[waiting.graph.ops[0].op_id] is OpStatus.CANCELLED
    assert ops.reports.take_finished() == {"a", "b", "c"}
    assert not ops.busy


def test_a_copy_kernel_that_could_not_be_started_is_counted_once() -> None:
    world = World()
    try:
        ops = RankOps(load_config({}, {}), 0, Counters())
        ops.engine = world.engine
        lane = SimpleNamespace(failed_launches=0, notes="the copy kernel is not used any more")
        world.engine.cuda_lane = lane  # type: ignore[assignment]
        counted: list[float] = []
        for failed in (0, 1, 1):
            lane.failed_launches = failed
            job = load_of(world, str(len(counted)), [failed + 3])
            ops.submit_load(job)
            ops.finish_load(job)
            counted.append(ops._counters.value("flexkv_failed_kernel_launches_total"))
        assert counted == [0, 1, 1]
    finally:
        world.close()


def test_giving_up_one_op_of_a_load_blames_no_page_of_the_others() -> None:
    """If one op of a load is cancelled, the results of its other ops name no failed pages. All ops of a load have one
    ticket, so cancelling one op also stops the others midway, but their pages are not necessarily bad.
    """
    world = World(rules=[testing_ext.FaultRule(STALL, kind=int(OpKind.H2D), nth_op=0)])
    try:
        ops = RankOps(load_config({}, {}), 0, Counters())
        ops.engine = world.engine
        both = tuple(world.op(OpKind.H2D, blocks) for blocks in ([1, 2, 3], [4, 5]))
        ops.submit_load(LoadJob("one", TransferGraph(both), False))
        assert world.mover.wait_stalled(1, 60.0)
        ops.give_up(both[1].op_id, "aborted")
        world.mover.release()
        ops.close()
        results = {result.op_id: result.status for result in ops.reports.take_results()}
        assert results == {op.op_id: OpStatus.CANCELLED for op in both}
    finally:
        world.close()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_load_whose_layer_was_late_has_failed_though_all_of_it_comes(in_time: bool) -> None:
    """If a layer of a load is late, the load counts as failed although all of its bytes arrive. When the wait ends, the
    load's last layer is being copied, so the load can no longer be cancelled.
    """
    world = World(rules=[testing_ext.FaultRule(STALL, kind=int(OpKind.H2D), layer=3)])
    try:
        ops = RankOps(load_config({}, {}), 0, Counters())
        ops.engine = world.engine
        job = LoadJob("one", TransferGraph((world.op(OpKind.H2D, [3], layerwise=True),)), True)
        ops.submit_load(job)
        assert world.mover.wait_stalled(1, 60.0)
        if in_time:
            world.mover.release()
        assert ops.wait_layer(job, 3, time.monotonic() + (60.0 if in_time else 0.05)) is in_time
        world.mover.release()
        ops.finish_load(job)
        assert ops.reports.take_failed_blocks() == (set() if in_time else {3})
    finally:
        world.close()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_store_that_outlives_its_step_has_failed_though_all_of_it_was_copied(in_time: bool) -> None:
    """A store that is still copying when its wait ends counts as failed, although all of its bytes are copied later.
    The engine may have overwritten the blocks before they were copied.
    """
    world = World(rules=[testing_ext.FaultRule(STALL, kind=int(OpKind.D2H))])
    try:
        ops = RankOps(load_config({"transfer.stuck_s": 60.0 if in_time else 0.05}, {}), 0, Counters())
        ops.engine = world.engine
        graph = TransferGraph((world.op(OpKind.D2H, [3, 4]),))
        ops.submit_store(graph)
        assert world.mover.wait_stalled(1, 60.0)
        if in_time:
            world.mover.release()
        ops.finish_stores([graph])
        world.mover.release()
        ops.close()
        [result] = ops.reports.take_results()
        assert result.status is (OpStatus.OK if in_time else OpStatus.FAILED)
        assert result.failed.tolist() == ([] if in_time else [0, 1])
    finally:
        world.close()


def test_a_store_that_cannot_be_enqueued_in_time_tears_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lane does not enqueue one store in time, only the pages of this store count as torn. While the rank waits
    for the slow store, the lane also enqueues the other stores for which the rank waits.
    """
    world = World(rules=[testing_ext.FaultRule(STALL, kind=int(OpKind.D2H))])
    try:
        ops = RankOps(load_config({}, {}), 0, Counters())
        ops.engine = world.engine
        graphs = [TransferGraph((world.op(OpKind.D2H, [block]),)) for block in (3, 4, 5)]
        for graph in graphs:
            ops.submit_store(graph)
        names = [graph.ops[0].op_id for graph in graphs]
        slow = ops._ops[names[0]].ticket
        now_s, asked, enqueued = [0.0], set[int](), set[int]()

        def order_after(ticket: int, wait_s: float) -> bool:
            asked.add(ticket)
            if wait_s > 0:
                now_s[0] += wait_s if ticket == slow else 0.0
                enqueued.update(asked - {slow})
            return ticket in enqueued

        with monkeypatch.context() as patched:
            patched.setattr(world.engine, "order_after", order_after)
            patched.setattr(
                "flexkv.adapters.common.rank_ops.time", SimpleNamespace(monotonic=lambda: now_s[0])
            )
            ops.keep_before_reuse({name: [0] for name in names}, 0.25)
        assert [ops._ops[name].torn for name in names] == [{0}, None, None]
        assert now_s == [0.25], "the slow one was waited for"
    finally:
        world.close()
