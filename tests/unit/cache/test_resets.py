"""A reset has two phases. First every tier drops its pages. Then the manager waits for each tier until no older page
would survive a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.cache import manager as manager_module
from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import RESET_S, LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from tests.unit.cache.disk_world import chain
from tests.unit.cache.test_tier_seam import ToyTier, store

Call = tuple[str, str, float]
"""A call with which a reset begins or finishes in a tier: the phase, the tier's name, and the time by which the phase
must end.
"""


class WatchedReset:
    """A manager with host memory and two toy tiers. It records the phases of its resets in order.

    Attributes:
        within: called in the second phase of each tier, with the tier's name.
    """

    def __init__(self, manager_class: type[LocalCacheManager] = LocalCacheManager) -> None:
        self.calls: list[Call] = []
        self.within: Callable[[str], object] = lambda name: None
        self.manager = manager_class(
            [GroupSpec(4, 8)], tiers=[*unit_tiers(), self._made("a"), self._made("b")]
        )
        self.manager.grow(0, 8)

    def _made(self, name: str) -> Any:
        watched = self

        class Watched(ToyTier):
            def begin_reset(self) -> None:
                watched.calls.append(("begin", name, 0.0))
                super().begin_reset()

            def finish_reset(self, ends_s: float) -> None:
                watched.calls.append(("finish", name, ends_s))
                watched.within(name)

        def make(context: TierContext) -> ToyTier:
            return Watched(context)

        return make

    def check(self, keys: Keys) -> None:
        """Stores `keys`, resets the manager, and checks the rules of a reset.

        Raises:
            AssertionError: the reset breaks a rule.
        """
        store(self.manager, keys)
        assert self.manager.match("before", [keys], 0).blocks == len(keys)
        found: list[int] = []
        self.within = lambda name: found.append(self.manager.match(f"within {name}", [keys], 0).blocks)
        begun_s = time.monotonic()
        self.manager.reset()
        phases = [(phase, name) for phase, name, _ in self.calls]
        assert phases[:2] == [("begin", "a"), ("begin", "b")], (
            "a tier was waited for before all had forgotten"
        )
        assert phases[2:] == [("finish", "a"), ("finish", "b")]
        deadlines = {ends_s for phase, _, ends_s in self.calls if phase == "finish"}
        assert len(deadlines) == 1, "tiers wait one after the other, so their deadlines must not add up"
        assert begun_s < deadlines.pop() <= time.monotonic() + RESET_S
        assert found == [0, 0], "something older was found while a tier was waited for"
        assert self.manager.leased_pages("before") == 0
        self.manager.check_integrity()


def test_a_reset_that_is_begun_waits_for_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin_reset` does not wait for the tiers; `poll_reset` polls whether the tiers have confirmed the reset. Even
    before that, older pages are misses, and new pages are promised.
    """
    watched = WatchedReset()
    manager, keys = watched.manager, chain(5)
    store(manager, keys)
    unconfirmed = {"a": True, "b": True}
    monkeypatch.setattr(ToyTier, "resets", property(lambda tier: unconfirmed[tier.facts.name]), raising=False)
    for tier, name in zip(manager.tiers[1:], "ab", strict=True):
        monkeypatch.setattr(tier, "facts", replace(tier.facts, name=name))
    assert manager.begin_reset() == manager.epoch == 1
    assert watched.calls == [("begin", "a", 0.0), ("begin", "b", 0.0)]
    assert manager.match("old", [keys], 0).blocks == 0
    store(manager, chain(6, seed=2))
    assert manager.match("new", [chain(6, seed=2)], 0).blocks == 6
    for confirmed in "ab":
        manager.poll_reset()
        assert manager.resets
        unconfirmed[confirmed] = False
    manager.poll_reset()
    assert not manager.resets
    assert watched.calls[2:] == [("finish", "a", 0.0), ("finish", "b", 0.0)]
    manager.check_integrity()


def test_a_tier_that_does_not_confirm_a_reset_in_time_is_told_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = WatchedReset()
    monkeypatch.setattr(ToyTier, "resets", True, raising=False)
    monkeypatch.setattr(manager_module, "RESET_S", 0.05)
    watched.manager.begin_reset()
    watched.manager.poll_reset()
    assert watched.manager.resets
    time.sleep(0.06)
    watched.manager.poll_reset()
    assert not watched.manager.resets
    assert watched.calls[2:] == [("finish", "a", 0.0), ("finish", "b", 0.0)]


@pytest.mark.parametrize("confirmed", [False, True], ids=["", "control"])
def test_a_further_reset_gives_a_tier_that_has_not_confirmed_the_last_one_no_more_time(
    monkeypatch: pytest.MonkeyPatch, confirmed: bool
) -> None:
    """A second reset does not extend the time limit of a tier that has not confirmed the first one. In the control the
    tiers confirm the first reset, so that they get the full time for the second one.
    """
    watched, now_s = WatchedReset(), 0.0
    manager = watched.manager
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    for begun_s in (0.0, 0.6 * RESET_S):
        now_s = begun_s
        monkeypatch.setattr(ToyTier, "resets", not confirmed, raising=False)
        manager.begin_reset()
        monkeypatch.setattr(ToyTier, "resets", True, raising=False)
        manager.poll_reset()
        assert manager.resets
    now_s = 1.1 * RESET_S
    manager.poll_reset()
    assert manager.resets == confirmed
    now_s = 1.7 * RESET_S
    manager.poll_reset()
    assert not manager.resets


def test_a_tier_that_cannot_end_a_reset_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedReset()
    watched.manager.begin_reset()

    def broken(name: str) -> None:
        raise MemoryError(name)

    watched.within = broken
    for _ in range(2):
        with pytest.raises(MemoryError, match="a"):
            watched.manager.poll_reset()
        assert watched.manager.resets
    watched.within = lambda name: None
    watched.manager.poll_reset()
    assert not watched.manager.resets
    assert [name for phase, name, _ in watched.calls if phase == "finish"] == ["a", "a", "a", "b"]


def test_all_tiers_forget_before_the_first_is_waited_for() -> None:
    WatchedReset().check(chain(5))


class WaitsBetween(LocalCacheManager):
    """A broken manager that resets one tier after the other. It waits for each tier, with a separate time limit, before
    the next tier drops its pages.
    """

    def reset(self) -> int:
        self.promises.end_all()
        self.tables.epoch += 1
        for tier in self.tiers:
            tier.begin_reset()
            tier.finish_reset(time.monotonic() + RESET_S)
        return self.tables.epoch


class AddsUpDeadlines(LocalCacheManager):
    def reset(self) -> int:
        self.promises.end_all()
        self.tables.epoch += 1
        for tier in self.tiers:
            tier.begin_reset()
        for number, tier in enumerate(self.tiers):
            tier.finish_reset(time.monotonic() + RESET_S * (number + 1))
        return self.tables.epoch


class KeepsLeases(LocalCacheManager):
    def reset(self) -> int:
        self.promises.end_all = lambda: None  # type: ignore[method-assign]
        return super().reset()


class ServesUntilTheEnd(LocalCacheManager):
    """A broken manager whose host memory drops its pages only after the wait for the other tiers."""

    def reset(self) -> int:
        self.promises.end_all()
        self.tables.epoch += 1
        for tier in self.tiers[1:]:
            tier.begin_reset()
        ends_s = time.monotonic() + RESET_S
        for tier in self.tiers:
            tier.finish_reset(ends_s)
        self.tiers[0].begin_reset()
        return self.tables.epoch


@pytest.mark.parametrize(
    "manager_class",
    [WaitsBetween, AddsUpDeadlines, KeepsLeases, ServesUntilTheEnd],
    ids=lambda c: c.__name__,
)
def test_a_broken_reset_is_caught(manager_class: type[LocalCacheManager]) -> None:
    with pytest.raises(AssertionError):
        WatchedReset(manager_class).check(chain(5))
