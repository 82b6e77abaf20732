"""Tests loads and stores that bypass host memory, between disk and SGLang's pool. The user must enable them explicitly,
because a page that fails to load costs its request.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.sglang import load_batches
from flexkv.adapters.sglang.load_batches import QueuedLoad
from flexkv.adapters.sglang.page_batches import PageBatches
from flexkv.config import DiskConfig
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import RequestSettings
from flexkv.transfer.graph import FailureCause, OpId, OpResult, OpStatus
from tests.unit.adapters.disk_engines import spoil

from .conftest import LAYERS, PAGE_TOKENS, World, blocks, hashes_of

WAIT_S = 60.0
PAGES = [5, 9, 2, 7]
TARGETS = [30, 31, 17, 20]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    disk: dict[str, Any] = {
        "disk__folders": str(folder),
        "disk__bytes_per_folder": "4MiB",
        "disk__compute_if_faster": False,
        "disk__gds": "on",
        "disk__gds_may_fail_requests": True,
    }
    return disk | more


def counts(world: World) -> tuple[int, int]:
    """Returns the number of pages that were loaded, and the number that were stored, without passing through host
    memory.
    """
    disk = world.cache.manager.tiers[1].counts
    return disk.gds_read, disk.gds_written


def restarted(worlds: Any, folder: Path, **more: Any) -> tuple[World, list[torch.Tensor]]:
    """Returns a rank with four pages that are only on disk, and the content of these pages."""
    first = worlds(**settings(folder, **more))
    contents = [first.page(page) for page in PAGES]
    assert first.store(hashes_of(*PAGES), PAGES)
    first.cache.close()
    second = worlds(**settings(folder, **more))
    second.pool[:, :, PAGE_TOKENS:] = 7.0
    return second, contents


def load(world: World, rid: str = "r") -> tuple[int, bool]:
    """Looks the pages up, loads them, and waits for each layer. Returns how many pages were found, and whether all of
    them arrived."""
    keys = world.cache.keys(hashes_of(*PAGES))
    found = world.cache.match(rid, keys, 0.0)
    index = world.loads.start({rid: QueuedLoad(keys[:found], blocks(TARGETS[:found]))}, None)
    world.loads.set_consumer(index)
    for layer in range(LAYERS):
        world.loads.wait_until(layer)
    return found, world.loads.finish(index)


@pytest.mark.parametrize("stores", [False, True])
def test_pages_on_disk_are_loaded_without_host_memory(worlds: Any, tmp_path: Path, stores: bool) -> None:
    world, contents = restarted(worlds, tmp_path, disk__gds_stores=stores)
    assert load(world) == (4, True), "promised at once, without a wait"
    assert counts(world) == (4, 0)
    for page, content in zip(TARGETS, contents, strict=True):
        assert torch.equal(world.page(page), content)
    assert bool((world.page(1) == 7.0).all())


def test_host_pages_by_layer_and_those_on_disk_in_one_load(worlds: Any, tmp_path: Path) -> None:
    world, contents = restarted(worlds, tmp_path)
    world.pool[:, :, 5 * PAGE_TOKENS : 6 * PAGE_TOKENS] = contents[0]
    assert world.store(hashes_of(PAGES[0]), [5]), "now in host memory too"
    assert load(world) == (4, True)
    assert counts(world)[0] == 3
    for page, content in zip(TARGETS, contents, strict=True):
        assert torch.equal(world.page(page), content)


def test_a_damaged_page_fails_its_request_by_name_and_is_computed_next_time(
    worlds: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, _ = restarted(worlds, tmp_path)
    spoil(tmp_path, [1])
    with caplog.at_level(logging.WARNING):
        found, arrived = load(world)
    assert (found, arrived) == (4, False), "the engine ends the request, and never uses what came"
    assert "disk miss (data)" in caplog.text
    assert counts(world)[0] == 3
    after, arrived = load(world, "again")
    assert after < 4, "the bad page is forgotten"
    assert arrived


def test_control_bytes_of_a_failed_load_are_wrong(worlds: Any, tmp_path: Path) -> None:
    """The control: after a failed load, the target pages hold other bytes than the stored pages."""
    world, contents = restarted(worlds, tmp_path)
    spoil(tmp_path)
    assert load(world) == (4, False)
    assert not any(
        torch.equal(world.page(page), content) for page, content in zip(TARGETS, contents, strict=True)
    )


def test_without_the_opt_in_pages_come_through_host_memory(
    worlds: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, contents = restarted(
        worlds, tmp_path, disk__gds_may_fail_requests=DiskConfig().gds_may_fail_requests
    )
    assert "disk.gds=on is off here" in caplog.text
    assert "disk.gds_may_fail_requests" in caplog.text
    assert world.cache.match("r", world.cache.keys(hashes_of(*PAGES)), WAIT_S) == 4
    assert load(world) == (4, True)
    assert counts(world) == (0, 0)
    assert torch.equal(world.page(TARGETS[0]), contents[0])


def test_what_a_resting_way_does_not_bring_comes_through_host_memory(worlds: Any, tmp_path: Path) -> None:
    """If flexkv stops using GDS between a promise and its load, because another load failed, the pages are loaded
    through host memory.
    """
    world, contents = restarted(worlds, tmp_path)
    keys = world.cache.keys(hashes_of(*PAGES))
    assert world.cache.match("r", keys, 0.0) == 4
    straight = world.cache.manager.tiers[1].straight
    assert straight is not None
    straight.source_failed("as if a disk had failed")
    index = world.loads.start({"r": QueuedLoad(keys, blocks(TARGETS))}, None)
    assert world.loads.finish(index)
    assert counts(world)[0] == 0
    assert torch.equal(world.page(TARGETS[3]), contents[3])


def fail_load(world: World, rid: str, cause: FailureCause) -> None:
    """Makes the load that was promised to `rid` fail at all pages."""
    graph = world.cache.manager.begin_load(rid, [blocks(TARGETS)])
    assert graph is not None
    (op,) = graph.ops
    failed, causes = np.arange(op.pages, dtype=np.int32), np.full(op.pages, cause, np.uint8)
    cancelled = cause is FailureCause.NOT_EXECUTED
    status = OpStatus.CANCELLED if cancelled else OpStatus.FAILED
    world.cache.manager.complete(0, OpResult(op.op_id, status, failed, "as told", causes=causes))
    world.cache.manager.end_request(rid)


@pytest.mark.parametrize("cause", [FailureCause.SOURCE, FailureCause.TRANSPORT, FailureCause.NOT_EXECUTED])
def test_a_way_that_failed_rests_and_hits_go_on_beside_it(
    worlds: Any, tmp_path: Path, cause: FailureCause
) -> None:
    """After a failed GDS load, flexkv promises pages and loads them through host memory. The exception is a load that
    was too late. The next load may be too late as well, so nothing is promised for a while.
    """
    world, contents = restarted(worlds, tmp_path)
    world.pool[:, :, 5 * PAGE_TOKENS : 6 * PAGE_TOKENS] = contents[0]
    in_host = hashes_of("in host memory")
    assert world.store(in_host, [5])
    keys = world.cache.keys(hashes_of(*PAGES))
    assert world.cache.match("failed", keys, 0.0) == 4
    assert world.cache.match("before", keys, 0.0) == 4
    fail_load(world, "failed", cause)
    late = cause is FailureCause.NOT_EXECUTED
    index = world.loads.start({"before": QueuedLoad(keys, blocks(TARGETS))}, None)
    assert world.loads.finish(index), "what was promised before"
    assert (counts(world)[0] == 0) != late, "by host memory where the way rests"
    assert torch.equal(world.page(TARGETS[3]), contents[3])
    assert world.cache.match("other", world.cache.keys(in_host), 0.0) == (0 if late else 1)
    assert world.cache.match("again", keys, WAIT_S) == (0 if late else 4)


@pytest.mark.parametrize("last_fails", [False, True])
def test_an_offload_by_two_ways_ends_with_the_last_of_them(
    worlds: Any, tmp_path: Path, last_fails: bool
) -> None:
    """An offload may store some pages in host memory and others directly on disk. It ends when both ops have ended.
    Pages whose copy on disk is being read go to host memory.
    """
    world, _ = restarted(worlds, tmp_path, disk__gds_stores=True)
    straight = world.cache.manager.tiers[1].straight
    assert straight is not None
    straight.source_failed("as if a disk had failed")
    on_disk = hashes_of(*PAGES)
    assert world.cache.manager.match("slow", [world.cache.keys(on_disk)], 0).reads
    names = hashes_of(*PAGES, "new", "newer")
    world.offloads.add(world.cache.keys(names), blocks([*PAGES, 11, 12]), None)
    first, last = sorted(world.cache._watchers)
    ended: dict[OpId, OpResult] = {}
    give_up_s = time.monotonic() + WAIT_S
    while len(ended) < 2 and time.monotonic() < give_up_s:
        world.cache._ops.poll()
        ended |= {result.op_id: result for result in world.cache._ops.reports.take_results()}
    assert world.offloads.completed() == 0
    world.cache._end(ended[first])
    assert world.offloads.completed() == 0, "the engine would use its pages again, which are being read"
    world.cache._end(OpResult.cancelled(last, 1, "as told") if last_fails else ended[last])
    assert world.offloads.completed() == 1
    assert world.offloads.pop() is not last_fails


@pytest.mark.parametrize(("found", "waits"), [(True, [0.5, 0.0, 0.0]), (False, [0.5, 0.0, 0.0])])
def test_promises_of_one_forward_wait_for_the_disk_together(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool, waits: list[float]
) -> None:
    """All loads of one forward pass share one time limit for waiting, because the engine does nothing else during the
    wait. If one load of a forward pass is lost, all of them are, so it would be useless to wait again.
    """
    world, _ = restarted(worlds, tmp_path, load__lookup_wait_s=0.5)
    match, clock_s, waited = world.cache.match, [100.0], []

    def slow(rid: str, keys: Keys, wait_s: float, settings: RequestSettings) -> int:
        waited.append(wait_s)
        clock_s[0] += wait_s if found else 0.0
        return match(rid, keys, 0.0) if found else 0

    monkeypatch.setattr(world.cache, "match", slow)
    monkeypatch.setattr(load_batches, "time", SimpleNamespace(monotonic=lambda: clock_s[0], sleep=time.sleep))
    queued = {
        f"r{number}": QueuedLoad(world.cache.keys(hashes_of(*PAGES)), blocks(list(range(first, first + 4))))
        for number, first in enumerate((20, 24, 28))
    }
    assert world.loads.finish(world.loads.start(queued, None)) is found
    assert waited == waits


def test_hicache_answers_for_each_page(worlds: Any, tmp_path: Path) -> None:
    world, contents = restarted(worlds, tmp_path, fails_requests=False)
    spoil(tmp_path, [1])
    batches = PageBatches(world.cache, WAIT_S)
    arrived = batches.load(hashes_of(*PAGES), blocks(TARGETS))
    assert arrived.sum() == 3
    for page, content, came in zip(TARGETS, contents, arrived, strict=True):
        assert torch.equal(world.page(page), content) == came
    batches.close()
