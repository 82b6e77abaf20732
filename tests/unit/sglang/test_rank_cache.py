"""Tests loads and offloads of one rank: the bytes are right, leases end, the order is kept, and lost pages are
reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexkv import c_ext
from flexkv.adapters.sglang import load_batches, rank_cache
from flexkv.adapters.sglang.load_batches import QueuedLoad
from flexkv.adapters.sglang.pages import page_keys, pages_of
from flexkv.cache.base import Completion
from flexkv.errors import ClosedError, DiskError, GeometryError, KeySchemeError
from flexkv.facts.request_settings import RequestSettings
from flexkv.observe import FailedOps
from flexkv.observe.failed_ops import MOST_LINES, PERIOD_S
from flexkv.transfer.graph import OpKind
from tests import testing_ext

from .conftest import LAYERS, PAGE_TOKENS, PAGES, World, blocks, hashes_of

WAIT_S = 1.0
LONG_S = 60.0


def load(world: World, rid: str, hashes: list[str], pages: list[int]) -> tuple[int, bool]:
    """Looks the pages up, loads them layer by layer, and finishes the load. Returns how many pages were found, and
    whether all of them arrived.
    """
    keys = world.cache.keys(hashes)
    found = world.cache.match(rid, keys, WAIT_S)
    index = world.loads.start({rid: QueuedLoad(keys[:found], blocks(pages[:found]))}, None)
    world.loads.set_consumer(index)
    for layer in range(LAYERS):
        world.loads.wait_until(layer)
    return found, world.loads.finish(index)


def test_stored_pages_come_back_to_other_pages(worlds):
    world = worlds()
    hashes, sources, targets = hashes_of(1, 2, 3), [5, 9, 2], [30, 31, 17]
    before = [world.page(page) for page in sources]
    padding = world.page(0)
    assert world.store(hashes, sources)
    world.pool[:, :, PAGE_TOKENS:] = 7.0
    assert load(world, "r", hashes_of(1, 2, 3, "absent"), [*targets, 1]) == (3, True)
    for target, expected in zip(targets, before, strict=True):
        assert torch.equal(world.page(target), expected)
    untouched = set(range(1, PAGES)) - set(targets)
    assert all(bool((world.page(page) == 7.0).all()) for page in untouched)
    assert torch.equal(world.page(0), padding), "page 0 is SGLang's own"


def test_each_layer_is_in_place_when_it_was_waited_for(worlds):
    world = worlds()
    world.store(hashes_of(*range(20)), list(range(1, 21)))
    before = [world.page(page) for page in range(1, 21)]
    world.pool[:, :, PAGE_TOKENS:] = 0
    keys = world.cache.keys(hashes_of(*range(20)))
    assert world.cache.match("r", keys, WAIT_S) == 20
    index = world.loads.start({"r": QueuedLoad(keys, blocks(list(range(1, 21))))}, None)
    world.loads.set_consumer(index)
    for layer in range(LAYERS):
        world.loads.wait_until(layer)
        for page in range(1, 21):
            assert torch.equal(world.page(page)[:, layer], before[page - 1][:, layer])
    assert world.loads.finish(index)


def test_several_requests_of_a_batch_share_pages(worlds):
    world = worlds()
    world.store(hashes_of(1, 2), [1, 2])
    keys = world.cache.keys(hashes_of(1, 2))
    queued = {}
    for number in range(3):
        assert world.cache.match(f"r{number}", keys, WAIT_S) == 2
        queued[f"r{number}"] = QueuedLoad(keys, blocks([10 + 2 * number, 11 + 2 * number]))
    index = world.loads.start(queued, None)
    assert world.loads.finish(index)
    for number in range(3):
        assert torch.equal(world.page(10 + 2 * number), world.page(1))
        assert torch.equal(world.page(11 + 2 * number), world.page(2))


def test_a_batch_of_more_requests_than_queue_places_is_loaded(worlds):
    world = worlds(transfer__queue_ops=2)
    world.store(hashes_of(1), [1])
    keys = world.cache.keys(hashes_of(1))
    queued = {}
    for number in range(9):
        assert world.cache.match(f"r{number}", keys, WAIT_S) == 1
        queued[f"r{number}"] = QueuedLoad(keys, blocks([10 + number]))
    assert world.loads.finish(world.loads.start(queued, None))
    assert all(torch.equal(world.page(10 + number), world.page(1)) for number in range(9))


def test_layers_of_a_batch_of_which_the_lanes_have_forgotten_graphs(worlds):
    """A batch with more graphs than the lanes remember is loaded layer by layer. Lanes remember only the last 256
    graphs whose results were taken.
    """
    world = worlds()
    world.store(hashes_of(1), [1])
    keys = world.cache.keys(hashes_of(1))
    queued = {}
    for number in range(300):
        assert world.cache.match(f"r{number}", keys, WAIT_S) == 1
        queued[f"r{number}"] = QueuedLoad(keys, blocks([10 + number % 20]))
    index = world.loads.start(queued, None)
    assert world.cache.quiesce(30)
    world.loads.set_consumer(index)
    for layer in range(LAYERS):
        world.loads.wait_until(layer)
    assert world.loads.finish(index)
    assert all(torch.equal(world.page(page), world.page(1)) for page in range(10, 30))


def test_a_promise_that_was_lost_fails_the_load_and_nothing_waits(worlds):
    world = worlds()
    world.store(hashes_of(1), [1])
    keys = world.cache.keys(hashes_of(1))
    assert world.cache.match("r", keys, WAIT_S) == 1
    world.cache.manager.reset()
    index = world.loads.start({"r": QueuedLoad(keys, blocks([9]))}, None)
    world.loads.set_consumer(index)
    world.loads.wait_until(0)
    assert not world.loads.finish(index)
    assert world.loads.finish(index), "a batch that is not there has nothing to wait for"


@pytest.mark.parametrize("skips", [True, False])
def test_the_lookup_that_begins_a_load_heeds_the_requests_settings(worlds, skips):
    world = worlds()
    world.store(hashes_of(1), [1])
    keys = world.cache.keys(hashes_of(1))
    assert world.cache.match("r", keys, WAIT_S) == 1
    load = QueuedLoad(keys, blocks([9]), RequestSettings(skip_load=skips))
    assert world.loads.finish(world.loads.start({"r": load}, None)) == (not skips)


def test_a_page_that_does_not_verify_is_no_hit_and_then_a_miss(worlds):
    world = worlds(host__verify=True)
    world.store(hashes_of(1, 2), [1, 2])
    for slot in range(4):
        content = world.cache._unit.pool.slot(slot)
        content[:64] ^= 1
    assert load(world, "r", hashes_of(1, 2), [8, 9]) == (2, False)
    assert world.cache.match("again", world.cache.keys(hashes_of(1, 2)), WAIT_S) == 0


def test_an_offload_without_room_completes_without_storing(worlds):
    # There are two slots. Both are promised to a request, so neither of their pages can be evicted.
    world = worlds(host__bytes=2 * 4096, host__extent_bytes=2 << 20)
    assert world.store(hashes_of(1, 2), [1, 2])
    assert world.cache.match("r", world.cache.keys(hashes_of(1, 2)), WAIT_S) == 2
    assert not world.store(hashes_of(3), [3])
    world.cache.manager.release("r")
    assert world.store(hashes_of(3), [3])


def test_offloads_complete_in_the_order_in_which_they_came(worlds):
    world = worlds()
    for number in (1, 2, 3):
        world.offloads.add(world.cache.keys(hashes_of(number)), blocks([number]), None)
    first, second, third = world.offloads._queue
    assert world.cache.quiesce(30)
    # The first offload counts as in flight again, so the offloads after it must wait.
    first.in_flight = 1
    assert second.in_flight == third.in_flight == 0
    assert world.offloads.completed() == 0
    first.in_flight = 0
    assert world.offloads.completed() == 3
    assert [world.offloads.pop() for _ in range(3)] == [True] * 3


def test_a_store_that_fails_is_said_to_have_failed(worlds):
    fails = testing_ext.FaultRule(0, kind=int(OpKind.D2H))
    world = worlds(testing_ext.FaultyMover(c_ext.HostMover(), [fails]))
    assert not world.store(hashes_of(1), [1])
    assert world.cache.match("r", world.cache.keys(hashes_of(1)), WAIT_S) == 0


def test_a_copy_past_its_deadline_is_recalled_or_stops_the_rank(worlds):
    mover = testing_ext.FaultyMover(
        c_ext.HostMover(), [testing_ext.FaultRule(2, kind=int(OpKind.H2D), times=1)]
    )
    world = worlds(mover, load__deadline_s=0.05, transfer__stuck_s=1.0, transfer__copy_threads=1)
    world.store(hashes_of(1), [1])
    keys = world.cache.keys(hashes_of(1))
    ended: list[Completion] = []
    jobs = []
    for number in range(2):
        assert world.cache.match(f"r{number}", keys, WAIT_S) == 1
        graph = world.cache.manager.begin_load(f"r{number}", [blocks([20 + number])])
        jobs.append(world.cache.load(f"r{number}", graph, ended.append))
        assert mover.wait_stalled(1, 60.0)
    world.cache.finish_load(jobs[1])
    assert [done.failed_blocks.tolist() for done in ended] == [[21]], "it had not been taken"
    with pytest.raises(ClosedError, match="may be read or written"):
        world.cache.finish_load(jobs[0])
    mover.release()
    assert world.cache.quiesce(60)


def test_asking_again_replaces_the_lease_and_a_miss_leaves_nothing(worlds):
    world = worlds()
    world.store(hashes_of(1, 2, 3), [1, 2, 3])
    manager = world.cache.manager
    for length in (3, 1, 2):
        world.cache.match("r", world.cache.keys(hashes_of(*range(1, length + 1))), WAIT_S)
        assert manager.leased_pages("r") == length
    for number in range(100):
        world.cache.match(f"miss {number}", world.cache.keys(hashes_of("absent")), WAIT_S)
    assert len(manager.tables.access_orders._access_orders) <= 1, (
        "nobody says when a request that found nothing ends"
    )


def test_leases_that_are_never_followed_up_expire(worlds):
    world = worlds(load__lease_s=0.001)
    world.store(hashes_of(1), [1])
    world.cache.match("r", world.cache.keys(hashes_of(1)), WAIT_S)
    assert world.cache.manager.leased_pages("r") == 1
    ends_s = time.monotonic() + LONG_S
    while world.cache.manager.leased_pages("r"):
        assert time.monotonic() < ends_s, "the lease never expired"
        world.cache._unit._expire_at_s = 0.0
        world.cache.poll()


def test_what_is_known_of_a_failed_load_ends_with_its_request(worlds):
    """When a request ends, its failed load is forgotten. The engine ends requests whose load failed, and may use their
    names for new requests.
    """
    late = testing_ext.FaultRule(1, kind=int(OpKind.H2D), delay_s=0.2)
    world = worlds(
        testing_ext.FaultyMover(c_ext.HostMover(), [late]),
        fails_requests=False,  # with True, nothing would be promised for a while
        load__deadline_s=0.01,
        transfer__stuck_s=30.0,
    )
    world.store(hashes_of(1, 2), [1, 2])
    keys = world.cache.keys(hashes_of(1, 2))
    assert world.cache.match("r", keys, WAIT_S) == 2
    index = world.loads.start({"r": QueuedLoad(keys, blocks([20, 21]))}, None)
    assert not world.loads.finish(index)
    assert world.store(hashes_of(1, 2), [1, 2])
    assert world.cache.match("r", keys, WAIT_S) == 2


def test_new_weights_hide_what_was_stored_also_from_a_later_run(worlds):
    world = worlds()
    before = world.cache.keys(hashes_of(1)).tobytes()
    world.store(hashes_of(1), [1])
    world.cache.new_weights()
    assert world.cache.match("r", world.cache.keys(hashes_of(1)), WAIT_S) == 0
    assert world.cache.keys(hashes_of(1)).tobytes() != before


def test_from_disk_within_the_lookup(worlds, tmp_path):
    settings = {"disk__folders": str(tmp_path), "disk__bytes_per_folder": 4 << 20}
    first = worlds(**settings)
    first.store(hashes_of(1, 2, 3), [1, 2, 3])
    pages = [first.page(page) for page in (1, 2, 3)]
    first.cache.close()
    second = worlds(**settings)
    second.pool[:, :, PAGE_TOKENS:] = 0
    assert second.cache.manager.cached_blocks() == 0
    keys = second.cache.keys(hashes_of(1, 2, 3))
    assert second.cache.match("r", keys, 60.0) == 3
    assert second.loads.finish(second.loads.start({"r": QueuedLoad(keys, blocks([7, 8, 9]))}, None))
    for page, expected in zip((7, 8, 9), pages, strict=True):
        assert torch.equal(second.page(page), expected)


@pytest.mark.parametrize("bad", ["zz" * 32, "ab", "ab" * 33])
def test_page_hashes_of_another_form_are_refused(bad):
    with pytest.raises(KeySchemeError, match=r"page hash.* hexadecimal"):
        page_keys(b"n" * 32, [*hashes_of(1), bad])


def test_keys_depend_on_the_namespace():
    mine, theirs = (page_keys(letter * 32, hashes_of(1, 2)) for letter in (b"a", b"b"))
    assert mine.shape == (2, 16)
    assert not np.array_equal(mine, theirs)


def test_token_slots_become_pages():
    slots = torch.tensor([8, 9, 10, 11, 4, 5, 6, 7])
    assert pages_of(slots, 4).tolist() == [2, 1]
    assert pages_of(slots[:0], 4).tolist() == []


@pytest.mark.parametrize("slots", [[8, 9, 10], [9, 10, 11, 12], [8, 9, 10, 12]])
def test_slots_that_fill_no_page_are_refused(slots):
    with pytest.raises(GeometryError, match="pages of 4"):
        pages_of(torch.tensor(slots), 4)


def test_loads_and_stores_are_counted_and_logged_while_the_engine_runs(worlds, caplog):
    caplog.set_level("INFO", "flexkv")
    world = worlds(observe__metrics_log_s=0.001)
    world.store(hashes_of(1, 2, 3), [5, 9, 2])
    assert load(world, "r", hashes_of(1, 2, 3), [30, 31, 17]) == (3, True)
    counters = world.cache.counters
    page_bytes = world.page(1).nbytes
    for direction in ("load", "store"):
        assert counters.value("flexkv_moved_pages_total", direction=direction) == 3
        assert counters.value("flexkv_moved_bytes_total", direction=direction) == 3 * page_bytes

    def lines() -> list[str]:
        return [line for line in caplog.messages if line.startswith("metrics of unit tp0, last ")]

    ends_s = time.monotonic() + LONG_S
    while not any("moved_pages[load]=3" in line for line in lines()):
        assert time.monotonic() < ends_s, caplog.messages
        time.sleep(0.01)
        world.cache.poll()


def test_pages_that_find_no_slot_are_counted_by_that_name(worlds):
    world = worlds(host__bytes=16 << 10)
    world.store(hashes_of(*range(1, 8)), list(range(2, 9)))
    slots = world.cache._unit.slots
    lost = world.cache.counters.value("flexkv_dropped_store_pages_total", reason="no_slot")
    assert lost == 7 - slots > 0
    assert world.cache.counters.value("flexkv_dropped_store_pages_total", reason="busy") == 0


def test_stores_that_find_the_queue_full_are_counted_and_are_no_failures(worlds, monkeypatch):
    world = worlds(mover=None)
    monkeypatch.setattr(world.cache._ops.engine, "submit", lambda *_, **__: None)
    assert not world.store(hashes_of(1, 2), [5, 6])
    assert world.cache.counters.value("flexkv_dropped_store_pages_total", reason="busy") == 2
    assert "flexkv_failed_pages_total" not in world.cache.counters.data
    assert world.cache.counters.value("flexkv_moved_pages_total", direction="store") == 0


def test_a_refused_cache_holds_no_folder(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"disk__folders": str(tmp_path), "disk__bytes_per_folder": 4 << 20}

    def fails(*_arguments: object) -> Any:
        raise RuntimeError("the last thing that the start does")

    with monkeypatch.context() as broken:
        broken.setattr(rank_cache, "MetricReport", fails)
        # The exception stays referenced, and its traceback refers to all objects that the start has made.
        with pytest.raises(RuntimeError) as caught:
            worlds(**settings)
    world = worlds(**settings)
    assert world.store(hashes_of(1), [1])
    # The control: a working cache keeps the folder locked.
    with pytest.raises(DiskError, match="in use"):
        worlds(**settings)
    assert caught.value.args


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    return caplog


def lose(world: World, count: int) -> None:
    """Starts batches of loads for one request. The pages of these loads are missing, so every load fails."""
    for number in range(count):
        index = world.loads.start(
            {"r": QueuedLoad(world.cache.keys(hashes_of("gone", number)), blocks([1, 2]))}, None
        )
        assert not world.loads.finish(index)


def test_the_warning_of_a_batch_counts_the_pages_that_failed(
    worlds: Callable[..., World], said: pytest.LogCaptureFixture
) -> None:
    world = worlds()
    world.store(hashes_of(1, 2, 3), [1, 2, 3])
    queued = {
        "kept": QueuedLoad(world.cache.keys(hashes_of(1, 2, 3)), blocks([10, 11, 12])),
        "lost": QueuedLoad(world.cache.keys(hashes_of("absent", "too")), blocks([13, 14])),
    }
    assert not world.loads.finish(world.loads.start(queued, None))
    assert "load of a forward, of 2 request(s), which the engine ends: 2 of 5 pages failed" in said.text
    said.clear()
    queued.pop("lost")
    assert world.loads.finish(world.loads.start(queued, None))
    assert "pages failed" not in said.text, "the control"


def test_failures_without_a_line_are_counted_in_the_log_while_the_engine_idles(
    worlds: Callable[..., World], said: pytest.LogCaptureFixture
) -> None:
    world, clock = worlds(), Clock()
    world.loads._failed = FailedOps(load_batches.logger, clock)
    lose(world, MOST_LINES + 3)
    world.loads.log_left_out()
    assert "more failed" not in said.text, "the control: the minute is not over"
    clock.now_s += PERIOD_S
    world.loads.log_left_out()
    assert "load of a forward: 3 more failed, 6 pages" in said.text
