"""The manager keeps pages that are leased or waited for as long as it promised, but not for ever."""

from __future__ import annotations

import pytest

from flexkv.cache.base import ManagerLimits, TierId
from flexkv.cache.ledger.requests import RequestLedger
from flexkv.transfer.graph import OpId
from tests.unit.cache.disk_world import chain, traffic, written

WAIT_S, LEASE_S = 5.0, 20.0
FIRST, SECOND = TierId(1), TierId(2)


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_request_waits_for_the_slowest_of_its_tiers(slow_first: bool) -> None:
    table = RequestLedger()
    fetches = [(OpId(1), FIRST, 9.0), (OpId(2), SECOND, 1.0)]
    for fetch in fetches if slow_first else fetches[::-1]:
        table.wait("r", [fetch], 100.0)
    assert table.is_waiting("r", 109.0)
    assert not table.is_waiting("r", 109.1)


@pytest.mark.parametrize("asked", [True, False], ids=["looked up", "prefetched"])
def test_what_was_fetched_is_kept_as_long_again_as_a_request_may_wait(asked: bool) -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(wait_s=WAIT_S))
    assert world.match(keys).reads if asked else world.manager.prefetch("r", [keys])
    world.run()
    held = len(world.manager.held_slots(0))
    world.now_s += 2 * WAIT_S
    world.manager.expire()
    assert held == len(world.manager.held_slots(0)) == (4 if asked else 2)
    world.now_s += 0.1
    world.manager.expire()
    assert world.manager.held_slots(0) == set()
    world.manager.check_integrity()


def test_a_request_is_late_once() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(wait_s=WAIT_S))
    world.match(keys)
    world.now_s += WAIT_S + 0.1
    for _ in range(3):
        result = world.match(keys)
        assert (result.blocks, result.reads) == (0, 0)
    assert world.tier.counts.late == 1
    assert not world.manager.waits("r")


def test_a_lease_lives_as_long_as_it_may_and_no_longer() -> None:
    keys = chain(4)
    world = written(keys, manager_limits=ManagerLimits(lease_s=LEASE_S))
    world.hits(keys)
    world.match(keys)
    world.now_s += LEASE_S
    assert world.manager.expire() == 0
    assert world.manager.leased_pages("r") == 4
    world.now_s += 0.1
    assert world.manager.expire() == 1
    assert world.manager.leased_pages("r") == 0
