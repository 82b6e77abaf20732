"""Tests stores to host memory: when their pages become hits, and when they never do."""

from __future__ import annotations

from flexkv.cache.base import OpRole
from flexkv.transfer.graph import OpKind, OpStatus, Priority
from tests.unit.cache.host_world import end, hit, ids, keys, make, store


def test_a_store_becomes_a_hit_when_it_has_ended() -> None:
    manager, chain = make(), keys(5)
    plan = manager.begin_store("a", 0, chain, ids(9, 8, 7, 6, 5), 0)
    assert plan.graph is not None
    (op,) = plan.graph.ops
    assert (op.kind, op.priority, op.blocks.tolist()) == (OpKind.D2H, Priority.STORE, [9, 8, 7, 6, 5])
    assert hit(manager, chain) == 0
    again = manager.begin_store("b", 0, chain, ids(1, 2, 3, 4, 0), 0)
    assert (again.graph, again.known, again.dropped) == (None, 5, 0)
    done = end(manager, op.op_id)
    assert done is not None
    assert (done.role, done.published.tolist(), done.failed_blocks.tolist()) == (
        OpRole.STORE,
        [0, 1, 2, 3, 4],
        [],
    )
    assert hit(manager, chain) == 5


def test_a_page_counts_only_when_it_is_good_on_every_rank() -> None:
    manager, chain = make(ranks=2), keys(3)
    plan = manager.begin_store("a", 0, chain, ids(0, 1, 2), 0)
    assert plan.graph is not None
    op_id = plan.graph.ops[0].op_id
    assert end(manager, op_id) is None
    assert hit(manager, chain) == 0
    done = end(manager, op_id, OpStatus.FAILED, ids(1), rank=1)
    assert done is not None
    assert done.published.tolist() == [0, 2]
    assert done.failed_blocks.tolist() == [1]
    assert done.reason == "rank 1: why"
    assert hit(manager, chain) == 1


def test_what_was_computed_from_a_failed_load_is_not_published_and_can_be_stored_again() -> None:
    manager, chain = make(), keys(6)
    store(manager, chain[:3])
    manager.match("b", [chain], 0)
    load = manager.begin_load("b", [ids(5, 6, 7)])
    poisoned = manager.begin_store("b", 0, chain[3:], ids(8, 9, 10), 3)
    assert load is not None
    assert poisoned.graph is not None
    end(manager, load.ops[0].op_id, OpStatus.FAILED, ids(1))
    recomputed = manager.begin_store("b", 0, chain[1:], ids(6, 7, 8, 9, 10), 1)
    assert recomputed.graph is not None
    assert recomputed.stored.tolist() == [0, 2, 3, 4]
    first = end(manager, poisoned.graph.ops[0].op_id)
    assert first is not None
    assert not len(first.published)
    second = end(manager, recomputed.graph.ops[0].op_id)
    assert second is not None
    assert len(second.published) == 4
    assert hit(manager, chain) == 6
    assert manager.stats().discarded_pages == 3


def test_a_store_that_ends_before_its_load_is_not_published() -> None:
    manager, chain = make(), keys(6)
    store(manager, chain[:3])
    manager.match("b", [chain], 0)
    load = manager.begin_load("b", [ids(5, 6, 7)])
    late = manager.begin_store("b", 0, chain[3:], ids(8, 9, 10), 3)
    assert load is not None
    assert late.graph is not None
    done = end(manager, late.graph.ops[0].op_id)
    assert done is not None
    assert not len(done.published)


def test_discard_bars_other_requests_from_a_block_on() -> None:
    manager, chain = make(), keys(6)
    plan = manager.begin_store("b", 0, chain, ids(0, 1, 2, 3, 4, 5), 10)
    assert manager.discard_from("b", 13 * 4) == 3
    assert manager.discard_from("b", 13 * 4 - 1) == 1
    assert manager.discard_from("other", 0) == 0
    assert plan.graph is not None
    done = end(manager, plan.graph.ops[0].op_id)
    assert done is not None
    assert done.published.tolist() == [0, 1]
    assert hit(manager, chain) == 2


def test_of_chunks_stored_one_by_one_the_last_is_evicted_first() -> None:
    manager, chain = make(slots=12), keys(12)
    for first in range(0, 12, 2):
        store(manager, chain[first : first + 2], "a", first)
    manager.release("a")
    store(manager, keys(5, seed=1))
    assert hit(manager, chain) == 7


def test_leased_blocks_are_not_evicted_and_the_store_is_busy() -> None:
    manager, chain = make(slots=4), keys(4)
    store(manager, chain)
    manager.match("b", [chain[:3]], 0)
    plan = manager.begin_store("c", 0, keys(3, seed=1), ids(0, 1, 2), 0)
    assert (plan.stored.tolist(), plan.dropped) == ([0], 2)
    assert manager.stats().busy_pages == 2
    manager.release("b")
    plan = manager.begin_store("c", 0, keys(3, seed=2), ids(0, 1, 2), 0)
    assert (plan.stored.tolist(), plan.dropped) == ([0, 1, 2], 0)
    manager.check_integrity()
