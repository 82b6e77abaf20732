"""At which lengths a hybrid engine's requests can be resumed, and the pages of windows and chunks that it takes."""

from __future__ import annotations

import random

import pytest

from flexkv.adapters.vllm.boundaries import CHECKPOINT_WINDOWS, LEAST_CHECKPOINT_TOKENS, Boundaries, pages_at
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.cache.base import Rule

FULL = BlockGeometry(16, 16, 100, ("full",))


def window(pages: int, block: int = 16) -> BlockGeometry:
    return BlockGeometry(block, 16, 100, ("window",), rule=Rule.WINDOW, reach=pages, number=1)


def chunk(tokens: int) -> BlockGeometry:
    return BlockGeometry(16, 16, 100, ("chunk",), rule=Rule.CHUNK, reach=tokens, number=2)


def boundaries(*groups: BlockGeometry, checkpoint: int | None = None, alignment: int = 16) -> Boundaries:
    return Boundaries(PoolGeometry((FULL, *groups), alignment), checkpoint)


def test_a_hit_may_end_at_checkpoints_and_before_the_prompts_last_token() -> None:
    some = boundaries(window(4), checkpoint=64)
    assert list(some.between(0, 200, 200)) == [64, 128, 192]
    assert list(some.between(0, 210, 210)) == [64, 128, 192, 208]
    assert list(some.between(0, 208, 208)) == [64, 128, 192], "the last token is always computed"
    assert list(some.between(128, 400, 300)) == [192, 256, 288, 320, 384]
    assert list(some.between(0, 10, 10)) == []


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
    # The window of the prompt's end, at 208, begins at 144: the checkpoint at 192 shares pages with it.
    assert found == {64: True, 128: True, 192: False, 208: False, 256: True, 320: True, 384: True}
    with_chunks = boundaries(window(4), chunk(128), checkpoint=64)
    assert not with_chunks.is_spare(192, 200)
    assert with_chunks.is_spare(64, 200)


@pytest.mark.parametrize(
    ("group", "boundary", "pages"),
    [
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
