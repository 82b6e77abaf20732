"""Runs simulations in which the values of the remote store may be wrong. Compares the real manager and the real remote
tier with the model. Broken tiers must be caught.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import WriteMode
from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.facts.keys import Rule
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from flexkv.simulation.store_moves import StoreMoves
from flexkv.simulation.tier_moves import TierMoves
from flexkv.transfer.graph import OpKind
from tests.soak import soak_rounds
from tests.unit.cache.broken_disk_managers import PromisesBeforeVerified, PublishesFailedReads
from tests.unit.cache.broken_managers import caught_by

GROUPS = {
    "one group": (GroupSpec(4, 12),),
    "two groups": (GroupSpec(4, 12), GroupSpec(4, 16)),
    "hybrid": (GroupSpec(4, 12), GroupSpec(4, 12, Rule.WINDOW, 2)),
    "states": (GroupSpec(4, 12), GroupSpec(8, 8, Rule.STATE)),
}
STEPS = 4_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


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
        remote=True,
    )


@pytest.mark.soak
@soak_rounds(2)
@pytest.mark.parametrize(
    ("disk_places", "mode"), [(0, WriteMode.THROUGH), (16, WriteMode.THROUGH), (0, WriteMode.REUSE)]
)
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken(groups: str, mode: WriteMode, disk_places: int, soak_round: int) -> None:
    report = Simulation(config(soak_round, groups, disk_places, mode)).run()
    assert report.steps == STEPS
    assert report.verified_pages > 10


def test_every_fault_of_the_store_occurs() -> None:
    reports = [Simulation(config(seed, disk_places=16 * (seed % 2))).run() for seed in range(4)]
    actions = {name for report in reports for name in report.actions}
    assert {"tier_move", "tier_deliver", "store_answer", "store_share", "store_lose", "store_cut"} <= actions
    for name in ("written", "failed_writes", "read", "failed_reads", "unread", "waits"):
        assert sum(getattr(report.symbolic, name) for report in reports) > 0, name


def configs() -> Iterator[SimulationConfig]:
    for seed in range(8):
        yield dataclasses.replace(config(seed), failure_rate=0.1)


def test_control_the_real_manager_and_tier_pass_where_the_broken_ones_fail() -> None:
    assert caught_by(configs(), LocalCacheManager) == ""


@pytest.mark.parametrize("manager_class", [PromisesBeforeVerified, PublishesFailedReads])
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(configs(), manager_class)


def _without_a_check(moves: StoreMoves, group: int, key: bytes) -> Any:
    """Replaces `StoreMoves.fetched` in a broken tier, which publishes a page without comparing its trailer and
    digests.
    """
    value = moves.store.values.get((group, key))
    if value is None:
        return None
    return value.symbols if value.sealed is not None else [moves.world.engine.garbage()] * len(value.symbols)


def _trust_what_exists(tier: RemoteTier, plan: Any, entries: Any, suspect: Any) -> None:
    """Replaces `RemoteTier.end_fetch` in a broken tier, which keeps treating a page as present although the store did
    not deliver it.
    """
    tier.presence.unpin(entries)


def _go_on_after_a_reset(tier: RemoteTier) -> None:
    """Replaces `RemoteTier.begin_reset` in a broken tier, in which pages of the new weights get the names of the old
    ones in the store.
    """
    tier.presence.clear()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (StoreMoves, "fetched", _without_a_check, "bytes|does not promise"),
        (RemoteTier, "end_fetch", _trust_what_exists, "still in the tier"),
        (RemoteTier, "begin_reset", _go_on_after_a_reset, "other weights|bytes|does not promise"),
    ],
)
def test_a_broken_tier_is_caught(
    owner: type[Any], name: str, broken: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    worlds = (dataclasses.replace(config(seed), failure_rate=0.1, steps=8_000) for seed in range(8))
    assert re.search(words, caught_by(worlds, LocalCacheManager, integrity_every=10))


@pytest.mark.parametrize("writes_on", [True, False], ids=["it writes on", "control: it has stopped"])
def test_slots_that_are_free_before_the_helper_is_reaped_are_caught(
    writes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host slots into which a helper writes may be reused only when the helper's process has ended. If the helper goes
    on writing to them afterwards, the simulation catches the wrong bytes.
    """
    late: list[tuple[StoreMoves, int, int]] = []
    ended_by_death, move = StoreMoves.ended_by_death, TierMoves.move

    def ended(moves: StoreMoves, each: Any) -> Any:
        if writes_on and each.op.kind is OpKind.DISK_READ:
            late.extend((moves, each.op.group, slot) for slot in each.op.slots.tolist())
        return ended_by_death(moves, each)

    def moved(moves: StoreMoves) -> None:
        random = moves.world.random
        if late and random.random() < 0.1:
            owner, group, slot = late.pop(0)
            owner.world.engine.fill_slot(group, slot, None)
        reads = any(each.op.kind is OpKind.DISK_READ for each in moves._moving.values())
        if reads and random.random() < 0.2:
            moves.cut()
        move(moves)

    monkeypatch.setattr(StoreMoves, "ended_by_death", ended)
    monkeypatch.setattr(StoreMoves, "move", moved)
    worlds = (dataclasses.replace(config(seed), steps=8_000) for seed in range(12))
    found = caught_by(worlds, LocalCacheManager, integrity_every=10)
    assert bool(re.search("bytes|does not promise", found)) is writes_on, found
