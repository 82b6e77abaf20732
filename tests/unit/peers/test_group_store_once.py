"""With `peers.store: once`, units with several KV groups together keep one copy of each group's pages. If a unit that
keeps pages ends, the other units take over those pages that they can still read.
"""

from __future__ import annotations

from typing import Any

import pytest

from flexkv.cache.tiers.running_peers.keeper import PeerKeeper
from flexkv.facts.keys import Keys
from flexkv.peers.share import OnceCounts
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.peers.group_engines import (
    HIT,
    PROMPT,
    Start,
    keys_of,
    knows_pages,
    manager_of,
    pair,
    peer_share,
    remove_page,
    until,
)
from tests.unit.peers.live_engines import wait_for

ONCE = {"peers.store": "once"}
ALONE: dict[str, Any] = {"flexkv.tiers": ["host"]}
"""Settings of a request that loads nothing from peers, so that its prompt is computed."""

KINDS = ["window", "windows of other blocks", "state"]


def counts(engine: ScheduledEngine) -> OnceCounts:
    found = peer_share(engine).once
    assert found is not None
    return found


def cached(*engines: ScheduledEngine) -> int:
    return sum(manager_of(engine).cached_blocks() for engine in engines)


def there(engine: ScheduledEngine) -> list[int]:
    """Returns how many of the prompt's pages are in the engine's host memory, one number per KV group."""
    return [
        int(manager_of(engine).hub.there(group, keys).sum())
        for group, keys in enumerate(keys_of(engine, PROMPT))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("store", "copies"), [("once", 1), ("own", 4)])
def test_four_units_keep_the_pages_of_all_groups_once(
    start: Start, kind: str, store: str, copies: int
) -> None:
    """Four units together keep one copy of each page of all groups. After the first unit has computed the prompt, two
    units load it and one computes it again. The control is the setting `own`, with which each unit keeps a copy."""
    units = [start(kind, **{"peers.store": store}) for _ in range(4)]
    units[0].run("first", PROMPT)
    pages = cached(units[0])
    for number, unit in enumerate(units[1:]):
        wait_for(lambda unit=unit: knows_pages(unit, pages))  # type: ignore[misc]
        if number == 1:
            assert unit.run("computes", PROMPT, **ALONE) == 0
        else:
            assert unit.run("loads", PROMPT) == HIT
        if store == "once":
            until(unit, lambda unit=unit: cached(unit) == 0)  # type: ignore[misc]
            assert counts(unit).left_out == pages
    wanted = sum(there(units[0]))
    assert sum(sum(there(unit)) for unit in units) == copies * wanted
    if store == "once":
        assert cached(*units) == pages
    for unit in units[1:]:
        unit.forget()
        assert unit.run("again", PROMPT) == HIT
        unit.check()


@pytest.mark.parametrize("group", [0, 1])
def test_only_the_copies_of_pages_that_the_keeper_evicts_are_promoted(start: Start, group: int) -> None:
    one, other = pair(start, "window", **ONCE)
    pages = cached(one)
    other.add("two", PROMPT)
    is_removed = False

    def remove_once_copied() -> None:
        nonlocal is_removed
        # The copies stay in host memory until the scheduler knows that the load is finished. So there is time to remove
        # a page.
        if not is_removed and there(other) == [12, 2]:
            remove_page(one, group, HIT)
            wait_for(lambda: knows_pages(other, pages - 1))
            is_removed = True

    until(other, lambda: is_removed and not other.busy, remove_once_copied)
    assert (counts(other).promoted, counts(other).lost) == (1, 0)
    assert there(other) == [int(number == group) for number in range(2)]
    other.check()
    wait_for(lambda: knows_pages(one, 1))
    one.forget()
    assert one.run("three", PROMPT) == HIT, "from the unit that has it now"
    one.check()


@pytest.mark.parametrize("group", [0, 1])
def test_pages_that_their_keeper_evicts_count_as_lost(start: Start, group: int) -> None:
    one, other = pair(start, "window", **ONCE)
    pages = cached(one)
    assert other.run("two", PROMPT, **ALONE) == 0
    assert cached(other) == 0
    remove_page(one, group, HIT)
    wait_for(lambda: knows_pages(other, pages - 1))
    assert counts(other).lost == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ignores_groups", [False, True])
def test_pages_of_all_groups_are_taken_over_when_their_keeper_ends(
    start: Start, kind: str, ignores_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a keeper ends, another unit takes over the pages of all its groups. In the control, this unit records every
    page that it leaves out as a page of the first group, so it cannot take over pages of other groups."""
    if ignores_groups:
        noted = PeerKeeper.leave_out

        def leave_out(keeper: PeerKeeper, group: int, keys: Keys) -> None:
            noted(keeper, group, keys)
            keeper._groups[:] = 0

        monkeypatch.setattr(PeerKeeper, "leave_out", leave_out)
    one, other = pair(start, kind, **ONCE)
    pages = there(one)
    assert other.run("two", PROMPT, **ALONE) == 0
    assert there(other) == [0] * len(pages)
    one.close()
    wait_for(lambda: peer_share(other).joined == 0)
    until(other, lambda: not peer_share(other).departed)
    taken = there(other)
    other.forget()
    hit = other.run("three", PROMPT)
    other.check()
    if ignores_groups:
        assert taken == [pages[0], *[0] * len(pages[1:])]
        assert hit == 0
    else:
        assert taken == pages
        assert hit == HIT
    found = counts(other)
    assert (found.lost > 0) == ignores_groups
    assert found.promoted + found.lost == found.left_out
