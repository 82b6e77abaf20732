"""Segments of random rows that tests load into a staging pool, and a reference rotation in float64."""

from __future__ import annotations

import time

import numpy as np

from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import Stretch

SHAPE = KvShape(layers=6, heads=2, head_dim=8, dtype="float32")
ROTATION = KeyRotation(RopeSpec(8, 8, 100.0), SHAPE.heads, SHAPE.dtype)
TOKENS = (np.arange(20), np.arange(100, 111), np.arange(200, 233))


Rows = tuple[np.ndarray, np.ndarray]


def make_cache() -> SegmentCache:
    return SegmentCache(SHAPE, {"model": "m"}, slots=32, staging_tokens=96, block_tokens=4)


def planes_of(tokens: np.ndarray) -> np.ndarray:
    """Returns a segment's random keys and values, float32 [layers, 2, heads, tokens, head_dim]. Their seed is the
    segment's first token."""
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
    """Returns the keys [rows, heads, head_dim], rotated by `distance` positions in float64."""
    angles = distance * 100.0 ** -(np.arange(0, 8, 2) / 8)
    low, high = keys[..., :4].astype(np.float64), keys[..., 4:].astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def stretches_of(load: SegmentLoad) -> list[Stretch]:
    """Returns two ranges of rows that begin or end inside pages. Their positions in the prompt are far apart."""
    third, first = load.hits[2], load.hits[0]
    return [Stretch(first, 0, 20, 40), Stretch(third, 5, 20, 300)]


def wanted(layer: int) -> Rows:
    of_first, of_third = planes_of(TOKENS[0])[layer], planes_of(TOKENS[2])[layer]
    keys = [turned(of_first[0].swapaxes(0, 1), 40), turned(of_third[0, :, 5:25].swapaxes(0, 1), 295)]
    return np.concatenate(keys), np.concatenate([of_first[1], of_third[1, :, 5:25]], axis=1).swapaxes(0, 1)
