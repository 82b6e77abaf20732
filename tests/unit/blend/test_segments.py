"""Tests how prompts are split into segments, that the keys of segments do not depend on positions, and which rows
blending chooses to compute.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.blend.base import KvShape
from flexkv.blend.keys import SCOPE, SegmentKeyScheme
from flexkv.blend.keys import SHAPE as SHAPE_FIELD
from flexkv.blend.plan import BlendPlan, budget_of, rows_to_keep
from flexkv.blend.segments import split_at_separators
from flexkv.cache.base import GroupSpec
from flexkv.cache.keys import EngineKeyChain, TokenChain, namespace_digest
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.errors import ConfigError, TokenError
from flexkv.transfer.graph import OpResult, OpStatus

SHAPE = KvShape(layers=2, heads=2, head_dim=16, dtype="float16")
TOKENS = st.lists(st.integers(0, 4), max_size=60)


@settings(deadline=None)
@given(TOKENS, st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_segments_are_the_prompt(tokens: list[int], separator: list[int]) -> None:
    segments = split_at_separators(tokens, separator)
    assert [int(t) for s in segments for t in s.tokens] == tokens
    for segment in segments:
        text = segment.tokens.tolist()
        assert text
        if segment.reusable:
            windows = [text[i : i + len(separator)] for i in range(len(text))]
            assert separator not in windows
        else:
            assert text == separator


def test_a_prompt_of_separators_and_the_first_of_overlapping_ones() -> None:
    assert [s.reusable for s in split_at_separators([7, 7, 7], [7])] == [False] * 3
    found = split_at_separators([7, 7, 7], [7, 7])
    assert [(s.tokens.tolist(), s.reusable) for s in found] == [([7, 7], False), ([7], True)]
    assert split_at_separators([], [7]) == []
    with pytest.raises(ConfigError, match="separator"):
        split_at_separators([1], [])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.5], "float64: integers"),
        ([-1], "token 0 is -1"),
        ([2**32], f"token 0 is {2**32}"),
        ([[1]], r"shape \(1, 1\)"),
        (["a"], "<U1: integers"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens: list, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        split_at_separators(tokens, [1])


def test_keys_depend_on_the_segment_alone() -> None:
    scheme = SegmentKeyScheme({"model": "m"}, 4, SHAPE)
    text = np.arange(10)
    keys = scheme.keys(text)
    assert keys.whole.shape == (2, 16)
    assert keys.tail is not None
    assert (int(keys.tail.tokens[0]), keys.tail.base_block) == (2, 2)
    again = SegmentKeyScheme({"model": "m"}, 4, SHAPE).keys(text.copy())
    assert np.array_equal(again.whole, keys.whole)
    assert again.tail is not None
    assert np.array_equal(again.tail.keys, keys.tail.keys)
    # A block's key depends on all tokens before the block in its segment.
    shifted = scheme.keys(np.concatenate([[99, 99, 99, 99], text]))
    assert not {bytes(k) for k in shifted.whole} & {bytes(k) for k in keys.whole}
    others = [
        SegmentKeyScheme({"model": "n"}, 4, SHAPE),
        SegmentKeyScheme({"model": "m", "salt": "s"}, 4, SHAPE),
    ]
    kinds = [KvShape(2, 2, 16, "bfloat16"), KvShape(2, 4, 8, "float16"), KvShape(4, 2, 8, "float16")]
    others += [SegmentKeyScheme({"model": "m"}, 4, kind) for kind in kinds]
    for other in others:
        assert not {bytes(k) for k in other.keys(text).whole} & {bytes(k) for k in keys.whole}
    short = scheme.keys(np.array([1, 2]))
    assert short.whole.shape == (0, 16)
    assert short.tail is not None


def test_segments_and_prefixes_live_in_one_index() -> None:
    """A segment and a prefix with the same tokens have different keys, so neither finds the other's pages."""
    fields = {"model": "m", SHAPE_FIELD: str(SHAPE)}
    text = np.arange(16)
    chain = TokenChain(4)
    chain.extend(text)
    prefix = EngineKeyChain(namespace_digest(fields), 0)
    prefix.extend(chain.digests)
    segment = SegmentKeyScheme(fields, 4, SHAPE).keys(text).whole
    manager = LocalCacheManager([GroupSpec(4, 16)], tiers=unit_tiers())
    manager.grow(0, 16)

    def store(request: str, keys: np.ndarray) -> None:
        plan = manager.begin_store(request, 0, keys, np.arange(4, dtype=np.int32), 0)
        assert plan.graph is not None
        nothing = np.empty(0, np.int32)
        manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, nothing))
        manager.release(request)

    store("a", prefix.keys)
    assert manager.match("b", [segment], 0).blocks == 0
    store("c", segment)
    assert manager.match("d", [segment], 0).blocks == manager.match("e", [prefix.keys], 0).blocks == 4
    assert SCOPE not in fields


def test_rows_that_differ_most_are_kept() -> None:
    difference = np.array([5.0, 1.0, np.nan, 7.0, 7.0, 0.0])
    reused = np.array([True, True, True, True, True, False])
    assert rows_to_keep(difference, reused, 0).tolist() == [5]
    assert rows_to_keep(difference, reused, 1).tolist() == [2, 5]
    assert rows_to_keep(difference, reused, 2).tolist() == [2, 3, 5]
    assert rows_to_keep(difference, reused, 9).tolist() == [0, 1, 2, 3, 4, 5]
    assert [budget_of(r, 10) for r in (0.0, 0.01, 0.15, 1.0)] == [0, 1, 2, 10]
    assert budget_of(0.5, 0) == 0


def test_runs_of_neighbours_that_differ_most_on_average_are_kept() -> None:
    # There are two ranges of reused rows. Rows 0 to 4 form the runs 0-1, 2-3 and 4. Rows 6 to 9 form the runs 6-7 and
    # 8-9.
    difference = np.array([9.0, 0.0, 4.0, 4.0, 4.5, 99.0, 1.0, 1.0, np.nan, 0.0])
    reused = np.ones(10, np.bool_)
    reused[5] = False
    kept = [[], [8, 9], [8, 9], [0, 1, 8, 9], [0, 1, 8, 9], [0, 1, 4, 8, 9], [0, 1, 2, 3, 4, 8, 9]]
    for budget, rows in enumerate(kept):
        assert rows_to_keep(difference, reused, budget, 2).tolist() == sorted([*rows, 5]), budget
    assert rows_to_keep(difference, reused, 9, 2).tolist() == list(range(10))
    assert rows_to_keep(difference, reused, 1, 16).tolist() == [5, 6, 7, 8, 9], "no run crosses a gap"
    assert rows_to_keep(difference, np.zeros(10, np.bool_), 3, 2).tolist() == list(range(10))


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_one_are_the_rows_that_differ_most(seed: int) -> None:
    random = np.random.default_rng(seed)
    difference, reused = random.integers(0, 5, 60).astype(np.float64), random.random(60) < 0.7
    for budget in range(int(reused.sum()) + 1):
        chosen = sorted(np.flatnonzero(reused), key=lambda row: (-difference[row], row))[:budget]
        wanted = np.union1d(np.flatnonzero(~reused), chosen)
        assert rows_to_keep(difference, reused, budget).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("layers", "ratios", "message"),
    [
        ((), (), "at least one"),
        ((0,), (0.5,), "from 1 on"),
        ((2, 1), (0.5, 0.5), "ascending"),
        ((1,), (1.5,), "allowed are 0 to 1"),
        ((1, 2), (0.1, 0.2), "a later layer may not compute more"),
        ((1, 2), (0.1,), "as many of each"),
    ],
)
def test_a_plan_that_cannot_be(layers: tuple, ratios: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendPlan(layers, ratios)
