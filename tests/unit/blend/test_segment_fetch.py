"""A fetch reads segments from disk without making the caller wait. Shows which segments arrive, and why others do
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_fetch import SegmentFetch
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.blend.turned_rows import Stretch, TurnedRows
from flexkv.cache.base import Outcome
from flexkv.config import DiskConfig
from flexkv.observe import PageLoss
from flexkv.storage.header import read_header
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.weights import check
from flexkv.weights.files import NAMED, WeightsContent
from tests import testing_ext
from tests.unit.cache.disk_world import disk_tier

SHAPE = KvShape(layers=3, heads=2, head_dim=8, dtype="float32")
ROTATION = KeyRotation(RopeSpec(8, 8, 100.0), SHAPE.heads, SHAPE.dtype)
SEGMENTS = (np.arange(20), np.arange(100, 111), np.arange(200, 203))
"""Tokens of three segments. They have 5, 3 and 1 pages of up to 4 tokens; the last page of the second and of the third
one is a partial tail."""
PAGES = 9
WITHIN_S = 30.0
HANG = 3


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SegmentCache]]:
    """Returns a function that opens a cache on this test's folder, after closing the previous one."""
    caches: list[SegmentCache] = []

    def open_again(
        slots: int = 32, wait_s: float = WITHIN_S, weights: WeightsContent = NAMED
    ) -> SegmentCache:
        if caches:
            end(caches.pop())
        disk = DiskConfig(folders=str(tmp_path / "disk"), bytes_per_folder=8 << 20, wait_s=wait_s)
        made = SegmentCache(
            SHAPE,
            {"model": "m"},
            slots=slots,
            staging_tokens=96,
            block_tokens=4,
            deadline_s=20.0,
            folders=SegmentFolders(disk, weights=weights, streams=False, asks_again=True, close_s=5.0),
        )
        caches.append(made)
        return made

    yield open_again
    for cache in caches:
        end(cache)


def end(cache: SegmentCache) -> None:
    """Waits until no read or write is in flight. Asserts that no staging block or op is left, and closes the cache."""
    settle(cache, lambda: not cache.manager.work.moving)
    cache.manager.check_integrity()
    assert cache.manager.inflight_ops() == 0
    assert len(cache.staging.free) == cache.staging.rows.shape[1]
    requests = cache.manager.tables.requests
    assert not requests.reserved_pages
    assert not requests.waits
    assert not len(cache.manager.promises.line)
    cache.close()


def wait_for(done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def settle(cache: SegmentCache, done: Callable[[], bool]) -> None:
    def polled() -> bool:
        cache.poll()
        return done()

    wait_for(polled)


def planes_of(tokens: np.ndarray) -> np.ndarray:
    """Returns a segment's random keys and values, float32 [layers, 2, heads, tokens, head_dim]. Their seed is the
    segment's first token."""
    room = (SHAPE.layers, 2, SHAPE.heads, len(tokens), SHAPE.head_dim)
    return np.random.default_rng(int(tokens[0])).standard_normal(room).astype(np.float32)


def store_all(cache: SegmentCache, segments: Sequence[np.ndarray] = SEGMENTS) -> None:
    for tokens in segments:
        planes = planes_of(tokens)
        stored = cache.store(tokens, lambda layer, of=planes: (of[layer, 0], of[layer, 1]), ROTATION)  # type: ignore[misc]
        assert stored == len(tokens)


def fetched(fetch: SegmentFetch) -> SegmentLoad:
    """Waits until the fetch's load can begin, and until all its bytes have been copied. Returns the load."""
    loads: list[SegmentLoad] = []

    def begun() -> bool:
        if (load := fetch.begin_load()) is not None:
            loads.append(load)
        return bool(loads)

    wait_for(begun)
    wait_for(lambda: not loads[0].moves)
    loads[0].drop_lost()
    return loads[0]


def tokens_of(load: SegmentLoad) -> dict[int, int]:
    return {hit.segment: hit.tokens for hit in load.hits}


def check_rows(cache: SegmentCache, load: SegmentLoad) -> None:
    """Asserts that every loaded row has the bits with which it was stored."""
    for hit in load.hits:
        rows = TurnedRows(cache, ROTATION, load, [Stretch(hit, 0, hit.tokens, 0)])
        for layer in range(SHAPE.layers):
            wanted = planes_of(SEGMENTS[hit.segment])[layer, :, :, : hit.tokens].swapaxes(1, 2)
            found = np.empty(wanted.shape, SHAPE.carrier)
            rows.sources(layer)[0].copy_to(found)
            assert np.array_equal(found.view(np.float32), wanted)


def test_segments_come_from_disk_and_no_call_waits(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(opened())
    cache, faults = with_hanging_reads(opened, monkeypatch)
    begun_s = time.monotonic()
    fetch = cache.begin_fetch(SEGMENTS)
    assert faults.wait_stalled(1, WITHIN_S)
    calls = 50
    assert all(fetch.begin_load() is None for _ in range(calls))
    assert time.monotonic() - begun_s < WITHIN_S / 3, "the reads hang; the calls do not"
    faults.release()
    load = fetched(fetch)
    assert tokens_of(load) == {0: 20, 1: 11, 2: 3}
    assert not fetch.missed
    assert disk_tier(cache.manager).counts.read == PAGES
    check_rows(cache, load)
    load.abandon()


def test_what_host_memory_has_is_loaded_at_once(opened: Callable[..., SegmentCache]) -> None:
    cache = opened()
    store_all(cache, SEGMENTS[:2])
    fetch = cache.begin_fetch(SEGMENTS)
    load = fetch.begin_load()
    assert load is not None
    wait_for(lambda: not load.moves)
    assert tokens_of(load) == {0: 20, 1: 11}
    assert fetch.missed == {PageLoss.SEGMENT_ABSENT: 1}
    check_rows(cache, load)
    load.abandon()


def with_hanging_reads(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch, **more: float
) -> tuple[SegmentCache, testing_ext.IoFaults]:
    """Opens a cache on whose disk every read hangs. Returns the cache, and the faults, whose `release` ends the
    hang."""
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(HANG, write=False)])
    with monkeypatch.context() as patch:
        patch.setattr(StripedSlabs, "open", partial(StripedSlabs.open, wrapper=faults))
        return opened(**more), faults


def test_pages_of_a_disk_that_hangs_are_late(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a hanging disk does not deliver within `wait_s` count as late. The test stores the first segment again
    before the fetch, so that segment may be loaded from host memory.
    """
    store_all(opened())
    cache, faults = with_hanging_reads(opened, monkeypatch, wait_s=0.2)
    store_all(cache, SEGMENTS[:1])
    fetch = cache.begin_fetch(SEGMENTS)
    load = fetched(fetch)
    held = tokens_of(load)
    faults.release()
    assert 1 not in held
    assert 2 not in held
    assert fetch.missed[PageLoss.SEGMENT_LATE] >= 4
    assert set(fetch.missed) == {PageLoss.SEGMENT_LATE}
    check_rows(cache, load)
    load.abandon()


def flip(folder: Path) -> None:
    """Flips a bit in every slot of every slab in the folder."""
    for slab in folder.rglob("*.slab"):
        header = read_header(str(slab))
        with slab.open("r+b") as file:
            for image in range(header.header_bytes, slab.stat().st_size, header.slot_bytes):
                file.seek(image + 40)
                byte = file.read(1)
                file.seek(image + 40)
                file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("damaged", [True, False])
def test_damaged_pages_are_not_loaded(
    opened: Callable[..., SegmentCache], tmp_path: Path, damaged: bool
) -> None:
    """Pages whose slots on disk are damaged are not loaded. The control is a folder without damage, from which all
    segments are loaded.
    """
    store_all(opened())
    cache = opened()
    if damaged:
        flip(tmp_path)
    fetch = cache.begin_fetch(SEGMENTS)
    load = fetched(fetch)
    assert tokens_of(load) == ({} if damaged else {0: 20, 1: 11, 2: 3})
    assert fetch.missed == ({PageLoss.SEGMENT_UNREADABLE: PAGES} if damaged else {})
    load.abandon()


def test_control_a_flipped_bit_in_a_loaded_row_is_seen(opened: Callable[..., SegmentCache]) -> None:
    cache = opened()
    store_all(cache)
    load = fetched(cache.begin_fetch(SEGMENTS))
    cache.staging.rows[0, load.hits[0].blocks[0]].flat[3] ^= 4
    with pytest.raises(AssertionError):
        check_rows(cache, load)
    load.abandon()


def test_a_fetch_that_is_given_up_holds_nothing(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(opened())
    cache, faults = with_hanging_reads(opened, monkeypatch)
    fetch = cache.begin_fetch(SEGMENTS)
    assert fetch.begin_load() is None
    fetch.give_up()
    fetch.give_up()
    faults.release()
    # The reads of the abandoned fetch continue, and the next fetch uses their pages.
    load = fetched(cache.begin_fetch(SEGMENTS))
    assert tokens_of(load) == {0: 20, 1: 11, 2: 3}
    load.abandon()


def test_a_prompt_that_host_memory_does_not_hold_does_not_wait_for_room(
    opened: Callable[..., SegmentCache],
) -> None:
    """If a prompt's segments do not fit in host memory, its fetch does not wait for slots. The request's first segments
    occupy all slots, and these are freed only after the load.
    """
    store_all(opened())
    cache = opened(slots=6)
    begun_s = time.monotonic()
    fetch = cache.begin_fetch(SEGMENTS)
    load = fetched(fetch)
    assert time.monotonic() - begun_s < WITHIN_S / 2
    assert tokens_of(load)[0] == 20
    assert fetch.missed == {PageLoss.SEGMENT_NO_ROOM: PAGES - sum(len(hit.blocks) for hit in load.hits)}
    check_rows(cache, load)
    load.abandon()


@pytest.mark.parametrize("ends", [True, False])
def test_a_prompt_waits_for_room_that_another_one_holds(
    opened: Callable[..., SegmentCache], ends: bool
) -> None:
    store_all(opened())
    cache = opened(slots=6, wait_s=WITHIN_S if ends else 0.3)
    first = cache.begin_fetch(SEGMENTS[:1])

    def has_come() -> bool:
        # This call only looks the segment up. A load would free the slots that `first` must hold.
        (asked,) = first._asked
        return first._lookup.fetch(asked) is Outcome.HIT

    settle(cache, has_come)
    second = cache.begin_fetch(SEGMENTS[1:2])
    if ends:
        assert second.begin_load() is None
        first.give_up()
    load = fetched(second)
    if ends:
        assert tokens_of(load) == {0: 11}
        assert not second.missed
    else:
        assert tokens_of(load) == {}
        assert second.missed == {PageLoss.SEGMENT_NO_ROOM: 3}
    load.abandon()
    first.give_up()


def test_pages_count_only_under_the_name_of_their_weights(
    opened: Callable[..., SegmentCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are used only if the name of the complete weights matches. The namespace depends only on samples of the
    weights' files, which do not show every change.
    """
    # The check does not accept a file that was changed after the process started, because the engine may have loaded
    # the old file. So the process must seem to start later.
    monkeypatch.setattr(check, "process_start_ns", lambda: time.time_ns() + 10**12)
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    weights = WeightsContent((str(file.parent),))
    unnamed = WeightsContent(unnamed="nothing names them")

    def missed(weights: WeightsContent) -> dict[PageLoss, int]:
        cache = opened(weights=weights)
        settle(cache, lambda: cache.unit.live.gate._is_settled)
        fetch = cache.begin_fetch(SEGMENTS)
        load = fetched(fetch)
        load.abandon()
        return dict(fetch.missed)

    file.write_bytes(b"one")
    store_all(opened(weights=weights))
    assert missed(weights) == {}
    assert missed(unnamed) == {PageLoss.SEGMENT_ABSENT: PAGES}
    assert missed(weights) == {}
    file.write_bytes(b"two")
    assert missed(weights) == {PageLoss.SEGMENT_ABSENT: PAGES}


def test_callers_share_no_segment_on_disk(opened: Callable[..., SegmentCache]) -> None:
    store_all(opened())
    cache = opened()
    fetch = cache.begin_fetch(SEGMENTS, "another")
    load = fetched(fetch)
    assert tokens_of(load) == {}
    assert fetch.missed == {PageLoss.SEGMENT_ABSENT: PAGES}
    load.abandon()
    assert disk_tier(cache.manager).counts.read == 0


def test_what_is_forgotten_does_not_come_back_from_disk(opened: Callable[..., SegmentCache]) -> None:
    cache = opened()
    store_all(cache)
    cache.forget()
    cache = opened()
    fetch = cache.begin_fetch(SEGMENTS)
    load = fetched(fetch)
    assert tokens_of(load) == {}
    load.abandon()
