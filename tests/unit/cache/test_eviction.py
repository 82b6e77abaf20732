"""Compares the evictions of each policy with a model. Also tests which uses of a block a manager counts as hits."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.cache.base import NO_ENTRY, GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.config import IndexConfig, load_config
from flexkv.errors import ConfigError
from tests.soak import soak_rounds
from tests.unit.cache.disk_world import DiskWorld, written
from tests.unit.cache.eviction_model import CHOICES, ModelIndex
from tests.unit.cache.host_world import end, ids, keys, store

POLICIES = tuple(CHOICES)
SLOTS = 40
STEPS = 1_500
SEEDS = 4


class Diverged(AssertionError):
    """Raised when the index and its model differ."""


class Pair:
    """An index and its model, which go through the same random steps. The model identifies a block by its group and
    key.

    Args:
        groups: number of groups that share the slots.

    Attributes:
        spares: share of the random stores whose blocks are spare.
        tells: whether the stores tell the index that their blocks are spare.
    """

    spares = 0.3
    tells = True

    def __init__(self, policy: str, modelled: str, seed: int, groups: int = 1) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.index = c_ext.BlockIndex([SLOTS] * groups, policy, [0] * groups)
        self.index.grow(self.random.randrange(groups), SLOTS)
        self.model = ModelIndex(SLOTS, CHOICES[modelled])
        self.universe = keys(120, seed)
        self.leases: list[list[bytes]] = []
        self.writes: list[list[bytes]] = []
        self.evicted = 0

    def some(self, most: int) -> list[bytes]:
        """Returns at most `most` consecutive blocks of a random group's chain. All groups have the same keys."""
        group = bytes([self.random.randrange(self.groups)])
        first = self.random.randrange(len(self.universe))
        return [
            group + key.tobytes() for key in self.universe[first : first + 1 + self.random.randrange(most)]
        ]

    def group_of(self, of: list[bytes]) -> int:
        return of[0][0] if of else 0

    def entries(self, of: list[bytes]) -> np.ndarray:
        found = [self.index.find(block[0], rows([block]), ready_only=False) for block in of]
        return np.concatenate([np.empty(0, np.uint32), *found])

    def same(self, found: np.ndarray, expected: list[bytes], what: str) -> None:
        """Checks that the index found the expected blocks, all of which are in one group."""
        if [key.tobytes() for key in found] != [block[1:] for block in expected]:
            raise Diverged(what)

    def gone(self, found: np.ndarray, expected: list[bytes], what: str) -> None:
        """Checks which blocks the index has just evicted, and in which groups."""
        told = self.index.gone_groups().tolist() if self.groups > 1 else [0] * len(found)
        if len(told) != len(found):
            raise Diverged(f"{what}: {len(told)} groups of {len(found)} blocks")
        if [bytes([g]) + key.tobytes() for g, key in zip(told, found, strict=True)] != expected:
            raise Diverged(what)

    def step(self) -> None:
        name = self.random.choice(("lookup", "lookup", "release", "write", "write", "end", "touch", "evict",
                                   "coldest", "remove"))  # fmt: skip
        getattr(self, name)()

    def lookup(self) -> None:
        wanted = self.some(12)
        found = self.index.match_and_pin(self.group_of(wanted), rows(wanted))[0]
        leading = wanted[
            : next((n for n, key in enumerate(wanted) if not self.model.ready(key)), len(wanted))
        ]
        self.same(self.index.keys_of(found), leading, "a lookup found something else")
        self.model.pin(leading)
        if leading:
            self.leases.append(leading)

    def release(self) -> None:
        if self.leases:
            ended = self.leases.pop(self.random.randrange(len(self.leases)))
            hit = self.random.random() < 0.5
            self.index.unpin(self.entries(ended), hit)
            self.model.unpin(ended, hit)

    def write(self) -> None:
        offered = self.some(10)
        most = self.random.choice((len(offered), 3))
        spare = self.random.random() < self.spares
        told = spare if self.tells else False
        _, entries, _, evicted, _, _ = self.index.insert(
            self.group_of(offered), rows(offered), most, spare=told
        )
        new, gone = self.model.insert(offered, most, spare)
        self.gone(evicted, gone, "an insert evicted something else")
        self.same(self.index.keys_of(entries), new, "an insert took something else")
        known = self.entries(offered)
        if self.tells and self.index.spare(known[known != NO_ENTRY]).tolist() != self.model.spare(offered):
            raise Diverged("other blocks are spare")
        self.evicted += len(gone)
        if new:
            self.writes.append(new)

    def end(self) -> None:
        if self.writes:
            ended = self.writes.pop(self.random.randrange(len(self.writes)))
            ok = [self.random.random() < 0.9 for _ in ended]
            self.index.finish(self.entries(ended), np.array(ok, np.uint8))
            self.model.finish(ended, ok)

    def touch(self) -> None:
        marked = self.some(20)
        hits = self.random.randrange(len(marked) + 1)
        self.index.touch(self.entries(marked), hits)
        self.model.touch(marked, hits)

    def evict(self) -> None:
        count = self.random.randrange(5)
        expected = self.model.evict(count)
        group = self.random.randrange(self.groups)
        self.gone(self.index.evict(group, count), expected, "something else was evicted")
        self.evicted += len(expected)

    def coldest(self) -> None:
        count = self.random.randrange(5)
        taken = self.model.victims(count)
        entries = self.index.take_coldest(self.random.randrange(self.groups), count)
        self.same(self.index.keys_of(entries), taken, "something else was the coldest")
        if self.index.groups_of(entries).tolist() != [block[0] for block in taken]:
            raise Diverged("what is cold is of another group")
        self.index.unpin(entries)
        self.model.pin(taken)
        self.model.unpin(taken)

    def remove(self) -> None:
        leased = {key for lease in [*self.leases, *self.writes] for key in lease}
        there = [key for key in self.some(3) if self.model.ready(key) and key not in leased]
        self.index.remove(self.entries(there))
        self.model.remove(there)

    def check(self) -> None:
        pinned = [key for lease in [*self.leases, *self.writes] for key in lease]
        self.index.check_integrity(self.entries(pinned))
        assert self.index.idle_slots(0) == self.model.idle


def rows(of: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(block[1:] for block in of), np.uint8).reshape(-1, 16).copy()


def run(policy: str, modelled: str, seed: int, groups: int = 1, pair_class: type[Pair] = Pair) -> Pair:
    pair = pair_class(policy, modelled, seed, groups)
    for step in range(STEPS):
        pair.step()
        if step % 50 == 0:
            pair.check()
    return pair


def test_every_policy_of_the_index_has_a_model_and_is_a_setting() -> None:
    assert tuple(c_ext.eviction_policies()) == POLICIES
    allowed = get_args(IndexConfig.model_fields["policy"].annotation)
    assert (allowed, IndexConfig().policy) == (POLICIES, POLICIES[0])


def test_an_unknown_policy_in_the_settings_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"'index\.policy' .*'lfu'.*expected 'lru' or 'bonus_lru'"):
        load_config({"index.policy": "lfu"}, {})


@pytest.mark.soak
@soak_rounds(SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_evicts_what_its_model_does(policy: str, soak_round: int) -> None:
    assert run(policy, policy, soak_round).evicted > 100


@pytest.mark.soak
@soak_rounds(SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_groups_that_share_slots_are_evicted_in_one_order(policy: str, soak_round: int) -> None:
    assert run(policy, policy, soak_round, groups=3).evicted > 100


class SlotsApart(Pair):
    """The control: the index gives each group separate slots, although the model shares them."""

    def __init__(self, policy: str, modelled: str, seed: int, groups: int) -> None:
        super().__init__(policy, modelled, seed, groups)
        self.index = c_ext.BlockIndex([SLOTS] * groups, policy)
        for group in range(groups):
            self.index.grow(group, SLOTS)


class GroupMistold(Pair):
    """The control: all evicted blocks are attributed to one group, whatever groups they were in."""

    def gone(self, found: np.ndarray, expected: list[bytes], what: str) -> None:
        first = self.random.randrange(self.groups)
        if [bytes([first]) + key.tobytes() for key in found] != expected:
            raise Diverged(what)


@pytest.mark.parametrize("pair_class", [SlotsApart, GroupMistold])
@pytest.mark.parametrize("policy", POLICIES)
def test_slots_apart_or_a_group_mistold_do_not_pass(policy: str, pair_class: type[Pair]) -> None:
    with pytest.raises(Diverged):
        run(policy, policy, 0, groups=3, pair_class=pair_class)


class SparesUntold(Pair):
    """The control: the index does not get the spare flags of blocks, so it treats spare blocks like all others."""

    tells = False


class HitsUntold(Pair):
    """The control: the index misses some hits, so that its spare blocks stay spare."""

    def step(self) -> None:
        super().step()
        wanted = self.some(4)
        self.index.touch(self.entries(wanted), 0)
        self.model.touch(wanted, len(wanted))


@pytest.mark.parametrize("pair_class", [SparesUntold, HitsUntold])
def test_spare_blocks_that_nobody_tells_of_do_not_pass(pair_class: type[Pair]) -> None:
    with pytest.raises(Diverged):
        run("lru", "lru", 0, pair_class=pair_class)


@pytest.mark.parametrize(("policy", "modelled"), [POLICIES, POLICIES[::-1]])
def test_another_policy_does_not_pass_for_it(policy: str, modelled: str) -> None:
    with pytest.raises(Diverged):
        run(policy, modelled, 0)


def test_an_unknown_policy_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="eviction policy 'lfu' is unknown; allowed are: lru, bonus_lru"):
        c_ext.BlockIndex([4], "lfu")


# --- uses that count as hits ---


def manager_of(policy: str, slots: int = 16) -> LocalCacheManager:
    manager = LocalCacheManager([GroupSpec(4, slots)], tiers=unit_tiers(), clock=lambda: 0.0, policy=policy)
    manager.grow(0, slots)
    return manager


def load(manager: LocalCacheManager, wanted: np.ndarray, request: str) -> None:
    assert manager.match(request, [wanted], 0).blocks == len(wanted)
    graph = manager.begin_load(request, [ids(*range(len(wanted)))])
    assert graph is not None
    end(manager, graph.ops[0].op_id)
    manager.end_request(request)


def left_after_scan(manager: LocalCacheManager, of: np.ndarray, blocks: int) -> int:
    """Stores `blocks` other blocks, each for a separate request. Returns how many of the blocks `of` are left."""
    for number in range(blocks):
        store(manager, keys(1, 1000 + number), f"scan {number}")
        manager.end_request(f"scan {number}")
    return int(np.count_nonzero(manager.hub.index.find(0, of) != NO_ENTRY))


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("bonus_lru", 4)])
def test_blocks_that_another_request_loaded_outlive_a_scan(policy: str, left: int) -> None:
    manager = manager_of(policy)
    wanted = keys(4)
    store(manager, wanted, "a")
    manager.end_request("a")
    load(manager, wanted, "b")
    assert left_after_scan(manager, wanted, 20) == left
    assert left_after_scan(manager, wanted, 40) == 0  # the bonus lasts for as many uses as there are slots


def test_blocks_that_the_engine_had_itself_count_as_hit() -> None:
    manager = manager_of("bonus_lru")
    wanted = keys(4)
    store(manager, wanted, "a")
    manager.end_request("a")
    manager.match("b", [wanted], 4)
    manager.end_request("b")
    assert left_after_scan(manager, wanted, 20) == 4


def test_blocks_that_a_request_only_stored_are_not_hit() -> None:
    """Blocks that a request only stored do not count as hits. A request stores its prompt chunk by chunk, and then the
    manager puts its blocks in access order. This must not count as a hit.
    """
    manager = manager_of("bonus_lru")
    wanted = keys(4)
    manager.match("a", [wanted], 0)
    for block in range(4):
        store(manager, wanted[block : block + 1], "a", block)
    manager.end_request("a")
    assert left_after_scan(manager, wanted, 16) == 0


def test_a_request_that_keeps_asking_hits_its_blocks_once() -> None:
    """Repeated lookups of a waiting request do not advance the policy's time. Otherwise this time would advance with
    the engine's steps, and a bonus would end too early.
    """
    manager = manager_of("bonus_lru")
    wanted, waiting = keys(4), keys(2, 1)
    store(manager, wanted, "a")
    store(manager, waiting, "c")
    load(manager, wanted, "b")
    for _ in range(50):
        manager.match("d", [waiting], 0)
    manager.end_request("d")
    assert left_after_scan(manager, wanted, 16) == 4


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("bonus_lru", 2)])
def test_what_was_read_from_disk_counts_as_hit_there(policy: str, left: int) -> None:
    wanted = keys(2)
    world = written(wanted, places=8, policy=policy)
    assert world.hits(wanted) == 2
    for number in range(10):
        world.store(keys(1, 100 + number), f"scan {number}")
        world.run()
    assert int(np.count_nonzero(world.tier.present(0, wanted))) == left


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("bonus_lru", 2)])
def test_what_was_loaded_from_host_memory_counts_as_hit_on_disk(policy: str, left: int) -> None:
    wanted = keys(2)
    world = DiskWorld(places=8, policy=policy)
    world.store(wanted)
    world.run()
    assert world.match(wanted).blocks == 2
    world.end_load(world.load(2))
    for number in range(10):
        world.store(keys(1, 100 + number), f"scan {number}")
        world.run()
    assert int(np.count_nonzero(world.tier.present(0, wanted))) == left
