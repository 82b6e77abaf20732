"""Segments that are loaded for an engine: held until they are released, turned row by row, lost one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import Stretch, TurnedRows

SHAPE = KvShape(layers=3, heads=2, head_dim=8, dtype="float32")
ROTATION = KeyRotation(RopeSpec(8, 8, 100.0), SHAPE.heads, SHAPE.dtype)
TOKENS = (np.arange(20), np.arange(100, 111), np.arange(200, 233))


@pytest.fixture
def cache() -> Iterator[SegmentCache]:
    made = SegmentCache(SHAPE, {"model": "m"}, slots=32, staging_tokens=96, block_tokens=4)
    yield made
    made.close()


def planes_of(tokens: np.ndarray) -> np.ndarray:
    """Random keys and values of a segment, [layers, 2, heads, tokens, head_dim]."""
    room = (SHAPE.layers, 2, SHAPE.heads, len(tokens), SHAPE.head_dim)
    return np.random.default_rng(int(tokens[0])).standard_normal(room).astype(np.float32)


def store_all(cache: SegmentCache) -> None:
    for tokens in TOKENS:
        planes = planes_of(tokens)
        cache.store(tokens, lambda layer, of=planes: (of[layer, 0], of[layer, 1]), ROTATION)  # type: ignore[misc]


def load_all(cache: SegmentCache) -> SegmentLoad:
    load = cache.begin_load(TOKENS)
    ends_s = time.monotonic() + 20.0
    while load.moves:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    load.drop_lost()
    return load


def turned(keys: np.ndarray, distance: int) -> np.ndarray:
    """Keys [rows, heads, head_dim] turned by so many positions, in float64."""
    angles = distance * 100.0 ** -(np.arange(0, 8, 2) / 8)
    low, high = keys[..., :4].astype(np.float64), keys[..., 4:].astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def test_rows_are_turned_to_their_positions(cache: SegmentCache) -> None:
    store_all(cache)
    load = load_all(cache)
    third, first = load.hits[2], load.hits[0]
    rows = TurnedRows.of(cache, ROTATION, [Stretch(third, 5, 20, 300), Stretch(first, 0, 20, 40)])
    for layer in range(SHAPE.layers):
        keys, values = (plane.view(np.float32) for plane in rows.layer(layer))
        of_third, of_first = planes_of(TOKENS[2])[layer], planes_of(TOKENS[0])[layer]
        wanted = np.concatenate(
            [turned(of_third[0, :, 5:25].swapaxes(0, 1), 295), turned(of_first[0].swapaxes(0, 1), 40)]
        )
        assert np.abs(keys - wanted).max() < 1e-5
        assert np.array_equal(
            values, np.concatenate([of_third[1, :, 5:25], of_first[1]], axis=1).swapaxes(0, 1)
        )
        some = np.array([1, 19, 20, 33])
        few = [plane.view(np.float32) for plane in rows.only(some).layer(layer)]
        assert np.array_equal(few[0], keys[some])
        assert np.array_equal(few[1], values[some])
    assert rows.only(np.empty(0, np.int64)).layer(0)[0].shape == (0, 2, 8)
    load.close()


def test_a_damaged_page_loses_its_segment_alone(cache: SegmentCache) -> None:
    store_all(cache)
    free = len(cache.staging.free)
    cache.pool.slot(0)[3] ^= 1
    load = load_all(cache)
    cache.pool.slot(0)[3] ^= 1
    assert len(load.lost) == 1
    assert len(load.hits) == len(TOKENS) - 1
    (lost,) = load.lost
    assert lost not in [hit.segment for hit in load.hits]
    load.abandon()
    load.abandon()
    assert len(cache.staging.free) == free
    cache.manager.check_integrity()


def test_an_abandoned_load_gives_its_blocks_back_when_it_has_ended(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(cache)
    free = len(cache.staging.free)
    load = cache.begin_load(TOKENS)
    with monkeypatch.context() as late:
        late.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        assert load.moves
        load.abandon()
        assert len(cache.staging.free) < free
    ends_s = time.monotonic() + 20.0
    while len(cache.staging.free) < free:
        assert time.monotonic() < ends_s
        cache.begin_load([None]).close()
        time.sleep(0.001)


def test_callers_share_no_segment(cache: SegmentCache) -> None:
    planes = planes_of(TOKENS[0])

    def layers(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return planes[layer, 0], planes[layer, 1]

    cache.store(TOKENS[0], layers, ROTATION, caller="a")
    assert [len(cache.begin_load(TOKENS[:1], caller).hits) for caller in ("a", "b", "")] == [1, 0, 0]
    assert cache.scheme.keys(TOKENS[0], "a").whole.tolist() != cache.scheme.keys(TOKENS[0]).whole.tolist()


def test_what_is_forgotten_is_a_miss(cache: SegmentCache) -> None:
    store_all(cache)
    assert cache.cached_tokens(TOKENS[0]) == len(TOKENS[0])
    cache.forget()
    assert cache.cached_tokens(TOKENS[0]) == 0
    assert load_all(cache).hits == []
