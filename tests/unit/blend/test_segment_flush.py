"""A segment cache reports whether all its pages are on disk. It also reports which other cache uses its folder."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.keys import GROUP
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.cache import manager as manager_module
from flexkv.cache.base import NO_ENTRY
from flexkv.config import DiskConfig
from flexkv.errors import ClosedError, TransferError
from flexkv.simulation.world import DISK
from flexkv.storage.journal import Journal
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.engine import TransferEngine
from tests import testing_ext
from tests.unit.blend.stored_pages import publish
from tests.unit.cache.disk_world import disk_tier

SHAPE = KvShape(layers=2, heads=2, head_dim=16, dtype="float16")
BLOCK_TOKENS = 8
IMAGE_BYTES = 8192
"""Size of a page's slot image on disk, including its trailer."""

Text = NDArray[np.int64]


def texts(count: int, blocks: int = 2) -> list[Text]:
    random = np.random.default_rng(3)
    return [random.integers(0, 1000, blocks * BLOCK_TOKENS) for _ in range(count)]


def make(folder: Path, shape: KvShape = SHAPE, places: int = 64, slots: int = 16, mode: str = "through"):
    disk = DiskConfig(folders=str(folder), bytes_per_folder=places * IMAGE_BYTES, mode=mode)
    return SegmentCache(
        shape,
        {"weights": "random"},
        slots=slots,
        staging_tokens=256,
        block_tokens=BLOCK_TOKENS,
        deadline_s=20.0,
        folders=SegmentFolders(disk),
    )


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SegmentCache]]:
    caches: list[SegmentCache] = []

    def open_one(**options) -> SegmentCache:
        caches.append(make(tmp_path, **options))
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()


def put(cache: SegmentCache, *segments: Text) -> None:
    for text in segments:
        keys = cache.scheme.keys(text).whole
        blocks = cache.staging.take(len(keys))
        assert blocks is not None
        cache.staging.rows[:, blocks] = 7
        publish(cache, keys, blocks, 0, BLOCK_TOKENS)


def settle(cache: SegmentCache) -> None:
    """Waits until no read or write of the cache's disk is in flight."""
    cache.unit.wait_while(lambda: cache.manager.work.moving, 60.0)


def fail_writes(patch: pytest.MonkeyPatch, times: int) -> None:
    """Makes the first `times` writes fail with EIO, on each disk that is opened after this call."""
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(0, write=True, times=times)])
    patch.setattr(StripedSlabs, "open", partial(StripedSlabs.open, wrapper=faults))


# --- several caches and folders ---


@pytest.mark.parametrize(
    "other",
    [KvShape(2, 2, 16, "bfloat16"), KvShape(2, 4, 8, "float16"), KvShape(2, 1, 32, "float16")],
    ids=str,
)
def test_rows_of_equal_size_and_another_kind_are_not_served(
    opened: Callable[..., SegmentCache], other: KvShape
) -> None:
    (text,) = texts(1)
    assert other.row_bytes == SHAPE.row_bytes
    cache = opened()
    put(cache, text)
    assert cache.close()
    assert opened(shape=other).cached_tokens(text) == 0
    assert opened().cached_tokens(text) == len(text), "its own are"


# --- pages that are not on disk yet ---


def test_a_flush_says_that_a_page_could_not_be_written(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, times=1)
    cache = opened(mode="evict")
    put(cache, *texts(2))
    assert not cache.flush()
    assert disk_tier(cache.manager).counts.failed_writes > 0
    assert disk_tier(cache.manager).volumes.alive == (True,)
    assert cache.flush(), "written again, it is there"


@pytest.mark.parametrize(("first", "dropped"), [(2, 0), (3, 2)], ids=["displaced", "never written"])
def test_a_flush_says_that_host_memory_has_more_than_the_disk_holds(
    opened: Callable[..., SegmentCache], first: int, dropped: int
) -> None:
    cache = opened(places=4, mode="evict")
    assert disk_tier(cache.manager).presence.up_slots(GROUP) == 4
    put(cache, *texts(first))
    assert cache.flush() == (not dropped)
    put(cache, *texts(3)[first:])
    assert not cache.flush()
    assert disk_tier(cache.manager).counts.dropped_writes >= dropped
    assert not cache.close()


def test_a_flush_waits_for_room_in_the_journal(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the journal is full when pages have been written, the pages' records wait. A flush waits until these records
    are durable too.
    """
    first, second = texts(2)
    open_unit = StripedSlabs.open

    def with_a_small_journal(folders, identity, groups, options):
        return open_unit(folders, identity, groups, replace(options, journal_rows=1))

    monkeypatch.setattr(StripedSlabs, "open", with_a_small_journal)
    cache = opened(mode="evict")
    put(cache, first)
    assert cache.flush()
    put(cache, second)
    assert cache.flush()
    assert disk_tier(cache.manager).volumes.stats().pending_pages == 0
    assert cache.close()
    assert opened().cached_tokens(second) == len(second)


def test_a_flush_says_that_there_was_no_place(opened: Callable[..., SegmentCache]) -> None:
    first, second = texts(2)
    cache = opened(places=2, slots=2)
    put(cache, first)
    assert cache.flush()
    index = disk_tier(cache.manager).presence
    entries = index.find(GROUP, cache.scheme.keys(first).whole)
    assert not (entries == NO_ENTRY).any()
    index.pin(entries)
    put(cache, second)
    assert cache.cached_tokens(second) == len(second)
    assert not cache.flush()
    index.unpin(entries)
    assert cache.flush()


@pytest.mark.parametrize("mode", ["back", "evict"])
def test_pages_that_a_load_leases_are_written_too(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cache = opened(mode=mode)
    (text,) = texts(1)
    monkeypatch.setattr(cache.manager.work._writes[DISK], "poll", lambda: None)
    put(cache, text)
    load = cache.begin_load([text])
    # Fault: the engine does not report that the load is finished.
    with monkeypatch.context() as patched:
        patched.setattr(cache.engine, "poll", lambda: [])
        cache.deadline_s = 0.05
        assert not cache.flush()
    cache.deadline_s = 20.0
    assert disk_tier(cache.manager).counts.written == 0
    assert cache.flush(), "the load is open, but has come"
    assert disk_tier(cache.manager).counts.written == 2
    load.close()


def test_a_page_that_was_forgotten_before_its_commit_holds_up_no_flush(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = threading.Event()

    def held_up(clock: Callable[[], float], wait_for_more: Callable[[float], bool]) -> None:
        while not commit.is_set():
            wait_for_more(0.005)

    monkeypatch.setattr("flexkv.storage.journal.await_group", held_up)
    cache = opened()
    first, second = texts(2)
    put(cache, first, second)
    settle(cache)
    assert disk_tier(cache.manager).counts.written == 4
    cache.deadline_s = 0.05
    assert not cache.flush(), "nothing was committed"
    cache.manager.forget(GROUP, cache.scheme.keys(first).whole)
    commit.set()
    cache.deadline_s = 20.0
    assert cache.flush()
    assert disk_tier(cache.manager).durable_pages == 2


def test_a_cache_whose_disk_is_lost_does_not_say_that_all_is_there(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, times=-1)
    cache = opened()
    put(cache, *texts(8))
    assert not any(cache.flush() for _ in range(3))
    assert not cache.close()


# --- closing ---


def test_a_close_says_whether_all_survives(
    opened: Callable[..., SegmentCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(mode="evict")
    put(first, *texts(2))
    assert first.close()
    assert first.close()
    with monkeypatch.context() as patched:
        fail_writes(patched, times=1)
        second = opened(mode="evict")
    put(second, *texts(4)[2:])
    assert not second.close()
    assert not second.close(), "what was not written then is not there now"
    third = opened()
    assert [third.cached_tokens(text) > 0 for text in texts(2)] == [True, True]


def test_without_a_disk_nothing_survives() -> None:
    cache = SegmentCache(SHAPE, {"weights": "random"}, slots=4, staging_tokens=64, block_tokens=BLOCK_TOKENS)
    assert not cache.flush()
    assert not cache.close()


# --- errors and descriptors ---


def test_a_wait_takes_descriptors_of_any_number(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may open {hard} files")
    cache = opened()
    plane = disk_tier(cache.manager).plane
    assert isinstance(plane, TransferEngine)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        high = fcntl.fcntl(plane.event_fd, fcntl.F_DUPFD_CLOEXEC, 1024)
        assert high >= 1024
        monkeypatch.setattr(type(plane), "event_fd", property(lambda self: high))
        looks = iter([True, True, False])
        cache.unit.wait_while(lambda: next(looks), 60.0)
        os.close(high)
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_a_lookup_that_fails_leaves_nothing_taken(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    random = np.random.default_rng(5)
    # Two of the segments have complete blocks and a partial tail. The third has only complete blocks.
    found = [random.integers(0, 1000, 20), random.integers(0, 1000, 12), *texts(1)]
    cache = opened()
    for text in found:
        keys = cache.scheme.keys(text)
        put(cache, text)
        if keys.tail is not None:
            blocks = cache.staging.take(1)
            assert blocks is not None
            publish(cache, keys.tail.keys, blocks, len(keys.whole), int(keys.tail.tokens[0]))
        assert cache.cached_tokens(text) == len(text)
    free = sorted(cache.staging.free)
    submit, calls = cache.engine.submit, iter(range(100))

    def failing(graph):
        # Fault: the engine refuses graphs from number `fails_at` on, as if it had been closed.
        if next(calls) >= fails_at:
            raise ClosedError("the engine is closed")
        return submit(graph)

    with monkeypatch.context() as patched:
        patched.setattr(cache.engine, "submit", failing)
        with pytest.raises(ClosedError, match="the engine is closed"):
            cache.begin_load(found)
        with pytest.raises(ClosedError, match="the engine is closed"):
            put_and_give(cache, random.integers(0, 1000, 8))
    assert cache.flush(), "what moved has ended"
    cache.begin_load([None]).close()
    assert sorted(cache.staging.free) == free
    assert cache.manager.inflight_ops() == 0
    assert cache.manager.tables.requests.leased() == []
    assert cache.manager.tables.access_orders._access_orders == {}
    cache.manager.check_integrity()
    load = cache.begin_load(found)
    assert [hit.tokens for hit in load.hits] == [20, 12, 16]
    load.close()
    assert load.lost == {}
    assert sorted(cache.staging.free) == free


def put_and_give(cache: SegmentCache, text: Text) -> None:
    free = list(cache.staging.free)
    try:
        put(cache, text)
    finally:
        cache.staging.free[:] = free


def test_control_a_load_past_its_deadline_keeps_a_flush_from_success(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()
    (text,) = texts(1)
    put(cache, text)
    load = cache.begin_load([text])
    cache.deadline_s = 0.05
    with monkeypatch.context() as patched:
        patched.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        patched.setattr(cache.engine, "poll", lambda: [])
        with pytest.raises(TransferError, match="still move"):
            load.close()
        assert not cache.flush()
    cache.deadline_s = 20.0
    assert cache.flush()


# --- new weights ---


def hang_journals(patch: pytest.MonkeyPatch) -> None:
    """Makes the disks' journals accept records but never write them."""
    patch.setattr(Journal, "put", lambda journal, record: True)


def wait_for(held: Callable[[], bool], cache: SegmentCache) -> None:
    ends_s = time.monotonic() + 20.0
    while not held():
        assert time.monotonic() < ends_s
        cache.poll()
        time.sleep(0.002)


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "control"])
def test_who_begins_to_forget_waits_for_no_disk(
    opened: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    first, second = texts(2)
    cache = opened()
    put(cache, first)
    settle(cache)
    monkeypatch.setattr(manager_module, "RESET_S", 3.0)
    hang_journals(monkeypatch)
    begun_s = time.monotonic()
    if begun:
        cache.begin_forget()
    else:
        cache.forget()
    assert (time.monotonic() - begun_s < 2.5) == begun
    assert cache.cached_tokens(first) == 0
    assert cache.busy == begun
    put(cache, second)
    assert cache.cached_tokens(second) == len(second), "what is stored meanwhile is there"
    wait_for(lambda: disk_tier(cache.manager).volumes.alive == (False,), cache)
    assert cache.cached_tokens(second) == len(second), "host memory serves without the disk"


def test_what_was_begun_to_be_forgotten_does_not_come_back(opened: Callable[..., SegmentCache]) -> None:
    (text,) = texts(1)
    cache = opened()
    put(cache, text)
    assert cache.flush()
    cache.begin_forget()
    wait_for(lambda: not cache.busy, cache)
    assert not disk_tier(cache.manager).resets
    assert cache.close()
    assert opened().cached_tokens(text) == 0
