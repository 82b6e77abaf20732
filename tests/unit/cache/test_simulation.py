"""Compares the real manager with the model in more than 100,000 random steps. Broken managers must be caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from flexkv.c_ext import eviction_policies
from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.facts.keys import Rule
from flexkv.simulation.base import RuleBroken, SimulationConfig
from flexkv.simulation.run import Simulation
from tests.soak import soak_rounds
from tests.unit.cache.broken_managers import BROKEN, caught_by

GROUPS = {
    "one group": (GroupSpec(4, 40),),
    "two groups": (GroupSpec(4, 30), GroupSpec(4, 50)),
    "hybrid": (
        GroupSpec(4, 30),
        GroupSpec(4, 30, Rule.WINDOW, 2),
        GroupSpec(4, 20, Rule.STATE),
    ),
}
STEPS = 6_000
SEEDS = 6


def config(seed: int, groups: str, steps: int = STEPS, policy: str = "lru") -> SimulationConfig:
    return SimulationConfig(
        seed=seed,
        steps=steps,
        groups=GROUPS[groups],
        ranks=1 + seed % 3,
        ordered_reports=seed % 4 != 3,
        policy=policy,
    )


@pytest.mark.soak
@soak_rounds(SEEDS)
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken(groups: str, soak_round: int) -> None:
    report = Simulation(config(soak_round, groups)).run()
    assert report.steps == STEPS
    assert report.verified_pages > 100
    assert report.failed_pages > 5
    assert report.stats.stored_pages > 100
    assert report.stats.evicted_blocks > 0


@pytest.mark.parametrize("policy", eviction_policies())
def test_no_rule_is_broken_with_any_eviction_policy(policy: str) -> None:
    for seed, groups in enumerate(GROUPS):
        report = Simulation(config(seed, groups, 2_000, policy)).run()
        assert report.verified_pages > 30
        assert report.stats.evicted_blocks > 0


def test_eviction_policies_take_runs_apart() -> None:
    """Simulations with different policies have different results, so the tests above do not test one policy under two
    names.
    """
    differ = [
        Simulation(narrow).run() != Simulation(replace(narrow, policy="bonus_lru")).run()
        for narrow in narrow_configs(seeds=3)
    ]
    assert any(differ)


def test_the_suite_takes_enough_steps() -> None:
    assert len(GROUPS) * SEEDS * STEPS >= 100_000


def test_a_seed_repeats_its_steps() -> None:
    first, second = (Simulation(config(5, "two groups", 1_500)).run() for _ in range(2))
    assert first == second


def test_every_action_and_outcome_occurs() -> None:
    reports = [Simulation(config(seed, "one group")).run() for seed in range(3)]
    actions = {name for report in reports for name in report.actions}
    assert actions == {
        "arrive", "advance_request", "move", "deliver", "abort", "preempt",
        "cancel", "forget", "expire", "grow_some", "lose_pool", "reset",
    }  # fmt: skip
    assert all(report.lookups_after_failures > 0 for report in reports)
    for name in ("tail_hits", "discarded_pages", "failed_store_pages", "expired_leases", "forgotten_blocks"):
        assert sum(getattr(report.stats, name) for report in reports) > 0, name


def narrow_configs(seeds: int = 12, failure_rate: float = 0.05) -> Iterator[SimulationConfig]:
    """Yields configurations with few slots and short queues, so that eviction and BUSY are common. The simulation runs
    without `check_integrity`.
    """
    for seed in range(seeds):
        yield SimulationConfig(
            seed=seed,
            steps=5_000,
            groups=(GroupSpec(4, 14 + 4 * (seed % 3)),),
            ranks=2,
            failure_rate=failure_rate,
            integrity_every=0,
            load_queue_pages=16,
        )


@pytest.mark.parametrize("manager_class", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(), manager_class)


def test_the_real_manager_passes_where_the_broken_ones_fail() -> None:
    assert caught_by(narrow_configs(), LocalCacheManager) == ""


BYTES_ALONE = ["PublishesFailedPages", "IgnoresDiscard", "ReportsFailedLoadsAsGood"]


@pytest.mark.parametrize("name", BYTES_ALONE)
def test_wrong_bytes_alone_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation catches these broken managers by wrong bytes alone. Even without the model's checks of the
    manager's results, the symbols in blocks and slots show the fault.
    """

    def require_bytes_only(holds: bool, what: str) -> None:
        if not holds and "bytes" in what:
            raise RuleBroken(what)

    for part in ("run", "model", "world", "lookups", "requests", "ranks", "fault_events"):
        monkeypatch.setattr(f"flexkv.simulation.{part}.require", require_bytes_only)
    (manager_class,) = (broken for broken in BROKEN if broken.__name__ == name)
    # With this failure rate, only one run in six serves a block that was computed from a failed load.
    configs = narrow_configs(seeds=60, failure_rate=0.2)
    assert "bytes" in caught_by(configs, manager_class, integrity_every=5)
