"""A rank stores captured segments in host memory. No step waits for these stores. Later loads find the segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import pages as module
from flexkv.adapters.vllm.blend.orders import NewSegment, SegmentOrder
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.blend.segment_fetch import SegmentFetch
from flexkv.blend.segment_store import SegmentStore
from flexkv.errors import TransferError
from flexkv.observe import BlendResult, Counters
from flexkv.transfer.base import Ticket
from flexkv.transfer.layerwise.host_device import HostDevice
from tests.unit.blend.loaded_world import ROTATION, SHAPE, TOKENS, make_cache, planes_of

WITHIN_S = 30.0
SEGMENT = TOKENS[0]


@pytest.fixture
def pages() -> Iterator[BlendPages]:
    made = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
    yield made
    made.close()


class Held:
    """In the `with` block, no transfer of the engine ends. The test fails if anything waits for a transfer."""

    def __init__(self, pages: BlendPages, patch: pytest.MonkeyPatch) -> None:
        self._engine, self._patch = pages.cache.engine, patch

    def __enter__(self) -> None:
        def wait(ticket: int, deadline_s: float) -> bool:
            assert deadline_s == 0.0, "a step waits"
            return False

        self._patch.setattr(self._engine, "wait", wait)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def capture(pages: BlendPages, request: str = "s", segment: np.ndarray = SEGMENT, number: int = 1) -> None:
    """Captures the segment's rows of all layers, in the order in which one forward pass computes them."""
    asks = NewSegment(segment, "", number)
    assert pages.begin_capture(request, asks, 0)
    rows = torch.from_numpy(planes_of(segment)).transpose(2, 3)
    for layer in range(SHAPE.layers):
        pages.capture(request, layer, 0, (rows[layer, 0], rows[layer, 1]))
    pages.end_capture(request, asks, len(segment))


def end_stores(pages: BlendPages) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while pages.busy:
        assert time.monotonic() < ends_s
        pages.take_arrived()
        time.sleep(0.001)


def arrival(pages: BlendPages, request: str) -> Any:
    ends_s = time.monotonic() + WITHIN_S
    while request not in (arrived := pages.take_arrived()):
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    return arrived[request]


def kept_planes(pages: BlendPages) -> np.ndarray:
    """Loads the segment for position 0. Returns its cached keys and values: [layers, 2, heads, tokens, head_dim]."""
    pages.begin_load(SegmentOrder("r", 1, (SEGMENT,), ""))
    assert arrival(pages, "r").tokens == (len(SEGMENT),)
    layers = pages.rows("r", [(0, len(SEGMENT))], 0, len(SEGMENT)).open(0)
    found = [torch.stack(layers.take(layer)).clone() for layer in range(SHAPE.layers)]
    layers.close()
    return torch.stack(found).transpose(2, 3).numpy()


@pytest.mark.parametrize("ends", [(20,), (7, 20), (1, 4, 9, 19, 20)], ids=["one chunk", "two", "five"])
@pytest.mark.parametrize("wrong", ["", "first chunk's place", "another layer"])
def test_what_is_captured_in_chunks_comes_back_in_each_layer(
    pages: BlendPages, ends: tuple[int, ...], wrong: str
) -> None:
    """A segment that is captured in chunks is loaded again with the right rows in every layer. The last chunk has one
    row more than the segment, because the engine computes its first generated token with it. In the control cases all
    chunks go to the first chunk's position, or layers are exchanged.
    """
    asks = NewSegment(SEGMENT, "", 1)
    wanted = planes_of(SEGMENT)
    rows = torch.from_numpy(wanted).transpose(2, 3)
    rows = torch.cat([rows, torch.full_like(rows[:, :, :1], torch.nan)], dim=2)
    first = 0
    for end in ends:
        assert pages.begin_capture("s", asks, first)
        assert not pages.begin_capture("s", asks, first + 1), "earlier rows are missing"
        for layer in range(SHAPE.layers):
            some = rows[layer, :, first : end + (end == len(SEGMENT))]
            to = (layer + (wrong == "another layer")) % SHAPE.layers
            pages.capture("s", to, 0 if wrong == "first chunk's place" else first, (some[0], some[1]))
        pages.end_capture("s", asks, end)
        first = end
    end_stores(pages)
    found = kept_planes(pages)
    if wrong == "another layer" or (wrong and len(ends) > 1):
        assert not np.allclose(found, wanted, rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("waits", [True, False], ids=["behind the store", "control"])
def test_a_load_behind_a_store_finds_its_segment(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    order = SegmentOrder("r", 1, (SEGMENT,), "")
    with Held(pages, monkeypatch):
        capture(pages)
        assert pages.busy
        if waits:
            pages.begin_load(order)
        else:
            pages._coming["r"] = order
            pages._begin_fetch(order)
            pages.take_arrived()
        assert pages.take_arrived() == {} or not waits
    if waits:
        assert arrival(pages, "r").tokens == (len(SEGMENT),)
        assert not pages.busy
    else:
        assert pages.holds("r") or "r" in pages._coming
        assert not pages._loads["r"].hits, "it was looked for too early"


class HeldStores(Held):
    """In the `with` block, loads end but stores do not."""

    def __enter__(self) -> None:
        super().__enter__()
        self._patch.undo()
        self._patch.setattr(SegmentStore, "advance", lambda store, *given: False)


OTHER = TOKENS[2]
SAME_BEGINNING = np.concatenate([SEGMENT[:8], OTHER])


@pytest.mark.parametrize(
    ("wanted", "caller", "begins"),
    [
        (OTHER, "", True),
        (SEGMENT, "somebody else", True),
        (SEGMENT, "", False),
        (SAME_BEGINNING, "", False),
    ],
    ids=["another segment", "another namespace", "the same", "one with the same first block"],
)
def test_only_loads_of_a_stores_segment_wait_for_it(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, wanted: np.ndarray, caller: str, begins: bool
) -> None:
    planes = planes_of(OTHER)
    pages.cache.store(OTHER, lambda layer: (planes[layer, 0], planes[layer, 1]), ROTATION)
    with HeldStores(pages, monkeypatch):
        capture(pages)
        pages.begin_load(SegmentOrder("r", 1, (wanted,), caller))
        if not begins:
            assert pages.take_arrived() == {}
            assert "r" not in pages._fetches
        else:
            assert arrival(pages, "r").tokens == (len(OTHER) if wanted is OTHER else 0,)
        assert pages.busy
    if not begins:
        assert arrival(pages, "r").tokens == (len(SEGMENT) if wanted is SEGMENT else 8,)


def test_a_request_that_ends_before_its_load_begins_leaves_nothing(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sorted(pages.cache.staging.free)
    with Held(pages, monkeypatch):
        capture(pages)
        pages.begin_load(SegmentOrder("r", 1, (SEGMENT,), ""))
        pages.release("r")
        assert pages.take_arrived() == {}
    ends_s = time.monotonic() + WITHIN_S
    while pages.busy:
        assert time.monotonic() < ends_s
        assert pages.take_arrived() == {}
    assert sorted(pages.cache.staging.free) == free


def test_new_weights_make_a_store_in_flight_a_miss(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Held(pages, monkeypatch):
        capture(pages)
        pages.forget()
        assert not pages.busy
    pages.begin_load(SegmentOrder("r", 1, (SEGMENT,), ""))
    found = arrival(pages, "r")
    assert (found.tokens, found.missing) == ((0,), BlendResult.MISS)


def test_new_weights_hold_up_no_step(pages: BlendPages, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the weights change, no step waits for the tiers to confirm that they dropped the pages. Later polls check
    this. As a control, the library's own call waits.
    """
    capture(pages)
    end_stores(pages)
    waited: list[float] = []
    monkeypatch.setattr(pages.cache.manager.tiers[0], "finish_reset", waited.append)
    pages.forget()
    assert not waited
    assert pages.cache.manager.resets
    assert pages.cache.cached_tokens(SEGMENT) == 0
    pages.cache.forget()
    assert waited[0] > time.monotonic(), "the control: the library's own call waits"


def test_a_close_waits_for_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
    with Held(pages, monkeypatch):
        capture(pages)
    pages.close()
    assert not pages._stores
    assert pages.cache.cached_tokens(SEGMENT) == len(SEGMENT)


CLOSE_S = 0.4


@pytest.mark.parametrize("each", [False, True], ids=["one for all", "control"])
def test_a_close_has_one_deadline_for_all_that_hangs(monkeypatch: pytest.MonkeyPatch, each: bool) -> None:
    """A close waits for hanging threads and transfers with one common deadline. Three threads of the device hang, there
    are two stores, and no transfer ends in time.
    """
    pages = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
    pages.cache.unit.close_s = CLOSE_S
    device, go_on = HostDevice(one_thread=False), threading.Event()
    pages._rows_on = replace(pages._rows_on, device=device)

    def hang() -> None:
        go_on.wait(WITHIN_S)

    for name in ("load", "compute", "store"):
        device.stream(name).run(hang, "load", 0)
    with Held(pages, monkeypatch):
        capture(pages, "first", FIRST[:20])
        capture(pages, "second", SECOND[:20])

    def never(*given: Any) -> bool:
        time.sleep(given[-1])
        return False

    monkeypatch.setattr(pages.cache.engine, "wait", never)
    monkeypatch.setattr(pages.cache.engine, "close", never)
    if each:
        monkeypatch.setattr(device, "close", lambda left_s: never(CLOSE_S))
        monkeypatch.setattr(SegmentStore, "advance", lambda *given: never(CLOSE_S))
    begun_s = time.monotonic()
    with pytest.raises(TransferError, match="pages of segments still move"):
        pages.close()
    took_s = time.monotonic() - begun_s
    assert (took_s < 1.8 * CLOSE_S) != each
    monkeypatch.undo()
    go_on.set()
    pages.close()


@pytest.mark.parametrize("kept", [True, False], ids=["", "control"])
def test_what_hangs_before_leaves_the_disks_their_time(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    pages = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
    pages.cache.unit.close_s = CLOSE_S
    device, go_on, given = HostDevice(one_thread=False), threading.Event(), list[float]()
    pages._rows_on = replace(pages._rows_on, device=device)

    def hang() -> None:
        go_on.wait(WITHIN_S)

    device.stream("load").run(hang, "load", 0)
    with monkeypatch.context() as patch:
        patch.setattr(pages.cache.unit, "close", given.append)
        if not kept:
            patch.setattr(module, "DISK_SHARE", 0.0)
        pages.close()
    assert (given[0] > CLOSE_S / 4) == kept
    go_on.set()
    assert device.close(WITHIN_S)
    pages.cache.close()


# --- two documents that the staging pool cannot hold at the same time ---

FIRST, SECOND = np.arange(60), np.arange(200, 260)


def kept(pages: BlendPages) -> list[int]:
    end_stores(pages)
    return [pages.cache.cached_tokens(segment) for segment in (FIRST, SECOND)]


@pytest.mark.parametrize("reaps", [True, False], ids=["reaps", "control"])
def test_a_document_takes_the_room_of_one_that_has_ended(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, reaps: bool
) -> None:
    with Held(pages, monkeypatch):
        capture(pages, "first", FIRST)
    (store,) = pages._stores
    assert store._ticket is not None
    assert pages.cache.engine.wait(store._ticket, WITHIN_S)
    with monkeypatch.context() as patch:
        if not reaps:
            patch.setattr(pages, "_advance_stores", lambda wait=False: None)
        capture(pages, "second", SECOND)
    assert kept(pages) == [60, 60 if reaps else 0]


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_document_waits_for_the_room_of_one_that_still_moves(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    wait, advance = pages.cache.engine.wait, pages._advance_stores

    def ends_if_awaited(ticket: Ticket, deadline_s: float) -> bool:
        return deadline_s > 0 and wait(ticket, deadline_s)

    with monkeypatch.context() as patch:
        patch.setattr(pages.cache.engine, "wait", ends_if_awaited)
        if not waits:
            patch.setattr(pages, "_advance_stores", lambda wait=False: advance())
        capture(pages, "first", FIRST)
        capture(pages, "second", SECOND)
    assert kept(pages) == [60, 60 if waits else 0]


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_load_waits_for_the_room_of_a_store(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    capture(pages, "second", SECOND)
    end_stores(pages)
    with HeldStores(pages, monkeypatch):
        capture(pages, "first", FIRST)
        pages.begin_load(SegmentOrder("r", 1, (SECOND,), ""))
        if not waits:
            monkeypatch.setattr(pages, "_has_room", lambda order: True)
            assert arrival(pages, "r").tokens == (0,)
            monkeypatch.undo()
            return
        assert pages.take_arrived() == {}
    assert arrival(pages, "r").tokens == (60,)


LATER = np.arange(300, 360)


@pytest.mark.parametrize("bounded", [True, False], ids=["", "control"])
def test_stores_that_begin_later_keep_no_load_waiting(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """A load that waits for staging memory gives up instead of also waiting for stores that began after it. In this
    test each new store takes the staging memory of an ended one, so a store is always in flight.
    """
    capture(pages, "second", SECOND)
    end_stores(pages)
    advance, going = SegmentStore.advance, list[SegmentStore]()
    with monkeypatch.context() as patch:
        patch.setattr(
            SegmentStore, "advance", lambda store, *given: store in going and advance(store, *given)
        )
        capture(pages, "first", FIRST)
        (first,) = pages._stores
        pages.begin_load(SegmentOrder("r", 1, (SECOND,), ""))
        assert pages.take_arrived() == {}
        going.append(first)
        capture(pages, "later", LATER)
        assert first not in pages._stores
        assert pages._stores
        if bounded:
            assert arrival(pages, "r").tokens == (0,), "without room it is computed"
        else:
            patch.setattr(pages, "_wait_for_room", lambda order: not pages._has_room(order))
            assert [pages.take_arrived() for _ in range(3)] == [{}] * 3


def test_a_load_that_waits_for_staging_room_asks_again_for_what_comes(
    pages: BlendPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that waits for staging memory repeats its lookup, so that it keeps its position in the queue for slots in
    host memory.
    """
    capture(pages, "second", SECOND)
    end_stores(pages)
    advance, asked = SegmentFetch.advance, []

    def note(fetch: SegmentFetch) -> bool:
        asked.append(fetch)
        return advance(fetch)

    with HeldStores(pages, monkeypatch):
        monkeypatch.setattr(SegmentFetch, "advance", note)
        capture(pages, "first", FIRST)
        pages.begin_load(SegmentOrder("r", 1, (SECOND,), ""))
        for number in range(1, 4):
            assert pages.take_arrived() == {}
            assert len(asked) == number
    assert arrival(pages, "r").tokens == (60,)
