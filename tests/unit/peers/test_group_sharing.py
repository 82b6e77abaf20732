"""Units with several KV groups load each other's pages. Every group gets the right bytes, and a hit ends at a boundary
that all groups can restore.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import NO_ENTRY
from flexkv.errors import GeometryError
from flexkv.facts.keys import Rule
from flexkv.peers import board_rows, distant_units
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.peers.group_engines import (
    HIT,
    KINDS,
    PROMPT,
    Start,
    keys_of,
    knows_pages,
    manager_of,
    pair,
    peer_share,
    peer_tiers,
    remove_page,
    unit_of,
)
from tests.unit.peers.live_engines import distant_settings, wait_for

BOUNDARIES = {"store.checkpoint_tokens": 16}
"""A setting with which a hit can end at token 16, 32 or 48."""

SHORTER = 32


def deafen(engine: ScheduledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this call on, the engine does not learn which pages its peers have evicted, neither at a lookup nor at a
    poll."""
    for tier in peer_tiers(engine):
        monkeypatch.setattr(tier, "_take_over", lambda news: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", [False, True])
def test_a_prompt_of_one_engine_is_a_hit_in_another_from_its_host_memory(
    start: Start, kind: str, verify: bool
) -> None:
    one, other = pair(start, kind, **{"host.verify": verify})
    assert other.run("two", PROMPT) == HIT  # the forward pass fails if a number that it reads is wrong
    (row,) = peer_share(other).peers()
    assert row["copied"] == needed_pages(other)
    assert (row["absent"], row["changed"], row["digest"]) == (0, 0, 0)
    second = [token + 1 for token in PROMPT]
    other.run("three", second)
    wait_for(lambda: knows_pages(one, manager_of(other).cached_blocks()))
    assert one.run("four", second) == HIT
    one.check()
    other.check()


def needed_pages(engine: ScheduledEngine) -> int:
    """Returns how many pages of all groups a hit of HIT tokens needs."""
    of_rule = {Rule.FULL: lambda spec: HIT // spec.block_tokens, Rule.WINDOW: lambda spec: spec.reach}
    specs = manager_of(engine).tables.specs
    return sum(of_rule.get(spec.rule, lambda _: 1)(spec) for spec in specs)


def not_copied(engine: ScheduledEngine) -> int:
    """Returns how many pages the engine tried to copy from peers without success."""
    return int(peer_tiers(engine)[0]._reader.outcomes[1:].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_a_running_engines_folders_are_found(start: Start, tmp_path: Path, kind: str) -> None:
    one, other = (
        start(
            kind,
            "disk",
            **{"disk.folders": f"{tmp_path / name},{tmp_path / name}2", "disk.bytes_per_folder": 4 << 20},
        )
        for name in ("a", "b")
    )
    one.run("one", PROMPT)
    while unit_of(one).busy:
        one.step()
    wait_for(lambda: knows_pages(other, manager_of(one).cached_blocks()))
    assert other.run("two", PROMPT) == HIT
    other.check()


@pytest.mark.parametrize(("kind", "group"), [("window", 0), ("window", 1), ("two full, of other blocks", 1)])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_page_that_one_group_lacks_ends_the_hit_at_an_earlier_boundary(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, group: int, is_known: bool
) -> None:
    """If one group lacks a page, the hit ends at an earlier boundary. If `is_known`, the engine learns before its
    lookup that the peer has evicted the page. Otherwise it finds this out when it copies the page."""
    one, other = pair(start, kind, **BOUNDARIES)
    pages = manager_of(one).cached_blocks()
    if not is_known:
        deafen(other, monkeypatch)
    remove_page(one, group, HIT)
    if is_known:
        wait_for(lambda: knows_pages(other, pages - 1))
    assert other.run("two", PROMPT) == SHORTER
    other.check()
    assert not_copied(other) == (0 if is_known else 1)


@pytest.mark.parametrize("group", [0, 1])
def test_a_page_whose_slot_is_reused_is_not_taken(
    start: Start, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    one, other = pair(start, "window", **BOUNDARIES)
    deafen(other, monkeypatch)
    hub, keys = manager_of(one).hub, keys_of(one, PROMPT)[group][HIT // 4 - 1 : HIT // 4]
    slot = int(hub.index.slots_of(hub.index.find(group, keys))[0])
    remove_page(one, group, HIT)
    again = [number * 100 % 97 for number in range(HIT)]
    one.run("again", again)
    assert slot in slots_in_use(one, again)
    assert other.run("two", PROMPT) == SHORTER
    other.check()


def slots_in_use(engine: ScheduledEngine, tokens: list[int]) -> set[int]:
    """Returns the host slots that have pages of these tokens, in all groups."""
    index, slots = manager_of(engine).hub.index, set()
    for group, keys in enumerate(keys_of(engine, tokens)):
        entries = index.find(group, keys)
        slots |= set(index.slots_of(entries[entries != NO_ENTRY]).tolist())
    return slots


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_page_of_any_group_is_left_where_memory_is_verified(
    start: Start, group: int, verify: bool
) -> None:
    """A damaged page of any group is not loaded if host memory is verified. The control is a pool without digests, from
    which the forward pass reads the damaged bytes."""
    one, other = pair(start, "window", **BOUNDARIES, **{"host.verify": verify})
    hub, keys = manager_of(one).hub, keys_of(one, PROMPT)[group][HIT // 4 - 1 : HIT // 4]
    (slot,) = hub.index.slots_of(hub.index.find(group, keys)).tolist()
    unit_of(one).pool.slot(slot)[5] ^= 1
    assert other.run("two", PROMPT) == (SHORTER if verify else HIT)
    assert peer_share(other).peers()[0]["digest"] == int(verify)
    assert bool(other.trouble) != verify


@pytest.mark.parametrize("is_broken", [False, True])
def test_pages_of_two_groups_with_one_key_are_told_apart(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Pages of two groups with the same key are distinguished. The control is a directory that ignores the group, so
    that the forward pass reads another group's numbers."""
    one, other = start("window"), start("window")
    for engine in (one, other):
        requests = engine.connector.scheduler.requests
        monkeypatch.setattr(requests, "_signatures", [b""] * len(engine.specs))
    one.run("one", PROMPT)
    wait_for(lambda: knows_pages(other, manager_of(one).cached_blocks()))
    if is_broken:
        reader = peer_tiers(other)[0]._reader
        monkeypatch.setattr(reader, "_directory", OneGroup(reader._directory))  # type: ignore[attr-defined]
    assert other.run("two", PROMPT) == HIT
    assert bool(other.trouble) == is_broken


class OneGroup:
    """Wraps a peer directory, and ignores the KV group: it looks up the pages of every group among those of the first
    group."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory

    def bring(self, pool: Any, group: int, *pages: Any) -> Any:
        return self._directory.bring(pool, 0, *pages)


def test_pages_of_all_groups_expire_at_their_reader(start: Start) -> None:
    one, other = start("window"), start("window")
    one.run("one", PROMPT, **{"flexkv.ttl_s": 3600})
    wait_for(lambda: knows_pages(other, manager_of(one).cached_blocks()))
    assert other.run("two", PROMPT) == HIT
    hub, keys = manager_of(other).hub, keys_of(other, PROMPT)
    (tier,) = peer_tiers(other)
    for group, of_group in enumerate(keys):
        there = of_group[manager_of(one).hub.there(group, of_group) & hub.there(group, of_group)]
        assert len(there)
        times = hub.times.of(group, hub.index.slots_of(hub.index.find(group, there)))
        assert (times > time.time()).all()
        assert tier.present(group, there).all()
    tier._unix_s = lambda: time.time() + 3601
    assert not any(tier.present(group, of_group).any() for group, of_group in enumerate(keys))


def test_a_peer_with_other_groups_is_refused(start: Start) -> None:
    share = peer_share(start("window"))
    card = share._card
    first, second = card.groups
    for groups, why in (
        ((first,), "its number of KV groups is 1, ours 2"),
        ((first, second, second), "its number of KV groups is 3, ours 2"),
        ((second, first), "KV group 0: a hit needs its pages by the rule window of 2 pages, ours by full"),
        (
            (first, replace(second, reach=3)),
            "KV group 1: a hit needs its pages by the rule window of 3 pages",
        ),
        ((first, replace(second, signature="ab")), "KV group 1: its layers are others"),
        ((first, replace(second, block_tokens=8)), "KV group 1: its blocks have 8 tokens"),
    ):
        share.refused.clear()
        with pytest.raises(GeometryError, match=why):
            share._join(replace(card, unit="x", pid=7, groups=groups), [0, 0])
        assert why in share.refused["7 (x)"]
    assert share.joined == 0


def test_a_reset_peer_and_one_that_ends_are_forgotten(start: Start) -> None:
    one, other = pair(start, "window")
    manager_of(one).reset()
    wait_for(lambda: knows_pages(other, 0))
    third = start("window")
    third.run("three", PROMPT)
    wait_for(lambda: knows_pages(other, manager_of(third).cached_blocks()))
    third.close()
    wait_for(lambda: knows_pages(other, 0))
    assert other.run("two", PROMPT) == 0
    other.check()


@pytest.mark.parametrize(
    ("kind", "ignores_groups"), [*((kind, False) for kind in KINDS), ("window", True), ("state", True)]
)
def test_pages_in_folders_of_another_machine_are_found(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ignores_groups: bool
) -> None:
    """A unit finds the pages of each KV group in folders of another machine. As a control, all rows of the other unit's
    file have the number of the first group, and nothing can be loaded."""
    numbers = itertools.count()
    monkeypatch.setattr(distant_units, "machine_id", lambda: f"machine {next(numbers)}")
    if ignores_groups:
        monkeypatch.setattr(board_rows, "GROUP_SHIFT", np.uint64(63))
    one, other = (start(kind, **distant_settings(tmp_path, name)) for name in ("a", "b"))
    one.run("one", PROMPT)
    while unit_of(one).busy:
        one.step()
    wait_for(lambda: knows_pages(other, manager_of(one).cached_blocks()))
    assert other.run("two", PROMPT) == (0 if ignores_groups else HIT)
    other.check()
    (row,) = peer_share(other).peers()
    assert row["machine"] != ""
