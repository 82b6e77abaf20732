"""A hit is attributed to the tiers that supplied its pages: host memory, or the tier from which pages were fetched,
streamed or loaded directly.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import HUB, GroupSpec
from flexkv.cache.ledger.requests import RequestLedger
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.facts.keys import Keys, Rule
from flexkv.simulation.world import DISK
from tests.unit.cache import disk_world
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, blocks_by_tier, chain, traffic

WAITS, STREAMS, STRAIGHT = traffic(), traffic(streams=True), traffic(gds_loads=GdsUse.ALWAYS)


def half_in_host_memory(keys: Keys, limits: DiskTraffic) -> DiskWorld:
    """Returns a world in which the first two of `keys` are in host memory and the others only on disk."""
    world = disk_world.written(keys[2:], limits=limits)
    world.store(keys[:2])
    world.run()
    return world


def hits(world: DiskWorld) -> list[int]:
    return [tier.counts.hits for tier in world.manager.tiers]


@pytest.mark.parametrize("limits", [STREAMS, STRAIGHT], ids=["streamed", "straight"])
def test_what_is_promised_before_it_is_in_host_memory_is_the_disks(limits: DiskTraffic) -> None:
    keys = chain(6)
    world = half_in_host_memory(keys, limits)
    result = world.look(keys)
    assert (result.blocks, blocks_by_tier(result)) == (6, (2, 4))
    world.begin(list(range(6)))
    assert hits(world) == [2, 4]


def test_what_a_request_waited_for_is_the_disks_and_of_others_host_memorys() -> None:
    keys = chain(6)
    world = half_in_host_memory(keys, WAITS)
    first = world.match(keys)
    assert (first.reads, blocks_by_tier(first)) == (1, (2, 0))
    world.run()
    assert blocks_by_tier(world.match(keys)) == (2, 4)
    assert blocks_by_tier(world.match(keys)) == (2, 4), "asked again"
    assert blocks_by_tier(world.match(keys, name="other")) == (6, 0), "the control: it waited for nothing"
    assert hits(world) == [0, 0], "nothing was taken yet"
    world.load(6)
    assert hits(world) == [2, 4]
    world.load(6, name="other")
    assert hits(world) == [8, 4]


def test_of_a_promise_that_is_taken_in_part_host_memorys_comes_first() -> None:
    keys = chain(6)
    world = half_in_host_memory(keys, STREAMS)
    world.look(keys)
    world.load(3)
    assert hits(world) == [2, 1]


def test_pages_that_failed_are_nobodys() -> None:
    keys = chain(6)
    world = half_in_host_memory(keys, WAITS)
    world.match(keys)
    (read,) = world.take()
    # The third page of the read fails, so the hit ends before it.
    world.end(read, lambda page: page == 2)
    assert blocks_by_tier(world.match(keys)) == (2, 2)


def test_of_what_was_fetched_only_blocks_after_the_start_count() -> None:
    """Blocks before the lookup's start do not count as hits, even if the request waited for them. Between two lookups,
    the engine may have got these blocks into its own cache.
    """
    keys = chain(6)
    world = half_in_host_memory(keys, WAITS)
    world.match(keys)
    world.run()
    result = world.manager.match("r", [keys], 4 * BLOCK_TOKENS)
    assert (result.blocks, blocks_by_tier(result)) == (2, (0, 2))


def test_nothing_is_said_of_nothing() -> None:
    world = DiskWorld()
    assert blocks_by_tier(world.match(chain(2))) == ()
    world.store(chain(2))
    assert blocks_by_tier(world.match(chain(2))) == (2, 0)


def test_what_was_fetched_counts_once_over_tiers() -> None:
    table = RequestLedger()
    table.wait("r", [(1, DISK, 9.0), (2, HUB, 9.0)], 0.0)  # type: ignore[list-item]
    table.begins_to_wait("r", 10)
    table.begins_to_wait("r", 99)
    for op in (1, 2):
        table.fetch_ended("r", op, 4)  # type: ignore[arg-type]
    table.fetch_ended("r", 3, 4)  # type: ignore[arg-type]
    assert table.fetched_for("r", 0, 16) == {DISK: 4, HUB: 2}
    assert table.fetched_for("r", 0, 9) == {DISK: 0, HUB: 0}
    assert table.fetched_for("another", 0, 16) == {}
    assert table.fetched_pages("r", 6) == {DISK: 4, HUB: 2}
    assert table.fetched_pages("another", 6) == {}


def hybrid(on_disk: bool) -> tuple[DiskWorld, list[Keys]]:
    """Returns a world with eight pages of a full group and four pages, twice as large, of a window group. If `on_disk`
    is set, the pages are only on disk; otherwise they are also in host memory.
    """
    world = DiskWorld(groups=(GroupSpec(4, 16), GroupSpec(8, 16, Rule.WINDOW, 2)))
    keys = [chain(8), chain(4, seed=1)]
    for group in range(2):
        world.store(keys[group], group=group)
    world.run()
    if on_disk:
        world.drop_host()
    return world, keys


@pytest.mark.parametrize("on_disk", [False, True])
def test_of_groups_with_other_rules_each_tier_has_the_share_of_its_pages(on_disk: bool) -> None:
    world, keys = hybrid(on_disk)
    result = world.manager.match("r", keys, 0)
    assert (result.tokens, result.reads) == ((0, 2) if on_disk else (32, 0))
    world.run()
    result = world.manager.match("r", keys, 0)
    assert [len(group.slots) for group in result.groups] == [8, 2]
    assert (result.tokens, result.by_tier) == (32, (0, 32) if on_disk else (32, 0))
    graph = world.manager.begin_load("r", [np.arange(8, dtype=np.int32), np.arange(2, dtype=np.int32)])
    assert graph is not None
    assert hits(world) == ([0, 8] if on_disk else [8, 0]), "in blocks of the first group"
    world.manager.check_integrity()


def test_a_window_that_is_partly_on_disk_is_waited_for_as_a_whole() -> None:
    """If a hit needs a window of which a part is only on disk, the request waits for this hit. Meanwhile the manager
    promises the shorter hit that host memory alone allows.
    """
    world, keys = hybrid(on_disk=True)
    for group, first in ((0, slice(0, 4)), (1, slice(0, 2))):
        world.store(keys[group][first], group=group)
    result = world.manager.match("r", keys, 0)
    assert (result.tokens, result.reads) == (16, 2)
    world.run()
    result = world.manager.match("r", keys, 0)
    # The longer hit does not need the window group's first two pages. The hit needs ten pages. Four of these, all of
    # the full group, were in host memory.
    assert (result.tokens, result.by_tier) == (32, (13, 19))
    world.manager.check_integrity()


def test_a_hit_that_needs_no_page_is_host_memorys() -> None:
    """A hit that ends with a complete chunk needs no pages. It counts as a hit in host memory, although the request has
    waited for pages.
    """
    world, keys = DiskWorld(groups=(GroupSpec(4, 16, Rule.CHUNK, 8),)), [chain(3)]
    world.store(keys[0])
    world.run()
    world.drop_host()
    result = world.manager.match("r", keys, 0)
    assert (result.tokens, result.by_tier, result.reads) == (8, (8, 0), 1)
    world.run()
    assert world.manager.match("r", [keys[0][:2]], 0).by_tier == (8, 0)
    assert world.manager.match("r", keys, 0).by_tier == (0, 12)


def test_what_is_weighed_against_computing_is_what_the_fetch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    world, keys = hybrid(on_disk=True)
    for group, first in ((0, slice(0, 4)), (1, slice(0, 2))):
        world.store(keys[group][first], group=group)
    weighed: list[int] = []

    def weigh(runs: object, tokens: int) -> bool:
        weighed.append(tokens)
        return True

    monkeypatch.setattr(world.manager.choice, "choose_fetch", weigh)
    world.manager.match("r", keys, 8)
    assert weighed == [16], "the engine has 8 tokens, 8 are in host memory"


@pytest.mark.parametrize("on_disk", [True, False])
def test_pages_that_are_not_in_host_memory_are_waited_for(
    on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the manager compares the time for fetching pages with the time for computing them, it includes the time that
    a fetch takes to begin. It does so for all pages that are not in host memory, because the request must wait for
    them.
    """
    world, keys = hybrid(on_disk=True)
    weighed: list[tuple[list[int], list[bool]]] = []

    def weigh(missing: dict[int, np.ndarray], queued: object, waiting: np.ndarray, tokens: object) -> int:
        weighed.append((missing[DISK].tolist(), waiting.tolist()))
        return 1

    if not on_disk:
        world.manager.match("earlier", keys, 0)
        world.take()
    cost = world.manager.cost
    monkeypatch.setattr(cost, "fetch_is_known", lambda tiers, now_s: True)
    monkeypatch.setattr(cost, "worth", weigh)
    assert world.manager.match("r", keys, 0).reads == 2
    assert weighed == [([10 if on_disk else 0], [True])]
