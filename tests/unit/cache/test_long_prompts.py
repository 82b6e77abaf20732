"""If the pages of a prompt do not all fit in host memory at once, the request gets the longest hit that fits. flexkv
reads nothing that no hit can use. The tests have groups that need different pages.
"""

from __future__ import annotations

import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits, MatchResult, Outcome
from flexkv.cache.promise.lookup import MAX_TOKENS, Lookup, tokens_in_host
from flexkv.facts.keys import Keys, Rule
from flexkv.observe import MissReason
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, chain

BLOCKS = 20
SLOTS = 8
WINDOW = 2
GROUPS = {
    "own slots": (GroupSpec(BLOCK_TOKENS, SLOTS), GroupSpec(BLOCK_TOKENS, SLOTS, Rule.WINDOW, WINDOW)),
    "shared slots": (
        GroupSpec(BLOCK_TOKENS, SLOTS + WINDOW),
        GroupSpec(BLOCK_TOKENS, SLOTS + WINDOW, Rule.WINDOW, WINDOW, shares=0),
    ),
}


def on_disk(
    groups: tuple[GroupSpec, ...], asks_again: bool, blocks: int = BLOCKS
) -> tuple[DiskWorld, list[Keys]]:
    """Returns a world with the first `blocks` blocks of a prompt on disk only. Host memory can hold SLOTS blocks."""
    world = DiskWorld(places=64, groups=groups, manager_limits=ManagerLimits(asks_again=asks_again))
    keys = [chain(BLOCKS), chain(BLOCKS, seed=1)]
    for group in range(2):
        for first in range(0, blocks, SLOTS):
            world.store(
                keys[group][first : min(first + SLOTS, blocks)], f"w{group}", first=first, group=group
            )
            world.run()
        world.manager.end_request(f"w{group}")
        world.drop_host()
    return world, keys


def ask_until_answered(world: DiskWorld, keys: list[Keys]) -> tuple[MatchResult, int]:
    """Looks a request up, as an engine does in each step. Returns the final result and the number of pages read for
    it.
    """
    read = 0
    for _ in range(8):
        result = world.manager.match("r", keys, 0)
        for op in world.take():
            read += op.pages
            world.end(op)
        if result.outcome not in (Outcome.ASK_AGAIN, Outcome.COMING):
            return result, read
    raise AssertionError("no answer after eight steps")


@pytest.mark.parametrize("asks_again", [True, False])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_as_much_as_fits_is_fetched_and_the_rest_is_counted(
    groups: tuple[GroupSpec, ...], asks_again: bool
) -> None:
    world, keys = on_disk(groups, asks_again)
    result, read = ask_until_answered(world, keys)
    assert (result.outcome, result.tokens) == (Outcome.HIT, SLOTS * BLOCK_TOKENS)
    assert result.miss is MissReason.NO_ROOM
    assert read == SLOTS + WINDOW, "the blocks of the full group, and the window at the end of the hit"
    world.manager.check_integrity()


def test_a_block_that_no_tier_has_is_absent_however_long_the_prompt() -> None:
    world, keys = on_disk(GROUPS["own slots"], asks_again=True, blocks=SLOTS - 2)
    result, _ = ask_until_answered(world, keys)
    assert (result.tokens, result.miss) == ((SLOTS - 2) * BLOCK_TOKENS, MissReason.ABSENT)


def test_control_a_lookup_without_the_limit_finds_no_hit_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "_fitting", lambda lookup, ask: ask)
    world, keys = on_disk(GROUPS["own slots"], asks_again=True)
    result, read = ask_until_answered(world, keys)
    assert (result.outcome, result.tokens) == (Outcome.MISS, 0)
    assert read == 0, "pages that are of use only together are not fetched in part"


@pytest.mark.parametrize(
    ("specs", "tokens"),
    [
        ([GroupSpec(4, 10), GroupSpec(4, 10, Rule.WINDOW, 2, shares=0)], 32),
        ([GroupSpec(4, 10), GroupSpec(4, 3, Rule.WINDOW, 2)], 40),
        ([GroupSpec(4, 12), GroupSpec(8, 12, shares=0)], 32),
        ([GroupSpec(4, 12), GroupSpec(4, 12, Rule.CHUNK, 10, shares=0)], 36),
        ([GroupSpec(4, 12), GroupSpec(16, 12, Rule.STATE, shares=0)], 44),
        ([GroupSpec(4, 12, Rule.WINDOW, 2)], MAX_TOKENS),
        ([GroupSpec(4, 1), GroupSpec(4, 1, Rule.WINDOW, 2, shares=0)], 0),
    ],
)
def test_the_longest_hit_counts_what_each_group_needs(specs: list[GroupSpec], tokens: int) -> None:
    assert tokens_in_host(specs) == tokens
