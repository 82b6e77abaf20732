"""Tests the effect of a request's settings on its lookups: how much is promised, and from which tiers."""

from __future__ import annotations

from typing import Any

import pytest

from flexkv.cache.base import GroupSpec, Outcome
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.promise.ask import Ask
from flexkv.facts.keys import Rule
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import MissReason
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, chain, written
from tests.unit.cache.host_world import make, store
from tests.unit.cache.test_lookup import tail_of

BLOCKS = 6
KEYS = chain(BLOCKS)


class IgnoresSettings(LocalCacheManager):
    """A broken manager that ignores a request's settings, and promises all pages that it has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promises._heed = lambda ask: ask  # type: ignore[method-assign]


def promised(
    settings: RequestSettings, start: int = 0, manager_class: type[LocalCacheManager] = LocalCacheManager
) -> tuple[int, MissReason | None]:
    """Looks up KEYS, which are in host memory. Returns how many blocks are promised, and the reason why no more are
    promised.
    """
    manager = make(manager_class=manager_class)
    store(manager, KEYS)
    match = manager.match("r", [KEYS], start, None, settings)
    manager.check_integrity()
    return match.blocks, match.miss


LIMITS = [
    (RequestSettings(skip_load=True), 0, 0),
    (RequestSettings(max_load_tokens=0), 0, 0),
    (RequestSettings(max_load_tokens=3 * BLOCK_TOKENS + 3), 0, 3),
    (RequestSettings(max_load_tokens=2 * BLOCK_TOKENS), BLOCK_TOKENS, 2),
]


@pytest.mark.parametrize(("settings", "start", "blocks"), LIMITS)
def test_no_more_is_promised_than_a_request_asks_for(
    settings: RequestSettings, start: int, blocks: int
) -> None:
    assert promised(settings, start) == (blocks, MissReason.ASKED)


@pytest.mark.parametrize(("limit", "reason"), [(4, MissReason.ABSENT), (3, MissReason.ASKED)])
def test_a_limit_is_the_reason_only_where_it_ends_the_promise(limit: int, reason: MissReason) -> None:
    manager = make()
    store(manager, KEYS[:3])
    match = manager.match("r", [KEYS], 0, None, RequestSettings(max_load_tokens=limit * BLOCK_TOKENS))
    assert (match.blocks, match.miss) == (3, reason)


@pytest.mark.parametrize(("on_disk", "reason"), [(True, MissReason.ASKED), (False, MissReason.ABSENT)])
@pytest.mark.parametrize("tiers", [frozenset(), frozenset({"host"})])
def test_an_excluded_tier_is_the_reason_if_it_has_the_next_block(
    tiers: frozenset[str], on_disk: bool, reason: MissReason
) -> None:
    world = written(KEYS) if on_disk else DiskWorld()
    match = world.manager.match("r", [KEYS], 0, None, RequestSettings(tiers=tiers))
    assert (match.blocks, match.miss) == (0, reason)


@pytest.mark.parametrize(
    "settings", [NO_SETTINGS, RequestSettings(max_load_tokens=999), RequestSettings(tiers=frozenset())]
)
def test_other_requests_are_promised_everything(settings: RequestSettings) -> None:
    assert promised(settings) == (BLOCKS, None)


@pytest.mark.parametrize(("settings", "start", "blocks"), LIMITS)
def test_control_a_manager_that_ignores_settings_promises_more(
    settings: RequestSettings, start: int, blocks: int
) -> None:
    assert promised(settings, start, IgnoresSettings)[0] > blocks


@pytest.mark.parametrize(("most", "tail_tokens"), [(2 * BLOCK_TOKENS, 0), (4 * BLOCK_TOKENS, 2), (None, 2)])
def test_a_tail_does_not_exceed_the_limit(most: int | None, tail_tokens: int) -> None:
    manager, keys = make(), chain(2)
    tail = tail_of([3, 2, 1], 7, base=2)
    store(manager, keys)
    store(manager, tail.keys[1:2].copy(), first=2)
    match = manager.match("b", [keys], 0, [tail], RequestSettings(max_load_tokens=most))
    assert (match.blocks, match.tail_tokens) == (2, tail_tokens)


def test_a_request_that_waits_for_disk_gets_no_more_than_it_asks_for() -> None:
    world = on_disk()
    settings = RequestSettings(max_load_tokens=2 * BLOCK_TOKENS)
    match = world.manager.match("r", [KEYS], 0, None, settings)
    assert match.outcome is Outcome.COMING
    world.run()
    assert world.manager.match("r", [KEYS], 0, None, settings).blocks == 2
    # The next input of a session has different settings, while the promise for the last input still holds.
    assert world.manager.match("r", [KEYS], 0, None, RequestSettings(skip_load=True)).blocks == 0
    world.manager.check_integrity()


# --- tiers ---


def on_disk(manager_class: type[LocalCacheManager] = LocalCacheManager) -> DiskWorld:
    """Returns a world in which KEYS are only on disk."""
    world = DiskWorld(slots=BLOCKS, compute_if_faster=False, manager_class=manager_class)
    world.store(KEYS)
    world.run()
    world.store(chain(BLOCKS, 1), "other")
    world.run()
    assert not world.manager.hub.there(0, KEYS).any()
    return world


def reads(world: DiskWorld, settings: RequestSettings) -> int:
    reads = world.manager.match("r", [KEYS], 0, None, settings).reads
    world.manager.check_integrity()
    return reads


@pytest.mark.parametrize("tiers", [(), ("host",), ("remote", "peers")])
def test_tiers_that_a_request_does_not_name_are_not_read_for_it(tiers: tuple[str, ...]) -> None:
    settings = RequestSettings(tiers=frozenset(tiers))
    assert reads(on_disk(), settings) == 0
    assert on_disk().manager.prefetch("r", [KEYS], 0, settings) == 0


@pytest.mark.parametrize("settings", [NO_SETTINGS, RequestSettings(tiers=frozenset(("disk", "remote")))])
def test_tiers_that_a_request_names_are_read(settings: RequestSettings) -> None:
    assert reads(on_disk(), settings) == 1
    assert on_disk().manager.prefetch("r", [KEYS], 0, settings) == 1


def test_control_a_manager_that_ignores_settings_reads_the_disk() -> None:
    assert reads(on_disk(IgnoresSettings), RequestSettings(tiers=frozenset())) == 1


def test_a_lookup_carries_the_settings() -> None:
    asks: list[Ask] = []
    manager = make()
    look = manager.promises.lookup.look
    manager.promises.lookup.look = lambda ask: asks.append(ask) or look(ask)  # type: ignore
    settings = RequestSettings(max_load_tokens=4)
    manager.match("r", [KEYS], 0, None, settings)
    assert [ask.settings for ask in asks] == [settings]


# --- groups that need different pages, and tiers that a lookup must query ---


@pytest.mark.parametrize(("most", "tokens"), [(None, 12), (3 * 4 - 1, 8), (2 * 4, 8), (3, 0)])
def test_a_hit_of_several_groups_ends_at_a_boundary_within_the_limit(most: int | None, tokens: int) -> None:
    groups = (GroupSpec(4, 16), GroupSpec(4, 16, Rule.STATE))
    manager, full, states = make(groups=groups), chain(3), chain(3, 1)
    store(manager, full)
    store(manager, states, group=1)
    match = manager.match("r", [full, states], 0, None, RequestSettings(max_load_tokens=most))
    assert match.tokens == tokens
    manager.check_integrity()
