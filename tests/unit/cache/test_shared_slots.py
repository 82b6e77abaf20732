"""Groups whose pages have the same size share their slots. The least recently used page is evicted first, whatever its
group.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.cache.base import CacheListener, GroupSpec
from flexkv.errors import ConfigError, ContractError
from flexkv.facts.keys import Keys, Rule
from tests.unit.cache.host_world import keys, make, store

SLOTS = 6
GROUPS = (GroupSpec(4, SLOTS), GroupSpec(4, SLOTS, Rule.WINDOW, 1, shares=0))


class Gone(CacheListener):
    def __init__(self) -> None:
        self.keys: list[tuple[int, bytes]] = []

    def on_evict(self, group: int, keys: Keys) -> None:
        self.keys += [(group, bytes(key)) for key in keys]


def named(group: int, rows: Keys) -> set[tuple[int, bytes]]:
    return {(group, bytes(row)) for row in rows}


def test_the_block_used_longest_ago_leaves_first_of_whichever_group() -> None:
    listener = Gone()
    manager = make(groups=GROUPS, listener=listener)
    full, window, later = keys(3, 1), keys(3, 2), keys(4, 3)
    store(manager, full, "a", group=0)
    store(manager, window, "b", group=1)
    assert manager.free_slots(0) == manager.free_slots(1) == 0
    store(manager, later, "c", group=1)
    assert set(listener.keys) >= named(0, full)
    assert len(listener.keys) == len(later) + manager.free_slots(0)
    assert manager.present(1, later).all()
    assert not manager.present(0, full).any()
    manager.check_integrity()


def test_groups_that_share_slots_never_hit_each_others_blocks() -> None:
    manager = make(groups=GROUPS)
    shared = keys(2, 1)
    store(manager, shared, "a", group=0)
    assert not manager.present(1, shared).any()
    store(manager, shared, "b", group=1)
    index = manager.hub.index
    slots = [*index.slots_of(index.find(0, shared)), *index.slots_of(index.find(1, shared))]
    assert len(set(slots)) == 4


@pytest.mark.parametrize("policy", c_ext.eviction_policies())
def test_what_leaves_is_told_by_group(policy: str) -> None:
    index = c_ext.BlockIndex([4, 4, 2], policy, [0, 0, 2])
    index.grow(0, 4)
    index.grow(2, 2)
    stored = {group: keys(2, group) for group in range(3)}
    for group, rows in stored.items():
        _, entries, *_ = index.insert(group, rows, 2)
        index.finish(entries, np.ones(2, np.uint8))
    gone = index.evict(1, 3)
    told = list(zip(index.gone_groups().tolist(), map(bytes, gone), strict=True))
    assert set(told) <= named(0, stored[0]) | named(1, stored[1])
    assert len(set(told)) == 3
    left = index.take_coldest(0, 4)
    assert index.groups_of(left).tolist() == [0 if (1, bytes(stored[1][0])) in told else 1]
    assert len(index.find(2, stored[2])[index.find(2, stored[2]) != 2**32 - 1]) == 2, "another class"
    index.unpin(left)
    index.check_integrity(np.empty(0, np.uint32))


def test_blocks_from_before_are_taken_by_group() -> None:
    index = c_ext.BlockIndex([4, 4], "lru", [0, 0])
    index.grow(0, 4)
    rows, groups = keys(3, 1), np.array([0, 1, 1], np.uint32)
    taken = index.adopt(0, rows, np.arange(3, dtype=np.int32), groups)
    assert taken.all()
    for group in (0, 1):
        found = index.find(group, rows) != 2**32 - 1
        np.testing.assert_array_equal(found, groups == group)
    index.check_integrity(np.empty(0, np.uint32))
    other = c_ext.BlockIndex([4, 4])
    other.grow(0, 4)
    with pytest.raises(ContractError, match="group 1 does not share the slots of group 0"):
        other.adopt(0, rows, np.arange(3, dtype=np.int32), groups)


def test_a_volume_that_is_gone_takes_blocks_of_all_groups() -> None:
    index = c_ext.BlockIndex([4, 4], "lru", [0, 0])
    index.grow(0, 4)
    for group in range(2):
        _, entries, *_ = index.insert(group, keys(2, group), 2)
        index.finish(entries, np.ones(2, np.uint8))
    gone = index.retire(0, np.array([1, 0, 1, 0], np.uint8))
    assert sorted(index.gone_groups().tolist()) == [0, 1]
    assert len(gone) == 2
    index.check_integrity(np.empty(0, np.uint32))


@pytest.mark.parametrize("shared_with", [[1, 1], [0, 2], [0], [0, 0, 0]])
def test_slots_are_shared_with_a_group_before_that_has_as_many(shared_with: list[int]) -> None:
    with pytest.raises(ConfigError):
        c_ext.BlockIndex([4, 4], "lru", shared_with)
    with pytest.raises(ConfigError, match="share those of group 0"):
        c_ext.BlockIndex([4, 5], "lru", [0, 0])


@pytest.mark.parametrize(
    "second", [GroupSpec(4, 6, shares=1), GroupSpec(4, 6, shares=-1), GroupSpec(4, 5, shares=0)]
)
def test_a_group_that_cannot_share_is_refused(second: GroupSpec) -> None:
    with pytest.raises(ConfigError, match="group 1 with"):
        make(groups=(GroupSpec(4, 6), second))
