"""Shows which outcomes a rank reports for captured segments and for loads, also after errors that other code raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend.orders import NewSegment, SegmentOrder
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.blend.segment_fetch import SegmentFetch
from flexkv.blend.segment_store import SegmentStore
from flexkv.observe import BlendResult, Counters
from flexkv.transfer.graph import OpResult
from tests.unit.adapters.test_blend_stores import (
    FIRST,
    SECOND,
    SEGMENT,
    Held,
    HeldStores,
    arrival,
    capture,
    end_stores,
)
from tests.unit.blend.loaded_world import ROTATION, make_cache


@pytest.fixture
def pages() -> Iterator[BlendPages]:
    made = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
    yield made
    made.close()


def outcome(pages: BlendPages) -> dict[int, BlendResult]:
    end_stores(pages)
    return pages.take_stored()


def test_a_segment_of_which_all_is_cached_is_stored(pages: BlendPages) -> None:
    capture(pages, number=7)
    assert outcome(pages) == {7: BlendResult.STORED}
    assert pages.take_stored() == {}


def test_a_segment_without_room_beside_others_is_not_stored(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldStores(pages, monkeypatch):
        capture(pages, "first", FIRST, number=1)
        capture(pages, "second", SECOND, number=2)
    assert outcome(pages) == {1: BlendResult.STORED, 2: BlendResult.NO_ROOM}


def test_a_segment_without_room_in_host_memory_is_not_stored(pages: BlendPages) -> None:
    """If host memory has no free slot, a captured segment is not stored. The pages of the segment that was stored first
    are held for another request, so no slot can be freed.
    """
    capture(pages, "first", FIRST, number=1)
    first = outcome(pages)
    pages.begin_load(SegmentOrder("r", 1, (FIRST,), ""))
    keys = pages.cache.scheme.keys(FIRST).whole
    assert pages.cache.manager.keep("r", [keys], len(keys)) == len(keys)
    long = np.arange(500, 500 + 4 * 18)
    capture(pages, "second", long, number=2)
    second = outcome(pages)
    assert pages.cache.cached_tokens(long) < len(long)
    pages.cache.manager.end_keep("r")
    pages.release("r")
    assert (first, second) == ({1: BlendResult.STORED}, {2: BlendResult.NO_ROOM})


@pytest.mark.parametrize("place", ["queue", "pages"])
def test_a_segment_whose_pages_fail_is_lost_and_not_without_room(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    with monkeypatch.context() as patch:
        if place == "queue":
            patch.setattr(pages.cache.engine, "submit", lambda graph: None)
        else:
            poll = pages.cache.engine.poll
            patch.setattr(
                pages.cache.engine,
                "poll",
                lambda: [OpResult.cancelled(each.op_id, len(SEGMENT) // 4, "a fault") for each in poll()],
            )
        capture(pages, number=8)
        found = outcome(pages)
    assert found == {8: BlendResult.LOST}
    why = "the transfer queue was full" if place == "queue" else "rank 0: a fault"
    assert f"is not kept: 0 tokens of it are: {why}" in caplog.text


def test_a_segment_that_does_not_move_is_late(pages: BlendPages, monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(pages, monkeypatch):
        capture(pages, number=3)
        monkeypatch.setattr(SegmentStore, "is_late", True)
        pages.take_arrived()
    assert outcome(pages) == {3: BlendResult.LATE}


def test_a_segment_of_former_weights_is_reset(pages: BlendPages, monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(pages, monkeypatch):
        capture(pages, number=4)
        pages.forget()
    assert outcome(pages) == {4: BlendResult.RESET}


def test_a_segment_whose_rows_were_not_found_is_lost(pages: BlendPages) -> None:
    pages.lose_capture("s", NewSegment(SEGMENT, "", 5))
    assert outcome(pages) == {5: BlendResult.LOST}


# --- errors that other code raises ---


def no_memory(*given: Any, **more: Any) -> Any:
    raise MemoryError("no memory")


@pytest.mark.parametrize("place", ["_stores_of", "begin_fetch", "begin_load"])
def test_segments_of_a_load_that_fails_are_lost(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    capture(pages)
    end_stores(pages)
    owner = {"_stores_of": pages, "begin_fetch": pages.cache, "begin_load": SegmentFetch}[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, no_memory)
        pages.begin_load(SegmentOrder("r", 1, (SEGMENT,), ""))
        found = arrival(pages, "r")
    assert (found.tokens, found.missing) == ((0,), BlendResult.LOST)
    (record,) = caplog.records
    assert record.getMessage() == "segments of a request cannot be loaded: MemoryError: no memory"
    assert record.exc_info
    pages.release("r")
    pages.begin_load(SegmentOrder("r", 2, (SEGMENT,), ""))
    assert arrival(pages, "r").tokens == (len(SEGMENT),)


@pytest.mark.parametrize("place", ["begin_store", "advance", "cached_of"])
def test_a_segment_whose_store_fails_is_lost(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    free = sorted(pages.cache.staging.free)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentStore if place == "advance" else pages.cache, place, no_memory)
        capture(pages, number=3)
        assert outcome(pages) == {3: BlendResult.LOST}
    (record,) = caplog.records
    assert record.getMessage() == f"a segment of {len(SEGMENT)} tokens is not kept: MemoryError: no memory"
    assert record.exc_info
    if place != "advance":  # the handler of a failed `advance` frees the blocks itself
        assert sorted(pages.cache.staging.free) == free
    capture(pages, number=4)
    assert outcome(pages) == {4: BlendResult.STORED}


@pytest.mark.parametrize("end", [8, len(SEGMENT)], ids=["first chunk", "last"])
def test_a_capture_that_breaks_off_is_lost_with_its_last_token(
    pages: BlendPages, caplog: pytest.LogCaptureFixture, end: int
) -> None:
    asks = NewSegment(SEGMENT, "", 6)
    assert pages.begin_capture("s", asks, 0)
    pages.break_capture("s", asks, end, MemoryError("no memory"))
    assert not pages.begin_capture("s", asks, end), "no rank captures a chunk that one of them does not"
    assert pages.take_stored() == ({6: BlendResult.LOST} if end == len(SEGMENT) else {})
    if end < len(SEGMENT):
        pages.lose_capture("s", asks)  # a last chunk that is not captured ends the capture in this way
        assert pages.take_stored() == {6: BlendResult.LOST}
    (record,) = caplog.records
    assert record.getMessage() == f"a segment of {len(SEGMENT)} tokens is not kept: MemoryError: no memory"
    assert record.exc_info
    assert not pages._captures
    # If the segment is computed again from its start, as after a preemption, it is stored.
    capture(pages, number=7)
    assert outcome(pages) == {7: BlendResult.STORED}
