"""Compares one lookup over all tiers with a model that works page by page."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flexkv.c_ext import BlockIndex, Found, TierLookup
from flexkv.errors import BlockRangeError, ConfigError, ContractError, KeySchemeError
from tests.soak import soak_rounds
from tests.unit.cache.tier_model import Ask, Page, State, TierModel
from tests.unit.cache.tier_world import TierWorld

SMALL, LARGE = 60, 6
STEPS = 12


def run(seed: str, blocks: int, model: type[TierModel] = TierModel) -> TierWorld:
    """Runs random steps in a world: pages are found, finished, evicted, removed and released. Checks the world after
    each step, and returns it.
    """
    rng = random.Random(seed)
    world = TierWorld(rng, model, blocks)
    world.check()
    for _ in range(STEPS):
        step(world, rng)
        world.check()
    for found, answer in world.held:
        world.release(found, answer)
    world.held.clear()
    world.check()
    return world


def step(world: TierWorld, rng: random.Random) -> None:
    kind = rng.choice(("look", "look", "trim", "release", "take over", "finish", "evict", "remove"))
    if kind == "evict":
        world.evict()
    elif kind == "finish":
        pages = world.pending(rng.randrange(world.tiers))
        chosen = rng.sample(pages, rng.randint(0, len(pages)))
        world.finish(chosen, [rng.random() < 0.8 for _ in chosen])
    elif kind == "remove":
        pages = [page for page in world.model.pages.values() if rng.random() < 0.02]
        for page in pages:
            world.indexes[page.tier].remove(np.array([page.entry], np.uint32))
            world.model.remove(page)
    elif kind == "look" or not world.held:
        world.look(world.ask())
    elif kind == "trim":
        found, answer = rng.choice(world.held)
        world.trim(found, answer, rng.randint(0, answer.blocks))
    else:
        found, answer = world.held.pop(rng.randrange(len(world.held)))
        if kind == "release":
            world.release(found, answer)
        else:
            world.take_over(found, answer)


@pytest.mark.soak
@soak_rounds()
def test_lookups_agree_with_the_model(soak_round: int) -> None:
    for case in range(SMALL):
        run(f"{soak_round}/{case}", blocks=random.Random(case).randint(0, 90))
    for case in range(LARGE):
        run(f"{soak_round}/large/{case}", blocks=1600)


# --- controls: a model that breaks one rule disagrees with the lookup ---


class OtherOrder(TierModel):
    def order(self, ask: Ask) -> list[int]:
        return sorted(ask.tiers, key=lambda tier: (tier > 0, -tier))


class HostLast(TierModel):
    def order(self, ask: Ask) -> list[int]:
        return sorted(ask.tiers, reverse=True)


class PastStores(TierModel):
    def ends_prefix(self, state: State) -> bool:
        return False


class RoomPerGroup(TierModel):
    def room_blocks(self, ask: Ask) -> int:
        return max(0, ask.room_pages)


class NeverExpires(TierModel):
    def state(self, tier: int, group: int, key: bytes, now: int) -> State:
        return super().state(tier, group, key, 0)


class StoresComing(TierModel):
    def state(self, tier: int, group: int, key: bytes, now: int) -> State:
        state = super().state(tier, group, key, now)
        return "filling" if state == "storing" else state


class NoWindows(TierModel):
    def is_short(self, run: Sequence[object]) -> bool:
        return False


class KeepsTrimmed(TierModel):
    def end_lease(self, pages: Sequence[Page]) -> None:
        super().end_lease(pages[1:] if len(pages) > 3 else pages)


def run_controls(model: type[TierModel]) -> None:
    for case in range(SMALL):
        run(f"control/{case}", random.Random(case).randint(20, 600), model)


@pytest.mark.parametrize(
    "model",
    [
        OtherOrder,
        HostLast,
        PastStores,
        RoomPerGroup,
        NeverExpires,
        StoresComing,
        NoWindows,
        KeepsTrimmed,
    ],
)
def test_control_a_broken_rule_is_seen(model: type[TierModel]) -> None:
    with pytest.raises((AssertionError, ContractError)):
        run_controls(model)


# --- single cases ---


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def index_of(*stored: np.ndarray, slots: int = 64) -> BlockIndex:
    index = BlockIndex([slots])
    index.grow(0, slots)
    for chain in stored:
        entries = index.insert(0, chain, len(chain))[1]
        index.finish(entries, np.ones(len(entries), np.uint8))
    return index


def pinned(*found: Found) -> np.ndarray:
    return np.concatenate([f.entries(0) for f in found])


NONE = np.empty(0, np.uint32)
ALL = 2**40


def test_pages_are_leased_where_they_lie() -> None:
    chain = keys(6)
    host, disk = index_of(chain[:2], chain[4:5]), index_of(chain[1:4], chain[5:])
    lookup = TierLookup([host, disk], 1)
    found = lookup.look([chain], 0, ALL, 3, 0)
    assert (found.blocks, found.ready_blocks, found.cut) == (6, 2, False)
    assert found.runs(0).tolist() == [[0, 0, 0, 2], [1, 0, 2, 2], [0, 0, 4, 1], [1, 0, 5, 1]]
    in_host = np.array([0, 1, 4])
    host.check_integrity(found.entries(0)[in_host])
    disk.check_integrity(found.entries(0)[[2, 3, 5]])
    assert host.slots_of(found.entries(0)[in_host]).tolist() == found.slots(0)[in_host].tolist()
    lookup.trim(found, 3)
    host.check_integrity(found.entries(0)[:2])
    disk.check_integrity(found.entries(0)[2:])
    lookup.release(found)
    host.check_integrity(NONE)
    disk.check_integrity(NONE)


def test_tiers_in_turn_are_asked_in_windows_until_their_runs_are_longer() -> None:
    chain = keys(2000)
    turns = 8 + 512  # eight short runs, and the first window, which follows them
    host, disk = index_of(slots=2000), index_of(slots=2000)
    for i in range(2000):
        odd = i % 2 == 1
        # Before block `turns`, host memory has the odd blocks and the disk has the even ones. From `turns` on, the disk
        # has every block. From `turns` + 512 on, host memory has none.
        if odd and i < turns + 512:
            host.finish(host.insert(0, chain[i : i + 1], 1)[1], np.ones(1, np.uint8))
        if not odd or i >= turns:
            disk.finish(disk.insert(0, chain[i : i + 1], 1)[1], np.ones(1, np.uint8))
    found = TierLookup([host, disk], 1).look([chain], 0, ALL, 3, 0)
    runs = found.runs(0)
    end = turns + 512
    assert runs[: end - 1, 0].tolist() == [(i + 1) % 2 for i in range(end - 1)]
    assert runs[end - 1 :].tolist() == [[0, 0, end - 1, 1], [1, 0, end, 2000 - end]]


def test_a_result_that_is_dropped_leaves_its_leases() -> None:
    chain = keys(3)
    host = index_of(chain)
    found = TierLookup([host], 1).look([chain], 0, ALL, 1, 0)
    entries = found.entries(0)
    del found
    with pytest.raises(ContractError, match="has 1 pins and 0 leases"):
        host.check_integrity(NONE)
    host.check_integrity(entries)
    assert host.evict(0, 3).size == 0


def test_pages_that_an_op_fills_are_found_with_its_number() -> None:
    chain = keys(4)
    host = index_of(chain[:1])
    entries = host.insert(0, chain[1:3], 2, filler=71, leases=2)[1]
    assert host.pins_of(entries).tolist() == [3, 3]
    assert host.fillers(entries).tolist() == [71, 71]
    host.insert(0, chain[3:], 1)
    lookup = TierLookup([host], 1)
    found = lookup.look([chain], 0, ALL, 1, 0)
    assert (found.blocks, found.ready_blocks) == (3, 1)
    assert found.runs(0).tolist() == [[0, 0, 0, 1], [0, 1, 1, 2]]
    assert lookup.count_ready(found) == 1
    assert lookup.look([chain], 0, ALL, 1, 0, coming=False).blocks == 1
    assert host.finish(entries, np.array([1, 0], np.uint8)).tolist() == [1, 0]
    assert lookup.count_ready(found) == 2
    assert host.fillers(entries).tolist() == [0, 0]
    assert host.pins_of(entries).tolist() == [3, 3]
    assert host.count_ready(0, chain[:3], found.entries(0)) == 2


def test_a_filler_is_that_of_the_block_and_not_of_its_entry() -> None:
    host = index_of(slots=1)
    entries = host.insert(0, keys(1, 1), 1, filler=5)[1]
    host.set_expiry(entries, np.array([1], np.uint64))
    host.finish(entries, np.zeros(1, np.uint8))
    again = host.insert(0, keys(1, 2), 1)[1]
    assert again.tolist() == entries.tolist()
    assert (host.fillers(again).tolist(), host.expiries(again).tolist()) == ([0], [0])


def test_taking_back_what_another_group_lacks_leaves_the_order_of_use() -> None:
    index = BlockIndex([4, 4])
    chain, old = keys(3), keys(1, 1)
    for group in range(2):
        index.grow(group, 4)
    for group, stored in ((0, chain), (0, old), (1, chain[:1])):
        entries = index.insert(group, stored, 3)[1]
        index.finish(entries, np.ones(len(entries), np.uint8))
    lookup = TierLookup([index], 2)
    found = lookup.look([chain, chain], 0, ALL, 1, 0)
    assert found.blocks == 1
    lookup.release(found)
    assert index.evict(0, 2).tolist() == chain[:0:-1].tolist()


def test_what_has_expired_is_a_miss_and_is_named() -> None:
    chain = keys(4)
    host, disk, far = index_of(), index_of(chain), index_of(chain[:3])
    entries = disk.find(0, chain)
    disk.set_expiry(entries, np.array([0, 50, 0, 50], np.uint64))
    lookup = TierLookup([host, disk, far], 1)
    found = lookup.look([chain], 0, ALL, 7, 49)
    assert (found.blocks, found.expired) == (4, [])
    lookup.release(found)
    found = lookup.look([chain], 0, ALL, 7, 50)
    assert found.runs(0).tolist() == [[1, 0, 0, 1], [2, 0, 1, 2]]
    ((tier, group, gone),) = found.expired
    assert (tier, group, gone.tolist()) == (1, 0, entries[[1, 3]].tolist())
    assert lookup.present(0, chain, 7, 50).tolist() == [2, 3, 2, 0]
    assert lookup.present(0, chain, 5, 50).tolist() == [3, 3, 3, 0]


def test_room_cuts_and_tells_whether_there_is_more() -> None:
    chain = keys(4)
    lookup = TierLookup([index_of(chain[:3])], 1)
    for room, blocks, cut in ((2, 2, True), (3, 3, False), (0, 0, True), (-5, 0, True), (ALL, 3, False)):
        found = lookup.look([chain], 0, room, 1, 0)
        assert (found.blocks, found.cut) == (blocks, cut), room


def test_pages_are_given_back_in_the_order_of_a_request() -> None:
    chain, other = keys(4), keys(2, 1)
    host = index_of(chain, other, slots=6)
    lookup = TierLookup([host], 1)
    lookup.release(lookup.look([chain], 0, ALL, 1, 0))
    assert host.evict(0, 3).tolist() == [*other[::-1].tolist(), chain[3].tolist()]


def test_arrays_outlive_what_they_were_taken_from_and_cannot_be_written() -> None:
    chain = keys(600)
    host = index_of(chain, slots=600)
    found = TierLookup([host], 1).look([chain], 0, ALL, 1, 0)
    entries, slots, wanted = found.entries(0), found.slots(0), host.find(0, chain)
    del found
    assert entries.tolist() == wanted.tolist()
    assert slots.tolist() == host.slots_of(wanted).tolist()
    with pytest.raises(ValueError, match="read-only"):
        entries[0] = 5


def test_the_indexes_live_as_long_as_their_lookup() -> None:
    chain = keys(3)
    given = [index_of(chain)]
    lookup = TierLookup(given, 1)
    given.clear()
    assert lookup.look([chain], 0, ALL, 1, 0).blocks == 3


# --- refused arguments ---


def test_tiers_that_do_not_fit_are_refused() -> None:
    index = index_of()
    with pytest.raises(ConfigError, match="a lookup over 0 tiers; allowed are 1 to 32"):
        TierLookup([], 1)
    with pytest.raises(ConfigError, match="a lookup over 33 tiers"):
        TierLookup([index_of() for _ in range(33)], 1)
    with pytest.raises(ContractError, match="tiers 0 and 2 have the same index"):
        TierLookup([index, index_of(), index], 1)
    with pytest.raises(ContractError, match="the index of tier 1 has 2 groups; the lookup has 1"):
        TierLookup([index, BlockIndex([4, 4])], 1)
    with pytest.raises(ContractError, match="-1 groups"):
        TierLookup([index], -1)
    with pytest.raises(TypeError):
        TierLookup([None], 1)  # type: ignore[list-item]


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_leased() -> None:
    chain = keys(3)
    index = index_of(chain)
    lookup = TierLookup([index], 1)
    with pytest.raises(ContractError, match="keys of 2 groups; the lookup has 1"):
        lookup.look([chain, chain], 0, ALL, 1, 0)
    with pytest.raises(BlockRangeError, match="start block -1"):
        lookup.look([chain], -1, ALL, 1, 0)
    with pytest.raises(ContractError, match="mask 3 names tiers from 1 on"):
        lookup.look([chain], 0, ALL, 3, 0)
    with pytest.raises(ContractError, match="mask 2 names tiers"):
        lookup.present(0, chain, 2, 0)
    with pytest.raises(BlockRangeError, match="group 1"):
        lookup.present(1, chain, 1, 0)
    with pytest.raises(KeySchemeError):
        lookup.look([chain[:, :8]], 0, ALL, 1, 0)
    for call in (lambda: lookup.look([chain], 0, ALL, -1, 0), lambda: lookup.look([chain], 0, ALL, 1, -1)):
        with pytest.raises(TypeError):
            call()
    index.check_integrity(NONE)


def test_leases_end_once() -> None:
    chain = keys(3)
    index = index_of(chain)
    lookup, other = TierLookup([index], 1), TierLookup([index], 1)
    found = lookup.look([chain], 0, ALL, 1, 0)
    for call in (other.release, other.count_ready, lambda f: other.trim(f, 1)):
        with pytest.raises(ContractError, match="another lookup found these pages"):
            call(found)
    for blocks in (4, -1):
        with pytest.raises(BlockRangeError, match=f"trim to {blocks} blocks; allowed are 0 to 3"):
            lookup.trim(found, blocks)
    with pytest.raises(BlockRangeError, match="group 1"):
        found.entries(1)
    index.check_integrity(pinned(found))
    lookup.release(found)
    assert (found.leased, found.blocks, len(found.entries(0))) == (False, 0, 0)
    for call in (lookup.release, lookup.count_ready, lambda f: lookup.trim(f, 0), lambda f: f.detach()):
        with pytest.raises(ContractError, match="released before"):
            call(found)
    detached = lookup.look([chain], 0, ALL, 1, 0)
    detached.detach()
    assert (detached.leased, lookup.count_ready(detached)) == (False, 3)
    for call in (lookup.release, lambda f: lookup.trim(f, 0), lambda f: f.detach()):
        with pytest.raises(ContractError, match="detached before"):
            call(detached)
    index.check_integrity(pinned(detached))


def test_a_lease_that_another_has_ended_is_named_and_the_others_end() -> None:
    chain = keys(4)
    host, disk = index_of(chain[:2]), index_of(chain[2:])
    lookup = TierLookup([host, disk], 1)
    found = lookup.look([chain], 0, ALL, 3, 0)
    disk.unpin(found.entries(0)[2:])
    with pytest.raises(ContractError, match=r"release: tier 1: entry \d+ is not leased"):
        lookup.release(found)
    host.check_integrity(NONE)
    disk.check_integrity(NONE)


@pytest.mark.parametrize(
    ("fillers", "match"),
    [({"filler": -1}, "filler -1; allowed are 0"), ({"leases": 2**24}, "16777216 leases; allowed are 0 to")],
)
def test_a_filler_or_leases_that_cannot_be_are_refused(fillers: dict[str, Any], match: str) -> None:
    index = index_of()
    with pytest.raises(ContractError, match=match):
        index.insert(0, keys(2), 2, **fillers)
    assert len(index) == 0


def test_an_expiry_of_what_is_not_in_use_is_refused() -> None:
    index = index_of(keys(2))
    entries = index.find(0, keys(2))
    with pytest.raises(ContractError, match="entry 50 is not in use"):
        index.set_expiry(np.append(entries, np.uint32(50)), np.ones(3, np.uint64))
    with pytest.raises(ContractError, match="one expiry an entry"):
        index.set_expiry(entries, np.ones(3, np.uint64))
    assert index.expiries(entries).tolist() == [0, 0]
