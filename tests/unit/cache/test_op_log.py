"""Tests the log lines about a manager's ops: failures at the default level, everything else at the debug level."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from flexkv.cache.base import OpRole
from flexkv.cache.moves.op_log import WORDS
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.observe.miss_reasons import MissReason
from flexkv.transfer.graph import OpId, OpResult, OpStatus
from tests.unit.cache.disk_world import NONE, DiskWorld, chain, traffic, written
from tests.unit.cache.host_world import end, ids, keys, make, store

GDS = traffic(gds_loads=GdsUse.ALWAYS, gds_stores=True)
Lines = Callable[[int], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Returns a function that returns the lines of the op log that have at least a given level."""
    return lambda level: [
        record.message
        for record in caplog.records
        if record.name == "flexkv.cache.moves.op_log" and record.levelno >= level
    ]


def test_every_role_of_an_op_has_its_words() -> None:
    assert set(WORDS) == set(OpRole)
    assert len(set(WORDS.values())) == len(OpRole)


def test_a_failed_load_is_named_at_the_default_level(lines: Lines) -> None:
    manager, chain = make(ranks=2), keys(4)
    plan = manager.begin_store("w", 0, chain, ids(0, 1, 2, 3), 0)
    assert plan.graph is not None
    for rank in range(2):
        end(manager, plan.graph.ops[0].op_id, rank=rank)
    manager.match("r", [chain], 0)
    graph = manager.begin_load("r", [ids(5, 6, 7, 8)])
    assert graph is not None
    op_id = graph.ops[0].op_id
    end(manager, op_id, OpStatus.FAILED, ids(2), rank=0)
    assert lines(logging.INFO) == [], "once, when every rank has reported"
    end(manager, op_id, OpStatus.FAILED, ids(0), rank=1)
    assert lines(logging.INFO) == [
        f"load from host memory, op {op_id} of request r: 2 of 4 pages failed: rank 0: why; rank 1: why"
    ]


def test_a_failed_store_is_named(lines: Lines) -> None:
    manager = make()
    plan = manager.begin_store("w", 0, keys(3), ids(0, 1, 2), 0)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id, OpStatus.LANE_DOWN)
    (line,) = lines(logging.WARNING)
    assert line.startswith("store to host memory, op 1 of request w: 3 of 3 pages failed: rank 0: why")


def test_failed_reads_and_writes_of_disks_are_named(lines: Lines) -> None:
    keys = chain(4)
    world = DiskWorld()
    world.store(keys)
    (write,) = world.take()
    world.end(write, lambda page: page == 3)
    world.run()
    world.drop_host()
    world.look(keys, "waits")
    (read,) = world.take()
    world.end(read, lambda page: page < 2)
    assert lines(logging.INFO) == [
        f"write from host memory to disk, op {write.op_id}: 1 of 4 pages failed: why",
        f"read from disk to host memory, op {read.op_id} for request waits: 2 of 3 pages failed: why",
    ]


def test_failed_loads_stores_and_seals_without_host_memory_are_named(lines: Lines) -> None:
    keys = chain(4)
    world = DiskWorld(limits=GDS)
    plan = world.manager.begin_store("w", 0, keys, np.arange(4, dtype=np.int32), 0)
    assert plan.graph is not None
    (stored,) = plan.graph.ops
    digests = np.ones((4, 1), np.uint64)
    failed = np.array([3], np.int32)
    world.manager.complete(0, OpResult(stored.op_id, OpStatus.FAILED, failed, "no room", digests))
    (seal,) = world.take()
    world.lane.end(seal.op_id)
    world.manager.work.complete(
        OpResult(OpId(seal.op_id), OpStatus.FAILED, np.arange(3, dtype=np.int32), "torn")
    )
    assert lines(logging.INFO) == [
        f"store to disk, op {stored.op_id} of request w: 1 of 4 pages failed: rank 0: no room",
        f"seal on disk, op {seal.op_id}: 3 of 3 pages failed: torn",
    ]


def test_a_failed_load_straight_from_disk_is_named(lines: Lines) -> None:
    keys = chain(2)
    world = written(keys, limits=traffic(gds_loads=GdsUse.ALWAYS))
    world.look(keys)
    op = world.load(2)
    world.end_load(op, failed=[1])
    assert lines(logging.INFO) == [
        f"load from disk, op {op.op_id} of request r: 1 of 2 pages failed: rank 0: why"
    ]


def test_what_nobody_waits_for_may_fail(lines: Lines) -> None:
    """A load that ends as cancelled is not logged, because it is not a failure: its request was aborted, or a reset
    came before its end.
    """
    manager, chain = make(), keys(4)
    for what in ("aborted", "overtaken"):
        store(manager, chain)
        manager.match("r", [chain], 0)
        graph = manager.begin_load("r", [ids(5, 6, 7, 8)])
        assert graph is not None
        if what == "aborted":
            manager.end_request("r")
        else:
            manager.reset()
        end(manager, graph.ops[0].op_id, OpStatus.CANCELLED)
        manager.forget(0, chain)
    assert lines(logging.INFO) == []


def test_a_storm_of_failed_loads_is_a_few_lines_and_a_count(lines: Lines) -> None:
    world = DiskWorld()
    for number in range(40):
        plan = world.manager.begin_store("w", 0, chain(1, number), ids(0), 0)
        assert plan.graph is not None
        result = OpResult(plan.graph.ops[0].op_id, OpStatus.LANE_DOWN, NONE, "down")
        world.manager.complete(0, result)
    assert len(lines(logging.WARNING)) == 10
    world.now_s += 61
    world.manager.expire()
    assert lines(logging.WARNING)[10:] == [
        "store to host memory: 30 more failed, 30 pages, within 61 s of the 10 that were named"
    ]


def test_debug_shows_lookups_loads_and_ends(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flexkv")
    keys = chain(5)
    world = written(keys[:3])
    world.store(keys[:1])
    caplog.clear()
    world.look(keys)
    world.run()
    world.look(keys)
    op = world.load(3)
    world.end_load(op)
    assert [line for line in lines(logging.DEBUG) if line.startswith("request r:")] == [
        "request r: 20 tokens looked up from 0 on, 4 promised (1 pages in host memory), tail 0, 1 reads waited for",
        "request r: 20 tokens looked up from 0 on, 12 promised (3 pages in host memory), tail 0, 0 reads waited for; "
        f"no more: {MissReason.ABSENT.words}",
        f"request r: op {op.op_id} (load from host memory), 3 pages",
        f"request r: op {op.op_id} (load from host memory) has ended, 3 of 3 pages arrived",
    ]
