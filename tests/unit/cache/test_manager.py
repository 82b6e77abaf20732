"""The cache manager, outcome by outcome."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import (
    CacheListener,
    Completion,
    GroupPolicy,
    GroupSpec,
    Keys,
    ManagerLimits,
    OpRole,
    TailCandidates,
)
from flexkv.cache.manager import LocalCacheManager
from flexkv.errors import BlockRangeError, ConfigError, ContractError, KeySchemeError
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, Priority

NONE = np.empty(0, np.int32)


def keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def make(
    slots: int = 16,
    groups: tuple[GroupSpec, ...] = (),
    listener: CacheListener | None = None,
    **limits: float,
) -> LocalCacheManager:
    specs = groups or (GroupSpec(4, slots),)
    manager = LocalCacheManager(specs, ManagerLimits(**limits), clock=lambda: 0.0, listener=listener)  # type: ignore[arg-type]
    for group, spec in enumerate(specs):
        manager.grow(group, spec.slots)
    return manager


def end(
    manager: LocalCacheManager,
    op_id: int,
    status: OpStatus = OpStatus.OK,
    failed: np.ndarray = NONE,
    rank: int = 0,
) -> Completion | None:
    done = manager.complete(
        rank, OpResult(OpId(op_id), status, failed, "" if status is OpStatus.OK else "why")
    )
    manager.check_integrity()
    return done


def store(
    manager: LocalCacheManager, stored: Keys, request: str = "w", first: int = 0, group: int = 0
) -> None:
    plan = manager.begin_store(request, group, stored, np.arange(len(stored), dtype=np.int32), first)
    assert plan.graph is not None
    assert end(manager, plan.graph.ops[0].op_id) is not None


def hit(manager: LocalCacheManager, wanted: Keys) -> int:
    blocks = manager.match("probe", [wanted], 0).blocks
    manager.release("probe")
    return blocks


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


def test_a_load_reads_the_slots_that_were_stored() -> None:
    manager, chain = make(), keys(5)
    plan = manager.begin_store("a", 0, chain, ids(0, 1, 2, 3, 4), 0)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id)
    match = manager.match("b", [chain], 2)
    assert (match.blocks, match.groups[0].first_block) == (3, 2)
    graph = manager.begin_load("b", [ids(10, 11)])
    assert graph is not None
    (op,) = graph.ops
    assert (op.kind, op.priority) == (OpKind.H2D, Priority.LOAD)
    assert op.slots.tolist() == plan.graph.ops[0].slots.tolist()[2:4]
    done = end(manager, op.op_id)
    assert done is not None
    assert (done.role, done.blocks.tolist(), done.failed_blocks.tolist()) == (OpRole.LOAD, [10, 11], [])


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
    assert manager.discard_from("b", 13) == 3
    assert manager.discard_from("b", 12) == 1
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
    manager = LocalCacheManager([GroupSpec(4, 8)], ManagerLimits(lease_s=10), clock=lambda: now[0])
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


def test_reset_makes_misses_and_old_work_counts_for_nothing() -> None:
    manager, chain, late = make(), keys(4), keys(2, seed=1)
    store(manager, chain)
    manager.match("b", [chain], 0)
    load = manager.begin_load("b", [ids(1, 2, 3, 4)])
    manager.match("c", [chain], 0)
    plan = manager.begin_store("d", 0, late, ids(5, 6), 0)
    assert load is not None
    assert plan.graph is not None
    assert manager.reset() == 1
    manager.check_integrity()
    assert hit(manager, chain) == 0
    with pytest.raises(ContractError, match="no lease"):
        manager.begin_load("c", [ids(7)])
    done = end(manager, plan.graph.ops[0].op_id)
    assert done is not None
    assert not len(done.published)
    loaded = end(manager, load.ops[0].op_id)
    assert loaded is not None
    assert loaded.failed_blocks.tolist() == [1, 2, 3, 4]
    assert manager.free_slots(0) == 16
    store(manager, chain)
    assert hit(manager, chain) == 4


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
    assert manager.match("c", [chain], 2, [tail]).tail_tokens == 2


def test_group_policies_decide_which_lengths_are_restorable() -> None:
    groups = (
        GroupSpec(4, 16),
        GroupSpec(4, 16, GroupPolicy.TRAILING_WINDOW, window_tokens=6),
        GroupSpec(4, 16, GroupPolicy.EXACT_BOUNDARY),
    )
    manager = make(groups=groups)
    full, window, state = keys(8, 1), keys(8, 2), keys(8, 3)
    store(manager, full, group=0)
    store(manager, np.ascontiguousarray(window[[1, 2, 3, 6, 7]]), group=1)
    store(manager, np.ascontiguousarray(state[[2, 6]]), group=2)
    match = manager.match("a", [full, window, state], 0)
    # 8 blocks: no state. 7: the window needs blocks 5 and 6, 5 is missing. 3: blocks 1 and 2, and state 2.
    assert match.blocks == 3
    assert [len(g.slots) for g in match.groups] == [3, 2, 1]
    assert [g.first_block for g in match.groups] == [0, 1, 2]
    with pytest.raises(ContractError, match="group 1"):
        manager.begin_load("a", [ids(1, 2), ids(3), ids(4)])
    graph = manager.begin_load("a", [ids(1, 2, 3), ids(4, 5), ids(6)])
    assert graph is not None
    assert len(graph.ops) == 3


class Listener(CacheListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_publish(self, group: int, keys: Keys) -> None:
        self.events.append(("publish", len(keys)))

    def on_evict(self, group: int, keys: Keys) -> None:
        self.events.append(("evict", len(keys)))

    def on_reset(self, epoch: int) -> None:
        self.events.append(("reset", epoch))


def test_the_listener_hears_what_appears_and_what_leaves() -> None:
    listener = Listener()
    manager, chain = make(slots=4, listener=listener), keys(4)
    store(manager, chain)
    store(manager, keys(1, seed=1))
    assert manager.forget(0, chain[:2]) == 2
    manager.reset()
    assert listener.events == [("publish", 4), ("evict", 1), ("publish", 1), ("evict", 2), ("reset", 1)]


def test_reports_that_break_the_contract_are_refused() -> None:
    manager, chain = make(ranks=2), keys(2)
    plan = manager.begin_store("a", 0, chain, ids(0, 1), 0)
    assert plan.graph is not None
    op_id = plan.graph.ops[0].op_id
    with pytest.raises(ContractError, match="not in flight"):
        end(manager, op_id + 1)
    with pytest.raises(ContractError, match="rank 2"):
        end(manager, op_id, rank=2)
    with pytest.raises(ContractError, match="positions 0 to 1"):
        end(manager, op_id, OpStatus.FAILED, ids(2))
    with pytest.raises(ContractError, match="says OK"):
        end(manager, op_id, OpStatus.OK, ids(1))
    end(manager, op_id)
    with pytest.raises(ContractError, match="twice"):
        end(manager, op_id)
    assert end(manager, op_id, rank=1) is not None


def test_bad_calls_change_nothing() -> None:
    manager, chain = make(), keys(4)
    with pytest.raises(ContractError, match="4 keys and 2 blocks"):
        manager.begin_store("a", 0, chain, ids(0, 1), 0)
    with pytest.raises(BlockRangeError, match="group 1"):
        manager.begin_store("a", 1, chain, ids(0, 1, 2, 3), 0)
    with pytest.raises(BlockRangeError, match="from -1"):
        manager.begin_store("a", 0, chain, ids(0, 1, 2, -1), 0)
    with pytest.raises(KeySchemeError, match="shape"):
        manager.begin_store("a", 0, chain.astype(np.int32), ids(0, 1, 2, 3), 0)  # type: ignore[arg-type]
    with pytest.raises(KeySchemeError, match="shape"):
        manager.match("a", [chain[:, :8]], 0)
    with pytest.raises(ContractError, match="2 key arrays"):
        manager.match("a", [chain, chain], 0)
    with pytest.raises(BlockRangeError, match="allowed are 16 to 16"):
        manager.grow(0, 17)
    assert manager.begin_load("a", [ids()]) is None
    assert manager.free_slots(0) == 16
    assert manager.inflight_ops() == 0
    manager.check_integrity()


@pytest.mark.parametrize(
    ("groups", "limits", "named"),
    [
        ((), {}, "0 KV groups"),
        ((GroupSpec(4, 8), GroupSpec(8, 8)), {}, "group 1: block_tokens=8"),
        ((GroupSpec(4, 0),), {}, "slots=0"),
        ((GroupSpec(4, 8, GroupPolicy.TRAILING_WINDOW),), {}, "window_tokens=0"),
        ((GroupSpec(4, 8, window_tokens=3),), {}, "window_tokens=3"),
        ((GroupSpec(4, 8),), {"ranks": 0}, "ranks=0"),
        ((GroupSpec(4, 8),), {"lease_s": 0.0}, "lease_s=0.0"),
    ],
)
def test_bad_settings_are_named(groups: tuple[GroupSpec, ...], limits: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LocalCacheManager(groups, ManagerLimits(**limits))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed are: lru"):
        LocalCacheManager([GroupSpec(4, 8)], policy="random")


def test_integrity_check_sees_a_lost_lease() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("a", [chain], 0)
    manager._leases.pop("a")
    with pytest.raises(ContractError, match="1 pins and 0 leases"):
        manager.check_integrity()
