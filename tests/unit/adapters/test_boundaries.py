"""Shows at which lengths requests of a hybrid engine can be resumed, and which pages of windows, chunks and states are
stored for this purpose.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.c_ext import BlockIndex, BoundaryLookup, GroupRule, TierLookup
from flexkv.cache.stores.boundaries import CHECKPOINT_WINDOWS, LEAST_CHECKPOINT_TOKENS, Boundaries, pages_at
from flexkv.facts.keys import Rule

FULL = BlockGeometry(16, 16, 100, ("full",))


def window(pages: int, block: int = 16) -> BlockGeometry:
    return BlockGeometry(block, 16, 100, ("window",), rule=Rule.WINDOW, reach=pages, number=1)


def chunk(tokens: int) -> BlockGeometry:
    return BlockGeometry(16, 16, 100, ("chunk",), rule=Rule.CHUNK, reach=tokens, number=2)


def state(number: int, handed_over: bool = False) -> BlockGeometry:
    return BlockGeometry(
        16, 16, 100, ("state",), rule=Rule.STATE, number=number, states="(8,)", states_handed_over=handed_over
    )


def boundaries(*groups: BlockGeometry, checkpoint: int | None = None, alignment: int = 16) -> Boundaries:
    handed_over = PoolGeometry((FULL, *groups), alignment).states_handed_over
    return Boundaries((FULL, *groups), alignment, checkpoint, handed_over)


def test_a_hit_may_end_at_checkpoints_and_before_the_prompts_last_token() -> None:
    some = boundaries(window(4), checkpoint=64)
    assert list(some.between(0, 200, 200)) == [64, 128, 192]
    assert list(some.between(0, 210, 210)) == [64, 128, 192, 208]
    assert list(some.between(0, 208, 208)) == [64, 128, 192], "the last token is always computed"
    assert list(some.between(128, 400, 300)) == [192, 256, 288, 320, 384]
    assert list(some.between(0, 10, 10)) == []


def test_a_hit_may_end_where_prompts_have_parted_before() -> None:
    some = boundaries(window(4), checkpoint=64)
    assert list(some.between(0, 200, 200, shared_tokens=100)) == [64, 96, 128, 192]
    assert list(some.between(0, 80, 200, shared_tokens=100)) == [64], "that comes with a later step"
    assert list(some.between(96, 200, 200, shared_tokens=100)) == [128, 192]
    assert list(some.between(0, 200, 200, shared_tokens=200)) == [64, 128, 192]
    found = {b: some.is_spare(b, 200, shared_tokens=100) for b in some.between(0, 200, 200, 100)}
    assert found == {64: True, 96: False, 128: True, 192: False}


def test_every_boundary_comes_once_however_the_steps_are_cut() -> None:
    rng = random.Random(7)
    for _ in range(200):
        some = boundaries(window(4), checkpoint=rng.choice((16, 48, 64, 400)))
        prompt = rng.randint(1, 900)
        end = prompt + rng.randint(0, 300)
        cuts = sorted(rng.sample(range(end + 1), min(end, 5)))
        stepwise = [
            b
            for first, last in zip([0, *cuts], [*cuts, end], strict=True)
            for b in some.between(first, last, prompt)
        ]
        assert stepwise == list(some.between(0, end, prompt))
        expected = {b for b in range(1, end + 1) if b % some.checkpoint_tokens == 0}
        expected |= {(prompt - 1) // 16 * 16} - {0}
        assert stepwise == sorted(expected)


def test_checkpoints_are_windows_apart_and_aligned() -> None:
    assert boundaries(window(4)).checkpoint_tokens == LEAST_CHECKPOINT_TOKENS
    assert boundaries(window(100)).checkpoint_tokens == CHECKPOINT_WINDOWS * 100 * 16
    assert boundaries(window(4), checkpoint=100, alignment=48).checkpoint_tokens == 144
    assert boundaries().groups == {}


def test_only_what_nobody_but_a_sibling_hits_is_spare() -> None:
    some = boundaries(window(4), checkpoint=64)
    prompt = 210
    found = {b: some.is_spare(b, prompt) for b in some.between(0, 400, prompt)}
    # The window at the prompt's end covers tokens 144 to 208, so the checkpoint at 192 shares pages with it.
    assert found == {64: True, 128: True, 192: False, 208: False, 256: True, 320: True, 384: True}
    with_chunks = boundaries(window(4), chunk(128), checkpoint=64)
    assert not with_chunks.is_spare(192, 200)
    assert with_chunks.is_spare(64, 200)


def test_states_are_stored_where_a_hit_is_likely_to_end() -> None:
    some = boundaries(state(1), checkpoint=64)
    stored, after = [], 0
    for end in range(16, 400, 16):
        if some.wants_states(end, after, prompt_tokens=210, shared_tokens=96):
            stored.append(after := end)
    # States are stored at the checkpoint 64, at the end 96 of the shared prefix, at the checkpoint 160, at the prompt's
    # end 208, and after each later block of output.
    assert stored == [64, 96, 160, *range(208, 400, 16)]
    assert not some.wants_states(208, 208, 210, 0), "stored before"


def test_states_of_an_answer_are_not_spare() -> None:
    some = boundaries(state(1), checkpoint=64)
    assert [b for b in (64, 128, 208, 224, 384) if some.is_spare(b, 210)] == [64, 128]


def test_states_are_taken_where_the_engine_hands_all_of_them_over() -> None:
    some = boundaries(state(1, handed_over=True), state(2, handed_over=True), alignment=32)
    assert some.has_states
    assert some.handed_over
    offers = [(2, 9, 64), (1, 7, 32), (1, 8, 64), (2, 5, 48), (1, 6, 48), (0, 4, 32)]
    # No hit can end at 32, because group 2 offers no state there. No hit may end at 48. Group 0 has no states.
    assert some.among(offers) == [(64, {1: 8, 2: 9})]
    assert some.among([]) == []
    assert not boundaries(window(4)).has_states
    assert not boundaries(state(1)).handed_over


@pytest.mark.parametrize(
    ("group", "boundary", "pages"),
    [
        (state(1), 160, (9, 10)),
        (state(1), 0, (0, 0)),
        (window(4), 160, (6, 10)),
        (window(4), 32, (0, 2)),
        (window(2, block=32), 160, (3, 5)),
        (chunk(64), 160, (8, 10)),
        (chunk(64), 128, (8, 8)),
        (chunk(100), 160, (6, 10)),
    ],
)
def test_pages_that_a_hit_needs(group: BlockGeometry, boundary: int, pages: tuple[int, int]) -> None:
    assert pages_at(group, boundary) == pages


def hit_tokens(group: BlockGeometry, pages: list[int], tokens: int) -> list[int]:
    """Returns the lengths of the hits, up to `tokens`, that a lookup finds if host memory holds only these pages of the
    group.
    """
    blocks = tokens // group.block_tokens
    keys = np.random.default_rng(1).integers(0, 256, (blocks, 16), np.uint8)
    index = BlockIndex([blocks + 1])
    index.grow(0, blocks + 1)
    entries = index.insert(0, keys[pages], blocks)[1]
    index.finish(entries, np.ones(len(entries), np.uint8))
    rule = GroupRule(group.rule.value, group.block_tokens, group.reach)
    lookup = BoundaryLookup(TierLookup([index], 1), [rule], group.block_tokens)
    found = lookup.look([keys], 0, blocks, 1, 0)
    lengths = list(found.lengths)
    lookup.release(found)
    return lengths


@pytest.mark.parametrize(
    "group",
    [state(1), *map(window, (1, 2, 3, 7)), window(2, block=32), *map(chunk, (16, 40, 64, 100, 1000))],
    ids=str,
)
def test_a_lookup_needs_the_pages_that_are_stored_and_no_fewer(group: BlockGeometry) -> None:
    """A lookup needs exactly the pages that are stored for its length. The rule is implemented twice, for lookups in
    `csrc/index/group_rule.h` and for stores in `pages_at`, and both must agree.
    """
    for boundary in range(group.block_tokens, 320 + 1, group.block_tokens):
        pages = list(range(*pages_at(group, boundary)))
        assert hit_tokens(group, pages, boundary) == [boundary]
        for missing in pages:
            others = [page for page in pages if page != missing]
            assert boundary not in hit_tokens(group, others, boundary), f"page {missing} is of no use"
