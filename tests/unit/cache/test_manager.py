"""Tests the cache manager as a whole: resets, the notifications that its listener gets, and calls that break its
contract.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import MOST_BLOCKS, CacheListener, GroupSpec, ManagerLimits, TailCandidates
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.errors import BlockRangeError, ConfigError, ContractError, KeySchemeError
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import OpStatus
from tests.unit.cache.host_world import end, hit, ids, keys, make, store


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


def test_what_is_known_is_stored_or_in_flight() -> None:
    manager, chain = make(), keys(4)
    assert not manager.known(0, chain).any()
    plan = manager.begin_store("a", 0, chain[:2], ids(0, 1), 0)
    assert manager.known(0, chain).tolist() == [True, True, False, False]
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id)
    assert manager.known(0, chain).tolist() == [True, True, False, False]
    assert manager.forget(0, chain[1:2]) == 1
    assert manager.known(0, chain).tolist() == [True, False, False, False]


def test_bad_calls_change_nothing() -> None:
    manager, chain = make(), keys(4)
    with pytest.raises(ContractError, match="4 keys and 2 blocks"):
        manager.begin_store("a", 0, chain, ids(0, 1), 0)
    with pytest.raises(BlockRangeError, match="group 1"):
        manager.begin_store("a", 1, chain, ids(0, 1, 2, 3), 0)
    with pytest.raises(BlockRangeError, match="from -1"):
        manager.begin_store("a", 0, chain, ids(0, 1, 2, -1), 0)
    for first in (-1, MOST_BLOCKS - 3, 2**62):
        with pytest.raises(
            BlockRangeError, match=rf"begin_store: blocks {first} to {first + 4}; allowed is \[0"
        ):
            manager.begin_store("a", 0, chain, ids(0, 1, 2, 3), first)
    for tokens in (-1, 0, 5, 999):
        with pytest.raises(ContractError, match=f"tokens={tokens}; allowed are 1 to 4"):
            manager.begin_store("a", 0, chain, ids(0, 1, 2, 3), 0, tokens)
    with pytest.raises(KeySchemeError, match="shape"):
        manager.begin_store("a", 0, chain.astype(np.int32), ids(0, 1, 2, 3), 0)  # type: ignore[arg-type]
    with pytest.raises(KeySchemeError, match="shape"):
        manager.match("a", [chain[:, :8]], 0)
    with pytest.raises(ContractError, match="2 key arrays"):
        manager.match("a", [chain, chain], 0)
    with pytest.raises(
        ContractError, match="start token 6 lies within a block of group 0, which has 4 tokens"
    ):
        manager.match("a", [chain], 6)
    with pytest.raises(ContractError, match="start token 6"):
        manager.prefetch("a", [chain], 6)
    with pytest.raises(BlockRangeError, match="start token -4"):
        manager.match("a", [chain], -4)
    with pytest.raises(BlockRangeError, match="allowed are 16 to 16"):
        manager.grow(0, 17)
    assert manager.begin_load("a", [ids()]) is None
    assert manager.free_slots(0) == 16
    assert manager.inflight_ops() == 0
    manager.check_integrity()


@pytest.mark.parametrize("other", [GroupSpec(8, 8), GroupSpec(4, 8, Rule.STATE)])
def test_tails_are_for_full_groups_with_blocks_of_one_size(other: GroupSpec) -> None:
    manager = LocalCacheManager([GroupSpec(4, 8), other], tiers=unit_tiers())
    tail = TailCandidates(keys(1), np.array([3], np.int32), 2)
    with pytest.raises(ContractError, match="match: tails, and group 1 has rule"):
        manager.match("a", [keys(2), keys(2)], 0, [tail, tail])


def test_hits_are_whole_blocks_of_every_group() -> None:
    groups = [GroupSpec(4, 8), GroupSpec(6, 8)]
    for alignment in (0, 4, 13, 2**41):
        with pytest.raises(ConfigError, match=f"aligned to {alignment} tokens; allowed are multiples of 12"):
            LocalCacheManager(groups, tiers=unit_tiers(), alignment_tokens=alignment)
    manager = LocalCacheManager(groups, tiers=unit_tiers(), alignment_tokens=24)
    assert manager.match("a", [keys(2), keys(2)], 0).tokens == 0


@pytest.mark.parametrize(
    ("groups", "limits", "named"),
    [
        ((), {}, "0 KV groups"),
        ((GroupSpec(4, 8), GroupSpec(0, 8)), {}, "group 1: block_tokens=0"),
        ((GroupSpec(4, 0),), {}, "slots=0"),
        ((GroupSpec(4, 8, Rule.WINDOW),), {}, "reach=0 with rule window"),
        ((GroupSpec(4, 8, Rule.CHUNK, 2**31),), {}, "reach=2147483648 with rule chunk"),
        ((GroupSpec(4, 8, reach=3),), {}, "reach=3 with rule full"),
        ((GroupSpec(4, 8),), {"ranks": 0}, "ranks=0"),
        ((GroupSpec(4, 8),), {"lease_s": 0.0}, "lease_s=0.0"),
    ],
)
def test_bad_settings_are_named(groups: tuple[GroupSpec, ...], limits: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LocalCacheManager(groups, ManagerLimits(**limits), tiers=unit_tiers())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed are: lru"):
        LocalCacheManager([GroupSpec(4, 8)], tiers=unit_tiers(), policy="random")


def test_integrity_check_sees_a_lost_lease() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("a", [chain], 0)
    manager.tables.requests.pop_lease("a")
    with pytest.raises(ContractError, match="1 pins and 0 leases"):
        manager.check_integrity()
