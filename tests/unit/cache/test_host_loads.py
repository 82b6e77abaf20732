"""Shows which slots are read by loads from host memory, and which pages are left after a failure."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import OpRole
from flexkv.transfer.graph import OpKind, OpStatus, Priority
from tests.unit.cache.host_world import end, hit, ids, keys, make, store


def test_a_load_reads_the_slots_that_were_stored() -> None:
    manager, chain = make(), keys(5)
    plan = manager.begin_store("a", 0, chain, ids(0, 1, 2, 3, 4), 0)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id)
    match = manager.match("b", [chain], 8)
    assert (match.blocks, match.groups[0].first_block) == (3, 2)
    graph = manager.begin_load("b", [ids(10, 11)])
    assert graph is not None
    (op,) = graph.ops
    assert (op.kind, op.priority) == (OpKind.H2D, Priority.LOAD)
    assert op.slots.tolist() == plan.graph.ops[0].slots.tolist()[2:4]
    done = end(manager, op.op_id)
    assert done is not None
    assert (done.role, done.blocks.tolist(), done.failed_blocks.tolist()) == (OpRole.LOAD, [10, 11], [])


def test_failed_pages_of_a_load_are_forgotten_and_the_rest_stay() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("b", [chain], 0)
    graph = manager.begin_load("b", [ids(5, 6, 7, 8)])
    assert graph is not None
    done = end(manager, graph.ops[0].op_id, OpStatus.FAILED, ids(2))
    assert done is not None
    assert done.failed_blocks.tolist() == [7]
    assert hit(manager, chain) == 2
    assert hit(manager, chain[3:]) == 1


@pytest.mark.parametrize(
    ("status", "kept"), [(OpStatus.CANCELLED, 4), (OpStatus.LANE_DOWN, 0), (OpStatus.SKIPPED, 0)]
)
def test_a_cancelled_load_forgets_nothing(status: OpStatus, kept: int) -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("b", [chain], 0)
    graph = manager.begin_load("b", [ids(5, 6, 7, 8)])
    assert graph is not None
    done = end(manager, graph.ops[0].op_id, status, np.arange(4, dtype=np.int32))
    assert done is not None
    assert len(done.failed_blocks) == 4
    assert hit(manager, chain) == kept
