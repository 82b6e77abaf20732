"""Runs a real manager that has a symbolic tier, alone or behind disks, and compares it with the model. Broken tiers
must be caught.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import WriteMode
from flexkv.facts.keys import Rule
from flexkv.simulation.base import SimulationConfig, Symbol
from flexkv.simulation.run import Simulation
from flexkv.simulation.symbolic_tier import SymbolicTier
from flexkv.simulation.tier_moves import TierMoves
from tests.soak import soak_rounds
from tests.unit.cache.broken_disk_managers import PromisesBeforeVerified, PublishesFailedReads
from tests.unit.cache.broken_managers import caught_by

GROUPS = {
    "one group": (GroupSpec(4, 12),),
    "two groups": (GroupSpec(4, 12), GroupSpec(4, 16)),
    "hybrid": (GroupSpec(4, 12), GroupSpec(4, 12, Rule.WINDOW, 2)),
}
STEPS = 4_000


def config(
    seed: int, groups: str = "one group", disk_places: int = 0, mode: WriteMode = WriteMode.THROUGH
) -> SimulationConfig:
    return SimulationConfig(
        seed=seed,
        steps=STEPS,
        groups=GROUPS[groups],
        ranks=1 + seed % 2,
        disk_places=disk_places,
        disk_mode=mode,
        tier_places=40,
    )


@pytest.mark.soak
@soak_rounds(2)
@pytest.mark.parametrize("disk_places", [0, 16])
@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.BACK, WriteMode.EVICT])
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken(groups: str, mode: WriteMode, disk_places: int, soak_round: int) -> None:
    report = Simulation(config(soak_round, groups, disk_places, mode)).run()
    assert report.steps == STEPS
    assert report.verified_pages > 10
    assert report.symbolic.written > 5


def test_every_fault_of_the_tier_occurs() -> None:
    reports = [Simulation(config(seed, disk_places=16 * (seed % 2))).run() for seed in range(4)]
    actions = {name for report in reports for name in report.actions}
    assert {"tier_move", "tier_deliver", "tier_cancel", "tier_lose"} <= actions
    for name in ("written", "failed_writes", "read", "failed_reads", "unread", "evicted", "waits"):
        assert sum(getattr(report.symbolic, name) for report in reports) > 0, name
    assert reports[1].disk.read > 0


def configs() -> Iterator[SimulationConfig]:
    for seed in range(8):
        yield dataclasses.replace(config(seed), failure_rate=0.1)


def test_control_the_real_manager_and_tier_pass_where_the_broken_ones_fail() -> None:
    assert caught_by(configs(), LocalCacheManager) == ""


@pytest.mark.parametrize("manager_class", [PromisesBeforeVerified, PublishesFailedReads])
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(configs(), manager_class)


def _keep_suspects(tier: SymbolicTier, plan: Any, entries: Any, suspect: Any) -> None:
    tier.presence.unpin(entries)


def _publish_failed_writes(tier: SymbolicTier, group: int, entries: Any, good: Any) -> Any:
    return tier.presence.finish(entries, np.ones(len(entries), np.uint8)).view(np.bool_)


def test_a_tier_that_says_it_has_what_it_lacks_costs_its_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SymbolicTier, "end_write", _publish_failed_writes)
    assert caught_by(configs(), LocalCacheManager, integrity_every=10) == ""
    report = Simulation(next(configs())).run()
    assert report.symbolic.failed_reads > 0
    assert report.verified_pages > 10


def _keep_old_epochs(tier: SymbolicTier) -> None:
    """Replaces `SymbolicTier.begin_reset` in a broken tier, which keeps all pages over a reset."""


def _bring_whatever_is_there(
    moves: TierMoves, group: int, place: int, key: bytes, epoch: int
) -> list[Symbol] | None:
    found = moves.tier.content[group].get(place)
    return moves.world.engine.slot_content(group, 0) if found is None else found[2]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (SymbolicTier, "end_fetch", _keep_suspects, "still in the tier"),
        (SymbolicTier, "begin_reset", _keep_old_epochs, "bytes"),
        (TierMoves, "read", _bring_whatever_is_there, "bytes|does not promise"),
    ],
)
def test_a_broken_tier_is_caught(
    owner: type[Any], name: str, broken: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation catches a tier that keeps pages that it could not deliver, keeps pages over a reset, or reports
    wrong bytes as good.
    """
    monkeypatch.setattr(owner, name, broken)
    assert re.search(words, caught_by(configs(), LocalCacheManager, integrity_every=10))
