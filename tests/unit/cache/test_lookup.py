"""Tests lookups in host memory: which blocks are promised, for how long, and how many at once."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits, TailCandidates
from flexkv.cache.ledger.access_order import AccessOrder
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.errors import ContractError
from flexkv.facts.keys import Rule
from tests.unit.cache.host_world import end, ids, keys, make, store


def test_queues_are_bounded_and_a_promise_reserves_its_places() -> None:
    manager, chain = make(inflight_load_pages=4, inflight_store_pages=3), keys(9)
    for first in range(0, 9, 3):
        store(manager, chain[first : first + 3], first=first)
    assert manager.begin_store("x", 0, keys(5, seed=1), ids(0, 1, 2, 3, 4), 0).dropped == 2
    assert manager.match("a", [chain[:3]], 0).blocks == 3
    assert manager.match("b", [chain], 0).blocks == 1
    assert manager.match("c", [chain], 0).blocks == 0
    assert manager.stats().cut_promises == 2
    graph = manager.begin_load("a", [ids(1, 2, 3)])
    assert graph is not None
    end(manager, graph.ops[0].op_id)
    assert manager.match("c", [chain], 0).blocks == 3


def test_asking_again_replaces_the_lease_and_expiry_ends_it() -> None:
    now = [0.0]
    manager = LocalCacheManager(
        [GroupSpec(4, 8)], ManagerLimits(lease_s=10), tiers=unit_tiers(), clock=lambda: now[0]
    )
    manager.grow(0, 8)
    chain = keys(4)
    store(manager, chain)
    manager.match("a", [chain], 0)
    manager.match("a", [chain], 0)
    assert manager.leased_pages("a") == 4
    now[0] = 9.0
    assert manager.expire() == 0
    now[0] = 11.0
    assert manager.expire() == 1
    assert manager.leased_pages("a") == 0
    with pytest.raises(ContractError, match="no lease"):
        manager.begin_load("a", [ids(1)])
    manager.release("a")
    manager.check_integrity()


def tail_of(counts: list[int], seed: int, base: int) -> TailCandidates:
    return TailCandidates(keys(len(counts), seed), np.array(counts, np.int32), base)


def test_a_partial_tail_follows_the_blocks_it_belongs_to() -> None:
    manager, chain = make(), keys(2)
    tail = tail_of([3, 2, 1], 7, base=2)
    store(manager, chain)
    store(manager, np.ascontiguousarray(tail.keys[1:2]), first=2)
    match = manager.match("b", [chain], 0, [tail])
    assert (match.blocks, match.tail_tokens) == (2, 2)
    with pytest.raises(ContractError, match="asks for 1 blocks and a tail"):
        manager.begin_load("b", [ids(1, 2)], tail=True)
    graph = manager.begin_load("b", [ids(1, 2, 3)], tail=True)
    assert graph is not None
    assert graph.ops[0].slots.tolist()[-1] == match.groups[0].tail_slot
    end(manager, graph.ops[0].op_id)
    assert manager.match("c", [chain], 0, [tail_of([3, 2, 1], 7, base=1)]).tail_tokens == 0
    assert manager.match("c", [chain], 8, [tail]).tail_tokens == 2


def test_rules_decide_which_lengths_are_restorable() -> None:
    groups = (
        GroupSpec(4, 16),
        GroupSpec(4, 16, Rule.WINDOW, 2),
        GroupSpec(4, 16, Rule.STATE),
    )
    manager = make(groups=groups)
    full, window, state = keys(8, 1), keys(8, 2), keys(8, 3)
    store(manager, full, group=0)
    store(manager, np.ascontiguousarray(window[[1, 2, 3, 6, 7]]), group=1)
    store(manager, np.ascontiguousarray(state[[2, 6]]), group=2)
    match = manager.match("a", [full, window, state], 0)
    # A hit of 8 blocks would need a missing state. A hit of 7 would need window blocks 5 and 6, but 5 is missing. A hit
    # of 3 needs window blocks 1 and 2, and state 2, which are all present.
    assert match.blocks == 3
    assert [len(g.slots) for g in match.groups] == [3, 2, 1]
    assert [g.first_block for g in match.groups] == [0, 1, 2]
    with pytest.raises(ContractError, match="group 1"):
        manager.begin_load("a", [ids(1, 2), ids(3), ids(4)])
    graph = manager.begin_load("a", [ids(1, 2, 3), ids(4, 5), ids(6)])
    assert graph is not None
    assert len(graph.ops) == 3


def test_request_looked_up_again_and_again_keeps_a_bounded_access_order() -> None:
    manager, chain = make(), keys(6)
    store(manager, chain)
    manager.release("w")
    for _ in range(1000):
        assert manager.match("waiting", [chain], 8).blocks == 4
    order = manager.tables.access_orders.peek("waiting", 0)
    assert order is not None
    assert order.parts == 2, "what the engine has, and what it was promised"


def test_lookup_replaces_what_an_earlier_one_of_the_request_found() -> None:
    order = AccessOrder()
    order.put_lookup(np.array([1, 2], np.uint32), 2, np.array([3, 4, 5], np.uint32))
    order.put_lookup(np.array([6], np.uint32), 1, np.array([7], np.uint32))
    assert order.entries().tolist()[:2] == [6, 7]
    assert not {1, 2, 3, 4, 5} & set(order.entries().tolist())


def test_trail_has_what_a_lookup_found_and_what_was_stored() -> None:
    order = AccessOrder()
    order.put_lookup(np.array([1], np.uint32), 1, np.array([2], np.uint32))
    order.put_at(2, np.array([0, 1]), np.array([8, 9], np.uint32))
    assert order.entries().tolist() == [1, 2, 8, 9]
    order.put_lookup(np.array([1, 2], np.uint32), 0, np.empty(0, np.uint32))
    assert order.entries().tolist() == [1, 2, 8, 9]


def test_blocks_stored_again_and_again_keep_a_bounded_access_order() -> None:
    order = AccessOrder()
    for number in range(1000):
        order.put_at(0, np.array([0, 1]), np.array([number, number + 1], np.uint32))
        assert order.parts <= 4
    assert order.entries().tolist() == [999, 1000]


@pytest.mark.parametrize(("room", "tail_tokens"), [(2, 0), (3, 2)])
def test_a_tail_is_promised_where_it_has_room_besides_the_blocks(room: int, tail_tokens: int) -> None:
    manager, chain = make(inflight_load_pages=room), keys(2)
    store(manager, chain)
    tail = tail_of([3, 2, 1], 7, base=2)
    store(manager, np.ascontiguousarray(tail.keys[1:2]), first=2)
    match = manager.match("b", [chain], 0, [tail])
    assert (match.blocks, match.tail_tokens) == (2, tail_tokens)
    manager.check_integrity()
