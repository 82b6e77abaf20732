"""Runs simulations of one to six groups with different rules and block sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from flexkv.c_ext import BoundaryLookup, GroupRule
from flexkv.cache.base import GroupSpec, ManagerLimits
from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import WriteMode
from flexkv.facts.keys import Rule
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from tests.soak import soak_rounds
from tests.unit.cache.broken_managers import caught_by

SIZES = ((16,), (16, 32), (16, 32, 64), (32, 544), (64, 544))
STEPS = 3_000
BEHIND = {
    "nothing": (),
    "disk": ("disk_places",),
    "symbolic tier": ("tier_places",),
    "both": ("disk_places", "tier_places"),
}
"""For each choice of tiers behind host memory, the names of the settings that give these tiers slots."""


def random_config(
    seed: int, behind: str = "nothing", steps: int = STEPS, shares: bool = False
) -> SimulationConfig:
    rng = random.Random(seed)
    sizes = SIZES[seed % len(SIZES)]
    count = rng.randint(1, 6)
    blocks = [rng.choice(sizes) for _ in range(count)]
    step = SimulationConfig(0, groups=tuple(GroupSpec(size, 1) for size in blocks)).step_tokens
    most = max(step // size for size in blocks)
    groups = tuple(_group(rng, size, step) for size in blocks)
    if shares:
        slots = max(group.slots for group in groups)
        owner, *others = (replace(group, slots=slots) for group in groups)
        groups = (owner, *(replace(group, shares=0) if rng.random() < 0.7 else group for group in others))
    places: dict[str, Any] = dict.fromkeys(BEHIND[behind], 32 * most)
    return SimulationConfig(
        seed=seed,
        steps=steps,
        groups=groups,
        ranks=1 + seed % 2,
        engine_blocks=24 * most,
        most_steps=8 if most < 8 else 4,
        store_queue_pages=16 * most,
        load_queue_pages=16 * most * count,
        ordered_reports=seed % 4 != 3,
        disk_mode=rng.choice((WriteMode.THROUGH, WriteMode.BACK)),
        **places,
    )


def _group(rng: random.Random, size: int, step: int) -> GroupSpec:
    pages = step // size
    rule = rng.choice((Rule.FULL, Rule.WINDOW, Rule.WINDOW, Rule.CHUNK, Rule.STATE))
    reach = {Rule.WINDOW: rng.randint(1, 3 * pages), Rule.CHUNK: rng.randint(1, 3 * step)}.get(rule, 0)
    return GroupSpec(size, 12 * pages, rule, reach)


@pytest.mark.soak
@soak_rounds(2)
@pytest.mark.parametrize("behind", BEHIND)
def test_no_rule_is_broken(behind: str, soak_round: int) -> None:
    verified = 0
    for case in range(8):
        report = Simulation(random_config(8 * soak_round + case, behind)).run()
        assert report.stats.stored_pages > 20
        verified += report.verified_pages
    assert verified > 150


@pytest.mark.soak
@soak_rounds(1)
@pytest.mark.parametrize("behind", ["nothing", "symbolic tier"])
def test_no_rule_is_broken_where_groups_share_slots(behind: str, soak_round: int) -> None:
    verified = 0
    for case in range(12):
        report = Simulation(random_config(12 * soak_round + case, behind, shares=True)).run()
        assert report.stats.stored_pages > 20
        verified += report.verified_pages
    assert verified > 150


# --- managers that break a rule ---


class _OtherRules(LocalCacheManager):
    """Base class of broken managers that look up pages by rules other than those of the groups."""

    def __init__(self, groups: Sequence[GroupSpec], limits: ManagerLimits, **more: Any) -> None:
        super().__init__(groups, limits, **more)
        lookup = self.promises.lookup
        rules = [self._rule(spec) for spec in groups]
        alignment = SimulationConfig(0, groups=tuple(groups)).step_tokens
        lookup._boundaries = BoundaryLookup(lookup._native, rules, alignment)

    def _rule(self, spec: GroupSpec) -> GroupRule:
        return GroupRule(spec.rule.value, spec.block_tokens, spec.reach)


class WindowOneShort(_OtherRules):
    def _rule(self, spec: GroupSpec) -> GroupRule:
        reach = max(1, spec.reach - 1) if spec.rule is Rule.WINDOW else spec.reach
        return GroupRule(spec.rule.value, spec.block_tokens, reach)


class WindowOneLong(_OtherRules):
    def _rule(self, spec: GroupSpec) -> GroupRule:
        return GroupRule(spec.rule.value, spec.block_tokens, spec.reach + (spec.rule is Rule.WINDOW))


class StateAsWindow(_OtherRules):
    def _rule(self, spec: GroupSpec) -> GroupRule:
        if spec.rule is not Rule.STATE:
            return super()._rule(spec)
        return GroupRule("window", spec.block_tokens, 2)


class ChunkAsWindow(_OtherRules):
    def _rule(self, spec: GroupSpec) -> GroupRule:
        if spec.rule is not Rule.CHUNK:
            return super()._rule(spec)
        return GroupRule("window", spec.block_tokens, -(-spec.reach // spec.block_tokens))


class BarsByBlocksOfTheFirstGroup(LocalCacheManager):
    def discard_from(self, request_id: str, first_token: int) -> int:
        specs = self.tables.specs
        self.tables.specs = tuple(GroupSpec(specs[0].block_tokens, spec.slots) for spec in specs)
        try:
            return super().discard_from(request_id, first_token)
        finally:
            self.tables.specs = specs


class TakesFailedPagesForTokens(LocalCacheManager):
    """A broken manager that computes the first token of a failed page with the first group's page size. For groups with
    a different page size the token is wrong.
    """

    def __init__(self, groups: Sequence[GroupSpec], limits: ManagerLimits, **more: Any) -> None:
        super().__init__(groups, limits, **more)
        note = self.promises.load_tries.note_failure

        def by_first_group(op: RankOp, block_tokens: int) -> None:
            note(op, groups[0].block_tokens)

        self.promises.load_tries.note_failure = by_first_group  # type: ignore[method-assign]


class TellsOneGroupOfAllEvictions(LocalCacheManager):
    """A broken manager that, if groups share slots, attributes every evicted page to the group for which the page was
    evicted.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.hub._gone = self.hub._evicted  # type: ignore[method-assign]


class SharesNothing(LocalCacheManager):
    """A broken manager that gives each group as many slots as all groups should share."""

    def __init__(self, groups: Sequence[GroupSpec], *args: Any, **more: Any) -> None:
        super().__init__([replace(group, shares=None) for group in groups], *args, **more)

    def grow(self, group: int, slots: int) -> None:
        for each in range(len(self.tables.specs)):
            super().grow(each, slots)


BROKEN = (
    WindowOneShort,
    WindowOneLong,
    StateAsWindow,
    ChunkAsWindow,
    BarsByBlocksOfTheFirstGroup,
    TakesFailedPagesForTokens,
)


def _configs() -> Iterator[SimulationConfig]:
    for seed in range(20):
        yield random_config(seed)


@pytest.mark.parametrize("manager_class", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(_configs(), manager_class)


@pytest.mark.parametrize(
    "manager_class", [TellsOneGroupOfAllEvictions, SharesNothing], ids=lambda c: c.__name__
)
def test_a_broken_manager_of_shared_slots_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by((random_config(seed, shares=True) for seed in range(20)), manager_class)
