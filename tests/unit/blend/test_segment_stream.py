"""Segments are promised while they are still being read from disk. Each range of layers can be used as soon as it has
arrived. If a range is damaged or missing, its segment is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.blend.base import Hit
from flexkv.blend.cache import SegmentCache
from flexkv.blend.segment_load import LATE, SegmentLoad
from flexkv.blend.turned_rows import Stretch, TurnedRows
from flexkv.observe import PageLoss
from flexkv.transfer.layerwise.base import LostRows
from tests.unit.blend.loaded_world import ROTATION, SHAPE, planes_of
from tests.unit.blend.streamed_world import (
    FIRST,
    RANGES,
    SECOND,
    WITHIN_S,
    end,
    flip,
    open_cache,
    store_both,
    wait_for,
    with_hanging,
)

SEGMENTS = FIRST, SECOND
LAST = RANGES[-1]
WAIT_S = 0.4
AT_ONCE_S = 0.3
"""Seconds for which a control test waits for something that must not happen."""


@pytest.fixture
def pages(tmp_path: Path) -> dict[tuple[int, int], int]:
    return store_both(tmp_path)


@pytest.fixture
def make(tmp_path: Path, pages: object) -> Iterator[Callable[..., SegmentCache]]:
    made: list[SegmentCache] = []

    def make(**options: object) -> SegmentCache:
        made.append(open_cache(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        end(cache)


def begun(cache: SegmentCache) -> SegmentLoad:
    fetch, loads = cache.begin_fetch(SEGMENTS), list[SegmentLoad]()

    def has_begun() -> bool:
        loads[:] = [load] if (load := fetch.begin_load()) is not None else []
        return bool(loads)

    wait_for(has_begun)
    return loads[0]


def begun_in_reads(
    patch: pytest.MonkeyPatch, make: Callable[..., SegmentCache], page: int
) -> tuple[SegmentCache, SegmentLoad]:
    """Begins a load of both segments while the read of the page at offset `page` is in flight. This read hangs until
    the load has begun, so the test does not depend on the disk's speed.
    """
    cache, faults = with_hanging(patch, page, LAST, make)
    load = begun(cache)
    faults.release()
    assert [hit.tokens for hit in load.hits] == [len(tokens) for tokens in SEGMENTS]
    return cache, load


def rows_of(cache: SegmentCache, load: SegmentLoad, hit: Hit, layer: int) -> np.ndarray:
    found = np.empty((2, hit.tokens, SHAPE.heads, SHAPE.head_dim), np.float32)
    rows = TurnedRows(cache, ROTATION, load, [Stretch(hit, 0, hit.tokens, 0)])
    rows.sources(layer)[0].copy_to(found.view(SHAPE.carrier))
    return found


def stored(hit: Hit, layer: int) -> np.ndarray:
    return planes_of(SEGMENTS[hit.segment])[layer].swapaxes(1, 2)


def test_layers_can_be_used_while_the_last_range_is_being_read(
    make: Callable[..., SegmentCache], pages: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, faults = with_hanging(monkeypatch, pages[1, 2], LAST, make)
    load = begun(cache)
    assert [hit.streamed for hit in load.hits] == [True, True]
    wait_for(lambda: load.has_layers(LAST))
    assert faults.wait_stalled(1, WITHIN_S)
    for hit in load.hits:
        for layer in range(LAST):
            assert np.array_equal(rows_of(cache, load, hit, layer), stored(hit, layer))
    assert not load.has_layers(LAST + 1)
    assert load.moves
    assert load.drop_lost() == []
    faults.release()
    for hit in load.hits:
        for layer in range(LAST, SHAPE.layers):
            assert np.array_equal(rows_of(cache, load, hit, layer), stored(hit, layer))
    load.abandon()


def test_control_without_streaming_nothing_is_promised_before_the_last_range(
    make: Callable[..., SegmentCache], pages: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, faults = with_hanging(monkeypatch, pages[1, 2], 0, lambda: make(streams=False))
    fetch = cache.begin_fetch(SEGMENTS)
    assert faults.wait_stalled(1, WITHIN_S)
    ends_s = time.monotonic() + AT_ONCE_S
    while time.monotonic() < ends_s:
        assert fetch.begin_load() is None
    faults.release()
    fetch.give_up()


@pytest.mark.parametrize("layer", [0, 1, 2, 3, 5])
def test_a_flipped_bit_in_any_range_loses_its_segment_and_no_other(
    make: Callable[..., SegmentCache],
    pages: dict[tuple[int, int], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    flip(tmp_path, pages[1, 1], layer)
    cache, load = begun_in_reads(monkeypatch, make, pages[1, 2])
    first, second = load.hits
    its_range = max(each for each in RANGES if each <= layer)
    with pytest.raises(LostRows, match="did not verify"):
        rows_of(cache, load, second, layer)
    for good in range(its_range):
        try:
            found = rows_of(cache, load, second, good)
        except LostRows:
            continue  # the cache has already found the damage
        assert np.array_equal(found, stored(second, good))
    (lost,) = load.drop_lost(wait=True)
    assert (lost.hit, lost.why) == (second, PageLoss.SEGMENT_UNREADABLE)
    assert load.hits == [first]
    for good in range(SHAPE.layers):
        assert np.array_equal(rows_of(cache, load, first, good), stored(first, good))
    load.abandon()


@pytest.mark.parametrize("layer", RANGES)
def test_control_a_load_that_does_not_wait_for_its_layers_gives_other_rows(
    make: Callable[..., SegmentCache],
    pages: dict[tuple[int, int], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    flip(tmp_path, pages[1, 1], layer)
    cache, load = begun_in_reads(monkeypatch, make, pages[1, 2])
    second = load.hits[1]
    wait_for(lambda: not load.moves)
    monkeypatch.setattr(SegmentLoad, "wait_layer", lambda *given: None)
    assert not np.array_equal(rows_of(cache, load, second, layer), stored(second, layer))
    load.abandon()


@pytest.mark.parametrize("layer", RANGES)
def test_a_read_that_hangs_ends_at_the_deadline_as_a_miss(
    make: Callable[..., SegmentCache],
    pages: dict[tuple[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    cache, faults = with_hanging(monkeypatch, pages[1, 0], layer, lambda: make(wait_s=WAIT_S))
    begun_s = time.monotonic()
    load = begun(cache)
    second = load.hits[1]
    with pytest.raises(LostRows, match="did not come in time"):
        rows_of(cache, load, second, layer)
    (lost,) = load.drop_lost(wait=True)
    took_s = time.monotonic() - begun_s
    assert (lost.hit, lost.reason, lost.why) == (second, LATE, PageLoss.SEGMENT_LATE)
    assert WAIT_S <= took_s < WITHIN_S / 2
    assert [hit.segment for hit in load.hits] == [0]
    taken = cache.staging.rows.shape[1] - len(cache.staging.free)
    assert taken == 5, "what may still be written to stays taken"
    faults.release()
    load.abandon()
