"""Several threads load and store batches of pages. A wait in one thread does not delay the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flexkv.adapters.sglang.page_batches import PageBatches
from flexkv.errors import ClosedError
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpKind, OpResult, TransferGraph
from tests.unit.cache.disk_world import disk_tier

from .conftest import World, blocks, hashes_of

LONG_S = 60.0


class HeldReads:
    """A disk lane that holds reads back until the test releases them.

    Attributes:
        asked: set when a read has been submitted.
        go: set by the test to let reads run.
    """

    def __init__(self, plane: Any) -> None:
        self._plane = plane
        self._held: list[TransferGraph] = []
        self.asked, self.go = threading.Event(), threading.Event()

    def submit(self, graph: TransferGraph) -> int | None:
        if graph.ops[0].kind is OpKind.DISK_READ:
            self.asked.set()
            if not self.go.is_set():
                self._held.append(graph)
                return 1
        return self._plane.submit(graph)

    def poll(self) -> list[OpResult]:
        while self.go.is_set() and self._held:
            self._plane.submit(self._held.pop(0))
        return self._plane.poll()

    def close(self, deadline_s: float) -> bool:
        return self._plane.close(deadline_s)


@pytest.fixture
def slow(worlds: Callable[..., World], tmp_path: Any) -> Iterator[tuple[World, PageBatches, HeldReads]]:
    """Makes a world (one rank's pool and cache) in which pages 1 to 3 are only on disk, and reads from disk are held
    back.
    """
    settings = {"disk__folders": str(tmp_path), "disk__bytes_per_folder": 4 << 20}
    first = worlds(**settings)
    first.store(hashes_of(1, 2, 3), [1, 2, 3])
    first.cache.close()
    world = worlds(**settings)
    planes = world.cache._unit.driver._planes
    held = HeldReads(planes[DISK])
    planes[DISK] = held
    batches = PageBatches(world.cache, LONG_S)
    yield world, batches, held
    held.go.set()
    batches.close()


@contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs `call` in a thread during the `with` block. After the block, the yielded list contains the call's result."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    yield answers
    thread.join(LONG_S)
    assert not thread.is_alive(), "the call never returned"


@pytest.mark.parametrize("what", ["exists", "load"])
def test_stores_and_lookups_go_on_while_a_lookup_waits_for_its_disk(slow: Any, what: str) -> None:
    world, batches, disk = slow
    page = world.page(1)

    def ask() -> Any:
        if what == "exists":
            return batches.exists(hashes_of(1, 2, 3))
        return batches.load(hashes_of(1, 2, 3), blocks([20, 21, 22])).tolist()

    with in_thread(ask) as answers:
        assert disk.asked.wait(LONG_S)
        with in_thread(lambda: batches.store(hashes_of("new"), blocks([5])).tolist()) as stored:
            pass
        assert stored == [[True]]
        with in_thread(lambda: batches.exists(hashes_of("new", "absent"))) as found:
            pass
        assert found == [1]
        assert answers == [], "the disk has given nothing yet"
        disk.go.set()
    assert answers == [3] if what == "exists" else answers == [[True, True, True]]
    if what == "load":
        assert torch.equal(world.page(20), page)
    world.cache.manager.check_integrity()


def test_a_lookup_whose_storage_is_closed_meanwhile_finds_nothing(slow: Any) -> None:
    _, batches, disk = slow
    with in_thread(lambda: batches.load(hashes_of(1, 2, 3), blocks([20, 21, 22])).tolist()) as answers:
        assert disk.asked.wait(LONG_S)
        disk.go.set()
        batches.close()
    assert answers in ([[False, False, False]], [[True, True, True]]), (
        "it came up before the close, or not at all"
    )
    with pytest.raises(ClosedError, match="was closed"):
        batches.exists(hashes_of(1))


def test_new_weights_while_a_lookup_waits_are_a_miss(slow: Any) -> None:
    _, batches, disk = slow
    with in_thread(lambda: batches.exists(hashes_of(1, 2, 3))) as answers:
        assert disk.asked.wait(LONG_S)
        batches.new_weights()
        disk.go.set()
    assert answers == [0]


def test_what_was_stored_goes_to_disk_without_further_calls(slow: Any) -> None:
    world, batches, _ = slow
    assert batches.store(hashes_of("new"), blocks([5])).tolist() == [True]
    ends_s = time.monotonic() + LONG_S
    while True:
        with batches.lock:
            if len(disk_tier(world.cache.manager)) == 4:
                break
        assert time.monotonic() < ends_s, "nothing is written"
        time.sleep(0.001)


@pytest.mark.parametrize("fails_requests", [False, True])
def test_a_load_that_did_not_run_costs_its_own_pages_alone(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, fails_requests: bool
) -> None:
    """If a load of some pages of a batch cannot run, only these pages fail; other pages are still promised. In the
    control, the engine ends requests whose load fails, so nothing is promised for a while.
    """
    world = worlds(fails_requests=fails_requests, load__deadline_s=0.5)
    batches = PageBatches(world.cache, LONG_S)
    assert batches.store(hashes_of(1, 2), blocks([1, 2])).all()
    assert batches.store(hashes_of(7, 8), blocks([7, 8])).all()
    with monkeypatch.context() as full:
        full.setattr(world.cache._ops.engine, "submit", lambda *graph, **after: None)
        assert not batches.load(hashes_of(1, 2), blocks([4, 5])).any()
    assert batches.exists(hashes_of(7, 8)) == (0 if fails_requests else 2)
    batches.close()
