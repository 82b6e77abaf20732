"""Tests the disk tier with the scheduler's and the worker's side of the connector and real slabs: an engine finds the
pages that an earlier engine stored.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.c_ext import eviction_policies
from flexkv.errors import FlexKVError
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpKind
from tests import testing_ext
from tests.unit.adapters.disk_engines import PROMPT, SLAB_BYTES, Make, in_turn, spoil, stop_disks
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.cache.disk_world import chain, disk_tier
from tests.unit.transfer.transfer_world import STALL


def prompt(number: int) -> list[int]:
    return [number * 1000 + token for token in range(23)]


@pytest.fixture
def make_disk_engine(make_engine: Make, tmp_path: Path) -> Make:
    """Returns a function that makes engines with a disk tier in the test's folder. Each call first closes the engine
    that the previous call made.
    """
    return in_turn(make_engine, tmp_path, role=EngineRole())


def test_a_new_engine_serves_what_the_last_one_stored(make_disk_engine: Make) -> None:
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "one")) == 0
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert engine.run(make_request([*PROMPT[:12], 7, 7, 7, 7, 7], "three")) == 12
    assert engine.counters.data["flexkv_disk_pages_total"]["read"] == 5


def test_a_store_that_ends_while_the_engine_ends_is_kept(make_disk_engine: Make) -> None:
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=int(OpKind.D2H)))

    class Ending(slow):  # type: ignore[misc,valid-type]
        def close_lanes(self) -> None:
            self.movers[self.rank].release()
            super().close_lanes()

    engine = make_disk_engine(worker_class=Ending)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert slow.movers[0].wait_stalled(1, 60.0)
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "two")) == 20


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("ranks", "remote"), [(1, True), (2, True), (2, False)])
def test_ranks_share_one_page(make_disk_engine: Make, ranks: int, remote: bool, verify: bool) -> None:
    settings = {"ranks": ranks, "remote": remote, "host.verify": verify}
    engine = make_disk_engine(**settings)
    engine.run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**settings)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert engine.counters.data["flexkv_disk_pages_total"]["read"] == 5


@pytest.mark.parametrize("mode", ["through", "back", "evict"])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_every_mode_keeps_everything_over_an_orderly_end(
    make_disk_engine: Make, mode: str, load: str
) -> None:
    settings = {"disk.mode": mode, "load.mode": load}
    engine = make_disk_engine(**settings)
    for number in range(3):
        engine.run(make_request(prompt(number), f"a{number}"))
    engine = make_disk_engine(**settings)
    for number in range(3):
        assert engine.run(make_request(prompt(number), f"b{number}")) == 20


@pytest.mark.parametrize("mode", ["through", "back", "evict"])
def test_what_leaves_host_memory_is_served_from_disk(make_disk_engine: Make, mode: str) -> None:
    # One slot in 16 is kept free for a burst of stores. A burst can only use slots that are free when it begins, so the
    # mode "evict" needs a larger tier in this test.
    size = "1MiB" if mode == "evict" else "128KiB"
    engine = make_disk_engine(**{"disk.mode": mode, "host.bytes": size})
    slots = engine.unit.slots
    prompts = 2 * slots // 5
    for number in range(prompts):
        engine.run(make_request(prompt(number), f"a{number}"))
        engine.forget()
    served = []
    for number in range(prompts):
        served.append(engine.run(make_request(prompt(number), f"b{number}")))
        engine.forget()
    if mode == "evict":
        # If many pages are evicted at once, some are not written in time. The pages that were written are served.
        assert sum(served) > 0.5 * 20 * prompts
    else:
        assert served == [20] * prompts
    assert engine.counters.data["flexkv_disk_pages_total"]["read"] > slots


def test_the_engine_is_asked_to_wait_and_does_not_pay_for_it(
    make_disk_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    manager = engine.unit.manager
    request = make_request(PROMPT, "two")
    stop_disks(engine, monkeypatch)
    lookups = manager.stats().lookups
    assert engine.side.match(request, 0) == (None, False)
    assert manager.stats().lookups == lookups + 1
    for _ in range(50):
        assert engine.side.match(request, 0) == (None, False)
        assert engine.side.has_work
    assert manager.stats().lookups == lookups + 1, "a request that waits is not looked up again"
    monkeypatch.undo()
    assert engine.run(request) == 20


def test_a_request_that_ends_while_it_waits_leaves_nothing(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    request = make_request(PROMPT, "two")
    assert engine.side.match(request, 0) == (None, False)
    engine.side.finished(request)
    engine.drain()
    manager = engine.unit.manager
    manager.check_integrity()
    assert manager.tables.requests.waits == {}
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_disk_that_takes_too_long_is_not_waited_for(
    make_disk_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**{"disk.wait_s": 0.05})
    stop_disks(engine, monkeypatch)
    request = make_request(PROMPT, "two")
    assert engine.side.match(request, 0) == (None, False)
    time.sleep(0.06)
    assert engine.side.match(request, 0) == (0, False)
    monkeypatch.undo()
    engine.side.finished(request)
    engine.drain()
    assert engine.counters.data["flexkv_disk_lookups_total"] == {"waited": 1, "late": 1}
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_damaged_slab_is_computed_again(make_disk_engine: Make, tmp_path: Path) -> None:
    engine = make_disk_engine()
    for number in range(4):
        engine.run(make_request(prompt(number), f"a{number}"))
    engine.close()
    # Damages the pages of some prompts only.
    spoil(tmp_path, range(2, 9))
    engine = make_disk_engine()
    answers = [engine.run(make_request(prompt(number), f"b{number}")) for number in range(4)]
    assert any(tokens < 20 for tokens in answers)
    assert any(tokens == 20 for tokens in answers)
    assert engine.counters.data["flexkv_disk_failed_pages_total"]["read"] > 0
    engine.forget()
    assert [engine.run(make_request(prompt(number), f"c{number}")) for number in range(4)] == [20] * 4


def test_a_reset_reaches_the_disk(make_disk_engine: Make) -> None:
    engine = make_disk_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.side.reset()
    assert engine.run(make_request(PROMPT, "two")) == 0
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20
    # After a reset, no other process can identify the weights that are now in use. So a later engine does not find the
    # pages that this engine stored after the reset.
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "four")) == 0
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "five")) == 20


def test_a_crash_before_the_next_start_brings_nothing_back_after_a_reset(make_disk_engine: Make) -> None:
    engine = make_disk_engine()
    engine.run(make_request(PROMPT, "one"))
    request = make_request(prompt(1), "two")
    engine.add(request)
    engine.step()
    assert engine.side.reset()
    assert disk_tier(engine.unit.manager).pages.epoch % 2 == 1
    engine.finish("two")
    engine.drain()
    engine = make_disk_engine()
    assert engine.run(make_request(PROMPT, "three")) == 0


def test_a_partial_tail_comes_back(make_disk_engine: Make) -> None:
    engine = make_disk_engine(**{"store.partial_blocks": True})
    engine.run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**{"store.partial_blocks": True})
    assert engine.run(make_request([*PROMPT, 1, 2, 3], "two")) == len(PROMPT)


def test_two_engines_do_not_share_a_unit(make_disk_engine: Make, make_engine: Make, tmp_path: Path) -> None:
    make_disk_engine()
    with pytest.raises(FlexKVError, match="in use"):
        make_engine(**{"disk.folders": str(tmp_path), "disk.bytes_per_folder": SLAB_BYTES})


def test_pages_expire(make_disk_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_disk_engine(**{"disk.ttl_s": 3600}).run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**{"disk.ttl_s": 3600})
    manager = engine.unit.manager
    disk_tier(manager)._unix_s = manager.tables.unix_s = lambda: time.time() + 3601
    assert engine.run(make_request(PROMPT, "two")) == 0
    assert engine.counters.data["flexkv_disk_expired_pages_total"][""] == 5


def test_a_requests_time_to_live_survives_the_engine(
    make_disk_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = make_request(PROMPT, "one", extra_args={"flexkv.ttl_s": 3600})
    make_disk_engine().run(timed)
    assert make_disk_engine().run(make_request(PROMPT, "two", extra_args={"flexkv.skip_save": True})) == 20
    engine = make_disk_engine()
    manager = engine.unit.manager
    late = lambda: time.time() + 3600  # noqa: E731
    monkeypatch.setattr(disk_tier(manager), "_unix_s", late)
    monkeypatch.setattr(manager.tables, "unix_s", late)
    assert engine.run(make_request(PROMPT, "three")) == 0
    assert engine.counters.data["flexkv_disk_expired_pages_total"][""] == 5


def test_metrics_say_what_the_disks_did(make_disk_engine: Make) -> None:
    engine = make_disk_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.until(lambda: not engine.unit.manager.work.busy)
    engine.step({})
    data = engine.counters.data
    assert data["flexkv_disk_pages_total"] == {"write": 5}
    assert data["flexkv_disks"] == {"": 1}
    assert data["flexkv_disk_slots_used"] == {"": 5}
    assert data["flexkv_disk_slots"][""] > 5


def test_a_hit_says_which_tier_supplied_it(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    for name, source in (("two", CacheHitSource.DISK), ("three", CacheHitSource.HOST)):
        request = make_request(PROMPT, name)
        assert engine.add(request) == 20
        assert engine.side.supplied(request, 20) == {source: 20}
        assert engine.side.supplied(request, 16) == {}, "of another number of tokens nothing is known"
        engine.drain()
    engine.step({})
    assert engine.counters.data["flexkv_hit_blocks_total"] == {"disk": 5, "host": 5}
    assert engine.side.supplied(make_request(PROMPT, "nobody"), 20) == {}


def test_the_pace_of_the_engine_and_of_the_disk_is_measured(make_disk_engine: Make) -> None:
    long, share = list(range(97)), {"store.max_reference_share": 1.0}
    engine = make_disk_engine(**share)
    engine.run(make_request(long, "one"))
    engine = make_disk_engine(**share)
    assert engine.run(make_request(long, "two")) == 96
    engine.run(make_request([7, *long[1:]], "three"))
    rates = engine.unit.manager.cost
    assert (rates.fetch(DISK).samples, rates.load.samples, rates.compute.samples) == (1, 1, 1)
    gauges = engine.counters.data
    assert gauges["flexkv_disk_page_seconds"]["read"] > 0
    assert gauges["flexkv_compute_token_seconds"][""] > 0


@pytest.mark.parametrize("policy", eviction_policies())
def test_eviction_policy_of_the_settings_decides_what_leaves(make_disk_engine: Make, policy: str) -> None:
    engine = make_disk_engine(**{"index.policy": policy})
    engine.run(make_request(PROMPT, "one"))
    index = engine.unit.manager.hub.presence
    entries = index.take_coldest(0, 100)
    found_later = set(map(bytes, index.keys_of(entries)))
    index.unpin(entries)
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    engine.run(make_request(prompt(7), "three"))
    evicted = set(map(bytes, index.evict(0, len(found_later))))
    assert len(evicted) == 5
    assert (evicted == found_later) == (policy == "lru")


@pytest.mark.parametrize("compute_if_faster", [True, False])
def test_what_the_engine_computes_sooner_is_left_to_it(
    make_disk_engine: Make, compute_if_faster: bool
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**{"disk.compute_if_faster": compute_if_faster})
    rates, now_s = engine.unit.manager.cost, time.monotonic()
    for n in range(1, 9):
        rates.fetch(DISK).see(n, 100.0 * n, now_s)
        rates.compute.see(n, 1e-6 * n, now_s)
    assert engine.run(make_request(PROMPT, "two")) == (0 if compute_if_faster else 20)
    left = 5 if compute_if_faster else 0
    assert engine.counters.data.get("flexkv_disk_left_pages_total", {}).get("", 0) == left
    # The pages that the engine computed are now in host memory, and are served from it.
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


@pytest.mark.parametrize("held", [True, False], ids=["room is held", "control: there is room"])
def test_a_prompt_waits_for_room_and_what_goes_without_is_counted(
    make_disk_engine: Make, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine(**{"disk.wait_s": 3.0})
    manager, index, clock_s = engine.unit.manager, engine.unit.manager.hub.presence, [0.0]
    monkeypatch.setattr(manager.tables, "clock", lambda: clock_s[0])
    engine.until(lambda: not engine.unit.growing)
    if held:
        assert len(index.insert(0, chain(index.up_slots(0)), index.up_slots(0))[1]) == index.up_slots(0)
    request = make_request(PROMPT, "two")
    asked = 0
    while (answer := engine.side.match(request, 0)) == (None, False):
        clock_s[0] += 0.25
        asked += 1
        engine.step({})
    assert answer == ((0, False) if held else (20, True))
    engine.unit.count(engine.counters)
    assert engine.counters.data.get("flexkv_no_room_pages_total", {}) == ({"disk": 5} if held else {})
    assert engine.counters.data["flexkv_disk_lookups_total"].get("no_room", 0) == held
    assert not held or asked == 13, "3 s in steps of a quarter, and one more"


def test_slots_of_a_disk_that_is_out_of_use_are_not_counted(make_disk_engine: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = make_disk_engine(**{"disk.folders": [str(tmp_path / "good"), str(tmp_path / "file" / "bad")]})
    engine.run(make_request(PROMPT, "one"))
    engine.step({})
    slots = disk_tier(engine.unit.manager).volumes.slots(0)
    assert engine.counters.data["flexkv_disks"] == {"": 1}
    assert engine.counters.data["flexkv_disk_slots"] == {"": slots // 2}
