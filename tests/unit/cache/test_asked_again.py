"""When a request repeats its lookup after its wait, the manager promises the pages that are leased for the request,
without a new lookup in the tiers. In all other cases the manager looks the request up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import ManagerLimits, OpRole, TailCandidates
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpKind
from tests.unit.cache.broken_disk_managers import TakesHeldPagesForReady
from tests.unit.cache.disk_world import (
    BLOCK_TOKENS,
    DiskWorld,
    blocks_by_tier,
    chain,
    traffic,
    two_groups,
    written,
)

KEYS = chain(6)


class LookupCount:
    """Counts how often the manager of a world looks up pages in its tiers."""

    def __init__(self, world: DiskWorld) -> None:
        self.lookups = 0
        promises = world.manager.promises
        look = promises._look

        def counted(*args: Any) -> Any:
            self.lookups += 1
            return look(*args)

        promises._look = counted  # type: ignore[assignment,method-assign]


def waited(in_host: int, **kwargs: Any) -> tuple[DiskWorld, LookupCount]:
    """Returns a world in which request r has looked up KEYS, and the fetch that r waits for has finished. The first
    `in_host` of KEYS were in host memory.
    """
    world = written(KEYS, **kwargs)
    if in_host:
        assert world.hits(KEYS[:in_host], "before") == in_host
    count = LookupCount(world)
    assert world.match(KEYS).reads == 1
    world.run()
    assert count.lookups == 1
    return world, count


@pytest.mark.parametrize("in_host", [0, 2])
def test_pages_waited_for_are_promised_without_a_lookup(in_host: int) -> None:
    world, count = waited(in_host)
    result = world.match(KEYS)
    assert (result.blocks, result.reads, blocks_by_tier(result)) == (6, 0, (in_host, 6 - in_host))
    assert len(result.groups[0].slots) == 6
    assert count.lookups == 1
    assert world.manager.leased_pages("r") == 6
    world.drop_host()
    world.check_promise(result, KEYS)
    world.load_ended(world.begin(list(range(6))))
    assert world.manager.leased_pages("r") == 0
    world.manager.end_request("r")
    world.drop_host()
    assert world.manager.free_slots(0) == 8


def test_a_request_without_engine_blocks_asks_as_often_as_it_likes() -> None:
    world, count = waited(2)
    for _ in range(5):
        assert world.match(KEYS).blocks == 6
    assert count.lookups == 1
    assert world.manager.stats().hit_blocks == 2 + 2 + 5 * 6


def test_what_a_request_has_itself_takes_no_room_from_it() -> None:
    world, count = waited(0, manager_limits=ManagerLimits(inflight_load_pages=len(KEYS)))
    for _ in range(3):
        assert world.match(KEYS).blocks == len(KEYS)
    assert count.lookups == 1


def test_groups_are_answered_together() -> None:
    world, keys = two_groups(4)
    count = LookupCount(world)
    assert world.manager.match("r", keys, 0).reads == 2
    world.run()
    result = world.manager.match("r", keys, 0)
    world.manager.check_integrity()
    assert ([len(group.slots) for group in result.groups], count.lookups) == ([4, 4], 1)
    swapped = world.manager.match("r", keys[::-1], 0)
    world.manager.check_integrity()
    assert (swapped.blocks, count.lookups) == (0, 2)


def test_a_page_that_failed_is_not_promised() -> None:
    world = written(KEYS)
    assert world.match(KEYS).reads == 1
    world.run(fails=lambda page: page == 3)
    assert world.match(KEYS).blocks == 3


def test_a_page_that_failed_is_promised_where_nobody_compares() -> None:
    world = written(KEYS, manager_class=TakesHeldPagesForReady)
    assert world.match(KEYS).reads == 1
    world.run(fails=lambda page: page == 3)
    with pytest.raises(AssertionError):
        world.match(KEYS)


def test_a_reset_in_between_leaves_nothing() -> None:
    world, count = waited(2)
    world.manager.reset()
    result = world.match(KEYS)
    assert (result.blocks, result.reads, count.lookups) == (0, 0, 2)


@pytest.mark.parametrize(("compares", "promised"), [(True, 0), (False, 6)])
def test_a_reset_that_ends_no_lease_is_noticed_by_the_pages(compares: bool, promised: int) -> None:
    """Pages that a reset has cleared are not ready, so they are not promised even if the reset did not end their
    leases. This is the second of two guards. The test disables the first, the end of all leases, and the control also
    disables the second.
    """
    world, _ = waited(2, manager_class=LocalCacheManager if compares else TakesHeldPagesForReady)
    world.manager.promises.end_all = lambda: None  # type: ignore[method-assign]
    world.manager.reset()
    assert world.manager.match("r", [KEYS], 0).blocks == promised


@pytest.mark.parametrize(
    ("name", "keys", "start"),
    [
        ("grown", chain(8), 0),
        ("fewer", KEYS[:5], 0),
        ("others", np.concatenate((KEYS[:5], chain(1, seed=9))), 0),
        ("start", KEYS, BLOCK_TOKENS),
    ],
)
def test_another_question_is_looked_up(name: str, keys: Keys, start: int) -> None:
    world, count = waited(2)
    result = world.manager.match("r", [keys], start)
    world.manager.check_integrity()
    assert count.lookups == 2, name
    assert result.blocks == {"grown": 6, "fewer": 5, "others": 5, "start": 5}[name]


def test_a_question_for_the_same_pages_from_another_block_on_is_looked_up() -> None:
    world, count = waited(2)
    assert world.manager.match("r", [np.concatenate((chain(1, seed=9), KEYS))], BLOCK_TOKENS).blocks == 6
    world.manager.check_integrity()
    assert count.lookups == 2


def test_a_removed_page_ends_the_promise() -> None:
    world, count = waited(2)
    world.manager.forget(0, KEYS[4:5])
    assert world.match(KEYS).blocks == 4
    assert count.lookups == 2


def test_a_prefetched_request_is_looked_up_first() -> None:
    world = written(KEYS, slots=32)
    count = LookupCount(world)
    assert world.manager.prefetch("r", [KEYS]) == 1
    world.run()
    assert (world.match(KEYS).blocks, count.lookups) == (6, 1)
    assert (world.match(KEYS).blocks, count.lookups) == (6, 1)


def test_no_more_is_promised_than_may_be_loaded_at_once() -> None:
    world, _ = waited(0, manager_limits=ManagerLimits(inflight_load_pages=8))
    other = chain(4, seed=5)
    world.store(other[:2])
    assert world.match(other[:2], "other").blocks == 2
    world.manager.check_integrity()
    world.store(other[2:], "w2")
    assert world.match(KEYS).blocks == 6
    assert world.manager.promises.room_for_loads() == 0


def test_a_request_whose_load_failed_is_looked_up() -> None:
    world, count = waited(0)
    assert world.match(KEYS).blocks == 6
    world.end_load(world.load(6), failed=[2])
    world.match(KEYS)
    assert count.lookups == 2


def test_a_tail_that_is_still_fetched_stays_leased() -> None:
    """If a request waits for the fetch of its partial tail, the manager looks the request up again. It does not use the
    leases of the full blocks alone.
    """
    world = written(KEYS)
    assert world.hits(KEYS, "before") == 6
    tail = chain(1, seed=3)
    world.store(tail, "t", tokens=2)
    world.run()
    world.manager.hub.remove(0, world.manager.hub.index.find(0, tail))
    count = LookupCount(world)
    candidates = TailCandidates(tail, np.array([2], np.int32), 6)
    assert world.manager.match("r", [KEYS], 0, [candidates]).reads == 1
    assert world.match(KEYS).blocks == 6
    assert count.lookups == 2
    world.run()
    world.manager.end_request("r")
    world.manager.check_integrity()


def promised_straight(in_host: int, ttl_s: int | None = None) -> tuple[DiskWorld, LookupCount]:
    """Returns a world in which r was promised KEYS: the first `in_host` in host memory, the others by a GDS load from
    disk.
    """
    world = written(KEYS, limits=traffic(gds_loads=GdsUse.ALWAYS, ttl_s=ttl_s))
    if in_host:
        world.store(KEYS[:in_host], "before")
    count = LookupCount(world)
    assert world.look(KEYS).blocks == len(KEYS)
    return world, count


@pytest.mark.parametrize("in_host", [0, 2])
def test_what_is_promised_where_it_lies_stays_so_whatever_expires_meanwhile(in_host: int) -> None:
    world, count = promised_straight(in_host, ttl_s=60)
    world.now_s += 61
    result = world.look(KEYS)
    assert (result.blocks, result.reads, count.lookups) == (6, 0, 1)
    assert blocks_by_tier(result) == (in_host, 6 - in_host)
    assert world.manager.leased_pages("r") == 6
    *_, from_disk = world.begin(list(range(6))).ops
    assert (from_disk.kind, len(from_disk.places)) == (OpKind.GDS_READ, 6 - in_host)
    for op in world.manager.tables.ops.of_request("r", OpRole.LOAD):
        world.end_load(op.plan)
    assert world.manager.leased_pages("r") == 0
    # The control: for a request without a promise, the pages on disk have expired.
    assert world.look(KEYS, "other").blocks == in_host


def test_what_is_promised_where_it_lies_is_looked_up_once_it_is_forgotten_or_the_way_rests() -> None:
    world, count = promised_straight(2)
    world.tier.forget(0, KEYS[4:5])
    assert (world.look(KEYS).blocks, count.lookups) == (4, 2)
    world.manager.check_integrity()
    world, count = promised_straight(2)
    route = world.tier.straight
    assert route is not None
    route.source_failed("a disk")
    assert (world.look(KEYS).reads, count.lookups) == (1, 2)
    assert world.manager.leased_pages("r") == 2


@pytest.mark.parametrize("keys", [KEYS[:5], chain(8), np.concatenate((KEYS[:5], chain(1, seed=9)))])
def test_another_question_than_what_is_promised_where_it_lies_is_looked_up(keys: Keys) -> None:
    world, count = promised_straight(2)
    result = world.look(keys)
    world.manager.check_integrity()
    assert (result.blocks, count.lookups) == (6 if len(keys) == 8 else 5, 2)


@pytest.mark.parametrize("change", ["disable", "nothing"])
def test_nothing_is_promised_when_disabled(change: str) -> None:
    world, _ = waited(2)
    changes: dict[str, Callable[[], object]] = {"disable": world.manager.disable, "nothing": lambda: None}
    changes[change]()
    assert world.match(KEYS).blocks == (0 if change == "disable" else 6)


def test_a_reset_that_broke_off_promises_nothing_of_a_lease_that_it_left() -> None:
    world, _ = waited(2)

    def broken() -> None:
        raise RuntimeError("broken on purpose")

    world.manager.promises.end_all = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on purpose"):
        world.manager.reset()
    assert world.manager.match("r", [KEYS], 0).blocks == 0
