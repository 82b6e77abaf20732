"""Tests of edges between ops: when an op may start, and how a failure affects the ops that depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexkv.transfer.graph import EdgeKind, OpKind, OpStatus
from tests import testing_ext
from tests.unit.transfer.transfer_world import CORRUPT, DELAY, FAIL, GENEROUS_S, STALL, World


def test_a_stream_lets_each_page_follow_at_once_and_never_early(make_world: Callable[..., World]) -> None:
    # The engine has two copy threads, and page 2 of the store hangs. Meanwhile the load must copy all other pages.
    world = make_world(
        rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=2)],
        copy_threads=2,
        run_bytes=4 << 20,
        layers=2,
        blocks=12,
        slots=12,
    )
    before = world.scribble()
    store, load = (
        world.op(OpKind.D2H, [0, 1, 2, 3], [0, 1, 2, 3]),
        world.op(OpKind.H2D, [6, 7, 8, 9], [0, 1, 2, 3]),
    )
    ticket = world.submit(store, load, edges=[(0, 1, EdgeKind.STREAM)])
    assert world.mover.wait_stalled(1, GENEROUS_S)
    tries = 3000
    while world.counter.count(OpKind.H2D)[0] < 3 and tries:
        world.engine.wait(ticket, 0.01)
        tries -= 1
    assert world.counter.count(OpKind.H2D)[0] == 3, "pages 0, 1 and 3 did not follow"
    assert not world.engine.wait(ticket, 0.05)
    assert (world.memory[:, 8] == before[:, 8]).all(), "page 2 was loaded before it was stored"
    world.mover.release()
    assert world.engine.wait(ticket, GENEROUS_S)
    for source, target in enumerate([6, 7, 8, 9]):
        assert (world.memory[:, target] == before[:, source]).all()
    assert {result.status for result in world.results(2).values()} == {OpStatus.OK}


@pytest.mark.parametrize("kind", [EdgeKind.STREAM, EdgeKind.BARRIER])
@pytest.mark.parametrize("threads", [1, 4])
def test_edges_order_the_bytes(make_world: Callable[..., World], kind: EdgeKind, threads: int) -> None:
    # The ops copy in a chain: block -> slot -> block -> slot -> block. The stores are delayed, so a load that started
    # too early would copy old bytes.
    world = make_world(
        rules=[testing_ext.FaultRule(DELAY, kind=OpKind.D2H, delay_s=0.001)], copy_threads=threads
    )
    before = world.scribble()
    pages = range(6)
    ops = [
        world.op(OpKind.D2H, list(pages), list(pages)),
        world.op(OpKind.H2D, [8 + p for p in pages], list(pages), layerwise=True),
        world.op(OpKind.D2H, [8 + p for p in pages], [16 + p for p in pages]),
        world.op(OpKind.H2D, [16 + p for p in pages], [16 + p for p in pages]),
    ]
    world.run(*ops, edges=[(0, 1, kind), (1, 2, kind), (2, 3, kind)])
    for page in pages:
        assert (world.memory[:, 16 + page] == before[:, page]).all()


def test_a_barrier_holds_every_page_back(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=1)], copy_threads=2)
    ticket = world.submit(
        world.op(OpKind.D2H, [0, 1]), world.op(OpKind.H2D, [8, 9], [0, 1]), edges=[(0, 1, EdgeKind.BARRIER)]
    )
    assert world.mover.wait_stalled(1, GENEROUS_S)
    assert not world.engine.wait(ticket, 0.05)
    assert world.counter.count(OpKind.H2D)[0] == 0
    world.mover.release()
    assert world.engine.wait(ticket, GENEROUS_S)
    world.results(2)


def test_a_failed_page_fails_its_stream_successors_page_alone(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(FAIL, kind=OpKind.D2H, page=2, reason="disk on fire")])
    before = world.scribble()
    store, load = world.op(OpKind.D2H, range(5)), world.op(OpKind.H2D, range(10, 15), range(5))
    last = world.op(OpKind.D2H, range(10, 15), range(20, 25))
    results = world.run(store, load, last, edges=[(0, 1, EdgeKind.STREAM), (1, 2, EdgeKind.STREAM)])
    for op in (store, load, last):
        result = results[op.op_id]
        assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [2])
        assert "disk on fire" in result.reason
    assert f"op {store.op_id}" in results[load.op_id].reason
    assert (world.memory[:, 12] == before[:, 12]).all(), "a failed page must not be written"
    assert (world.memory[:, 14] == before[:, 4]).all()


def test_a_failed_op_skips_what_waits_behind_a_barrier(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(FAIL, nth_op=0, page=0)])
    ops = [
        world.op(OpKind.D2H, [0, 1]),
        world.op(OpKind.H2D, [8, 9], [0, 1]),
        world.op(OpKind.D2H, []),
        world.op(OpKind.D2H, [5]),
    ]
    results = world.run(*ops, edges=[(0, 1, EdgeKind.BARRIER), (1, 2, EdgeKind.BARRIER)])
    statuses = [results[op.op_id].status for op in ops]
    assert statuses == [OpStatus.FAILED, OpStatus.SKIPPED, OpStatus.SKIPPED, OpStatus.OK]
    assert results[ops[1].op_id].failed.tolist() == [0, 1]
    assert world.counter.count(OpKind.H2D)[0] == 0


def test_stream_pages_that_all_lost_their_predecessor_are_skipped(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(FAIL, kind=OpKind.D2H)])
    store, load = world.op(OpKind.D2H, [0, 1]), world.op(OpKind.H2D, [8, 9], [0, 1])
    results = world.run(store, load, edges=[(0, 1, EdgeKind.STREAM)])
    assert results[store.op_id].status is OpStatus.FAILED
    assert results[load.op_id].status is OpStatus.SKIPPED


def test_barrier_and_stream_into_one_op(make_world: Callable[..., World]) -> None:
    for failing, status in ((None, OpStatus.OK), (0, OpStatus.SKIPPED), (1, OpStatus.FAILED)):
        rules = [] if failing is None else [testing_ext.FaultRule(FAIL, nth_op=failing, page=0)]
        world = make_world(rules=rules)
        gate, store = world.op(OpKind.D2H, [9]), world.op(OpKind.D2H, [0, 1])
        load = world.op(OpKind.H2D, [4, 5], [0, 1])
        results = world.run(gate, store, load, edges=[(0, 2, EdgeKind.BARRIER), (1, 2, EdgeKind.STREAM)])
        assert results[load.op_id].status is status


def test_damage_between_store_and_load_is_found_by_the_digest(make_world: Callable[..., World]) -> None:
    for rules, expected in (
        ([], []),
        ([testing_ext.FaultRule(CORRUPT, kind=OpKind.D2H, page=1, corrupt_bytes=1)], [1]),
        ([testing_ext.FaultRule(CORRUPT, kind=OpKind.D2H, slot=2)], [2]),
    ):
        for layerwise in (False, True):
            world = make_world(
                rules=rules, run_bytes=3000, layers=3
            )  # pages of 9000 bytes leave space for digests in the slots
            world.engine.detach_view(0)
            world.engine.attach_view(0, world.view, world.pool, 0, digest_offset=9000, owners=[world.memory])
            before = world.scribble()
            world.run(world.op(OpKind.D2H, range(4)))
            load = world.op(OpKind.H2D, range(8, 12), range(4), layerwise=layerwise)
            result = world.run(load)[load.op_id]
            assert result.failed.tolist() == expected
            assert result.status is (OpStatus.FAILED if expected else OpStatus.OK)
            for page in range(4):
                arrived = (world.memory[:, 8 + page] == before[:, page]).all()
                assert arrived == (page not in expected)
            if expected:
                assert "digest mismatch in run 0 (layer 0)" in result.reason
