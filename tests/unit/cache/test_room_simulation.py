"""Many prompts wait for a small host memory. The queue in which requests wait for host slots is compared with the
model. Broken queues must be caught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.facts.keys import Rule
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from tests.soak import soak_rounds
from tests.unit.cache.broken_lines import BROKEN_LINES
from tests.unit.cache.broken_managers import caught_by

GROUPS = {
    "one group": (GroupSpec(4, 8),),
    "two groups": (GroupSpec(4, 8), GroupSpec(4, 10)),
    "hybrid": (GroupSpec(4, 8), GroupSpec(4, 8, Rule.WINDOW, 2)),
}
SHARED_SLOTS = (GroupSpec(4, 14), GroupSpec(4, 14, shares=0))
STEPS = 4_000


def config(seed: int, groups: str = "one group", stream: bool = False) -> SimulationConfig:
    return SimulationConfig(
        seed=seed,
        steps=STEPS,
        groups=GROUPS[groups],
        ranks=1 + seed % 2,
        requests=14,
        engine_blocks=48,
        disk_places=64,
        ordered_reports=seed % 3 != 2,
        stream=stream,
        asks_again=True,
        wait_s=3.0,
    )


@pytest.mark.soak
@soak_rounds(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken(groups: str, stream: bool, soak_round: int) -> None:
    report = Simulation(config(soak_round, groups, stream)).run()
    assert report.steps == STEPS
    assert report.verified_pages > 10
    assert report.room_waits > 0


@pytest.mark.parametrize("disk_places", [0, 48])
@pytest.mark.parametrize("groups", ["one group", "hybrid"])
def test_no_rule_is_broken_with_a_store_behind(groups: str, disk_places: int) -> None:
    run = dataclasses.replace(config(1, groups), disk_places=disk_places, remote=True)
    report = Simulation(run).run()
    assert report.steps == STEPS
    assert report.room_waits > 0


@pytest.mark.parametrize("remote", [False, True])
def test_no_rule_is_broken_by_groups_that_share_slots(remote: bool) -> None:
    for seed in range(2):
        run = dataclasses.replace(
            config(2 * seed),
            groups=SHARED_SLOTS,
            disk_places=0,
            remote=remote,
            tier_places=0 if remote else 48,
        )
        assert Simulation(run).run().steps == STEPS


def test_no_rule_is_broken_where_waiting_is_weighed_against_computing() -> None:
    for seed in range(2):
        run = dataclasses.replace(config(seed), measured_steps=True)
        assert Simulation(run).run().steps == STEPS


def test_every_outcome_occurs() -> None:
    reports = [Simulation(config(seed)).run() for seed in range(6)]
    for name in ("room_waits", "room_given", "verified_pages"):
        assert sum(getattr(report, name) for report in reports) > 0, name
    for name in ("no_room", "no_room_pages", "waits", "prefetched"):
        assert sum(getattr(report.disk, name) for report in reports) > 0, name


def narrow_configs() -> Iterator[SimulationConfig]:
    for seed in range(16):
        groups = tuple(GROUPS)[seed % 2]
        yield dataclasses.replace(config(seed, groups, stream=seed % 4 == 3), integrity_every=0)


@pytest.mark.parametrize("manager_class", BROKEN_LINES, ids=lambda c: c.__name__)
def test_a_broken_line_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert "room" in caught_by(narrow_configs(), manager_class)


def test_control_the_real_line_passes_where_the_broken_ones_fail() -> None:
    assert caught_by(narrow_configs(), LocalCacheManager) == ""
