"""Lazy stores skip some blocks, although the blocks are free and have a hash. The engine may also reuse blocks before
they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flexkv.cache.base import NO_ENTRY
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.stores.lazy import LazyStores
from flexkv.observe import Counters
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL, STALL

Make = Callable[..., MiniEngine]
D2H = 1
PROMPT = list(range(100, 123))
LAZY = {"store.mode": "lazy", "store.max_reference_share": 1.0}


def stored_after_pressure(engine: MiniEngine) -> int:
    """Fills the engine's pool until its free queue begins with the blocks of earlier requests. Returns the number of
    pages that are stored by then.
    """
    filler = make_request([*range(23)], "filler", extra_args={"flexkv.skip_save": True})
    engine.add(filler)
    engine.step()
    engine.finish("filler")
    engine.step({})
    engine.drain()
    return int(engine.unit.manager.stats().stored_pages)


@pytest.mark.parametrize(("skip", "pages"), [(True, 0), (False, 5)])
def test_what_a_caller_wants_kept_out_stays_out(make_engine: Make, skip: bool, pages: int) -> None:
    engine = make_engine(blocks=13, **LAZY)
    engine.run(make_request(PROMPT, "one", extra_args={"flexkv.skip_save": skip}))
    assert stored_after_pressure(engine) == pages


@pytest.mark.parametrize(("computed", "pages"), [(None, 5), (8, 2), (3, 0)])
def test_a_preempted_request_leaves_only_what_was_computed(
    make_engine: Make, computed: int | None, pages: int
) -> None:
    engine = make_engine(blocks=13, **LAZY)
    request = make_request(PROMPT, "one")
    engine.add(request)  # from this line on, all of the request's blocks have their hashes
    engine.step({"one": computed or request.num_tokens})
    engine.preempt("one")
    assert stored_after_pressure(engine) == pages


def test_a_store_that_failed_is_offered_again(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=D2H, nth_op=0))
    engine = make_engine(blocks=13, worker_class=worker, **LAZY)
    engine.run(make_request(PROMPT, "one"))
    stored_after_pressure(engine)
    assert worker.movers[0].acted > 0
    engine.step({})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages == 5


def test_what_the_host_tier_has_lost_is_offered_again(make_engine: Make) -> None:
    engine = make_engine(blocks=13, **LAZY)
    engine.run(make_request(PROMPT, "one"))
    assert stored_after_pressure(engine) == 5
    manager, keys = engine.unit.manager, engine.keys_of(make_request(PROMPT, "probe"))
    assert manager.match("probe", [keys], 0).blocks == 5
    manager.release("probe")
    assert manager.forget(0, keys) == 5
    engine.step({})
    assert not engine.side.has_work, "an idle engine must come to rest, whatever the tier loses"
    engine.pool.get_new_blocks(1)  # the head of the free queue moves to the next block
    engine.step({})
    engine.drain()
    assert manager.match("probe", [keys], 0).blocks == 5


def test_a_small_host_tier_does_not_store_the_same_over_and_over(make_engine: Make) -> None:
    """If the engine's free queue is longer than the host tier, lazy stores do not store the same pages again and again.
    A step in which nothing changes plans no store.
    """
    slot = make_engine(blocks=13, **LAZY).unit.pool.slot_bytes
    engine = make_engine(blocks=13, **LAZY | {"host.bytes": 4 * slot})
    assert engine.unit.slots == 4
    engine.run(make_request(PROMPT, "one"))
    stored_after_pressure(engine)
    before = engine.unit.manager.stats().stored_pages
    for _ in range(5):
        engine.step({})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages == before


@pytest.mark.parametrize(("share", "missed"), [(1.0, 0), (0.17, 3)])
def test_what_the_engine_evicts_before_it_found_a_place_is_counted(
    make_engine: Make, share: float, missed: int
) -> None:
    """flexkv counts the pages whose blocks the engine reuses before flexkv could store them. With the smaller share,
    only two of five blocks may have a store in flight when the engine reuses all of them.
    """
    engine = make_engine(blocks=13, **LAZY | {"store.max_reference_share": share})
    engine.run(make_request(PROMPT, "one"))
    filler = make_request([*range(23)], "filler", extra_args={"flexkv.skip_save": True})
    engine.add(filler)
    engine.step({})  # leaves five blocks with a hash at the head of the free queue
    taken = engine.pool.get_new_blocks(6)
    engine.step({})
    engine.pool.free_blocks(taken)
    engine.step({})
    engine.drain()
    assert engine.stored_pages == 5 - missed
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == missed


def test_waiting_for_room_counts_one_lookup(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    engine.side.take_counters()
    for _ in range(3):
        assert engine.side.match(request, 0) == (20, True)
    counters = Counters(engine.side.take_counters())
    assert counters.value("flexkv_lookup_tokens_total") == len(PROMPT) - 1
    assert counters.value("flexkv_hit_tokens_total") == 0


def _pages_in_neither(make_engine: Make) -> list[int]:
    """Lets the engine allocate as many blocks as one step can compute, right after a request's end, before the
    connector has looked at the free queue. Returns the numbers of the request's pages that are neither in the engine's
    own prefix cache nor stored.
    """
    engine = make_engine(blocks=7, **LAZY | {"store.max_reference_share": 0.2})
    request = make_request(PROMPT, "one")
    engine.add(request)
    engine.step()
    engine.finish("one")
    engine.add(make_request([*range(16)], "two", extra_args={"flexkv.skip_save": True}))
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    manager, keys = engine.unit.manager, engine.keys_of(request)
    assert isinstance(manager, LocalCacheManager)
    stored = manager.hub.index.find(0, keys) != NO_ENTRY
    own = [engine.pool.get_cached_block(block_hash, [0]) is not None for block_hash in request.block_hashes]
    lost = [number for number, known in enumerate(own) if not known and not stored[number]]
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == len(lost), "each is counted"
    return lost


def test_what_the_next_step_may_be_handed_is_stored_at_a_requests_end(make_engine: Make) -> None:
    assert _pages_in_neither(make_engine) == []


def test_control_what_nobody_looked_at_is_lost(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyStores, "_plan_end", lambda self, request: None)
    assert _pages_in_neither(make_engine) == [2, 3, 4]


@pytest.mark.parametrize(("taken", "lost"), [(0, 0), (6, 5)])
def test_what_a_preempted_request_loses_is_counted(make_engine: Make, taken: int, lost: int) -> None:
    engine = make_engine(blocks=7, **LAZY)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    live = engine._lose_blocks("one")
    others = engine.pool.get_new_blocks(taken)
    engine._step_naming_preempted("one")
    assert engine.counters.value("flexkv_dropped_store_pages_total", reason="preempted") == lost
    engine.pool.free_blocks(others)
    engine.side.finished(live.request)


def _offers_to_a_full_queue(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Fills a rank's queue with one store that stalls, and runs eight steps. Returns how many stores these steps plan,
    and how many pages are stored after the stalled store has ended.
    """
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make_engine(blocks=12, worker_class=worker, **LAZY, **{"transfer.queue_ops": 1})
    for number in range(6):
        engine.add(make_request(range(100 * number, 100 * number + 11), f"r{number}"))
        engine.step()
        engine.finish(f"r{number}")
        engine.step({})
    assert worker.movers[0].wait_stalled(1, 10)
    engine.step({})
    offered: list[int] = []
    begin_store = engine.unit.manager.begin_store

    def noted(request_id: str, group: int, keys: Any, *rest: Any) -> Any:
        offered.append(len(keys))
        return begin_store(request_id, group, keys, *rest)

    monkeypatch.setattr(engine.unit.manager, "begin_store", noted)
    for _ in range(8):
        engine.step({})
    found = len(offered)
    worker.movers[0].release()
    for _ in range(4):
        engine.drain()
        engine.step({})
    engine.drain()
    return found, engine.stored_pages


def test_a_full_queue_is_offered_nothing_until_a_store_has_ended(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers, stored = _offers_to_a_full_queue(make_engine, monkeypatch)
    assert offers == 0
    assert stored > 2


def test_control_without_the_wait_each_step_plans_a_store(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LazyStores, "places", 100)
    offers, _ = _offers_to_a_full_queue(make_engine, monkeypatch)
    assert offers == 8


LONG = list(range(1000, 1083))
SHORT = [list(range(100 * number, 100 * number + 23)) for number in range(20, 24)]


def _before_a_long_load(make_engine: Make, **options: Any) -> MiniEngine:
    """Returns an engine with 29 usable blocks that has stored all of LONG and no page of SHORT. SHORT's blocks are in
    the free queue, behind the nine blocks that two steps may use. A load of LONG takes these nine blocks and 12 of
    SHORT's.
    """
    engine = make_engine(blocks=30, **LAZY | options)
    stores = engine.side._stores
    assert isinstance(stores, LazyStores)
    engine.run(make_request(LONG, "one"))
    ahead, stores._ahead = stores._ahead, 100
    for _ in range(5):
        engine.step({})
        engine.drain()
    stores._ahead = ahead
    engine.forget()
    for number, prompt in enumerate(SHORT):
        engine.run(make_request(prompt, f"s{number}"))
    assert engine.stored_pages == 20
    return engine


def _in_neither(engine: MiniEngine) -> int:
    """Returns how many of SHORT's pages are neither in the engine's own prefix cache nor in flexkv's cache."""
    engine.drain()
    count = 0
    for number, prompt in enumerate(SHORT):
        request = make_request(prompt, f"asks-{number}")
        cached = engine.unit.manager.known(0, engine.keys_of(request))
        own = [
            engine.pool.get_cached_block(block_hash, [0]) is not None for block_hash in request.block_hashes
        ]
        count += sum(not here and not there for here, there in zip(own, cached, strict=True))
    return count


def test_what_a_long_load_is_handed_is_stored_before(make_engine: Make) -> None:
    """Before a long load takes blocks from the free queue, flexkv stores their content. The load waits one step for
    this.
    """
    engine = _before_a_long_load(make_engine)
    again = make_request(LONG, "two")
    assert engine.side.match(again, 0) == (None, False)
    engine.step({})
    assert engine.side.match(again, 0) == (80, True)
    engine.add(again)
    engine.end_load("two")
    engine.check("two")
    assert _in_neither(engine) == 0
    assert engine.stored_pages >= 20 + 12
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == 0


def test_control_what_nobody_looked_at_before_a_load_is_lost(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LazyStores, "plan_before_load", lambda self, blocks: None)
    engine = _before_a_long_load(make_engine)
    engine.add(make_request(LONG, "two"))
    assert _in_neither(engine) == 12
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == 12


def test_what_a_long_load_takes_before_there_was_room_is_counted(make_engine: Make) -> None:
    """A long load takes blocks before all of them could be stored; flexkv counts the lost pages. Four blocks may have a
    store in flight. The first store of SHORT's blocks, which is the sixth store because LONG took five, stalls until
    the worker gives it up.
    """
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=5))
    engine = _before_a_long_load(make_engine, worker_class=worker, **{"store.max_reference_share": 0.14})
    engine.add(make_request(LONG, "two"))
    engine.step({})
    worker.movers[0].release()
    engine.end_load("two")
    engine.check("two")
    lost = _in_neither(engine)
    assert lost > 0
    counted = ("flexkv_lazy_missed_pages_total", "flexkv_unpublished_pages_total")
    assert sum(engine.counters.value(name) for name in counted) == lost


@pytest.mark.parametrize("refused", [False, True])
def test_what_finds_no_slot_beside_what_is_cached_is_counted(make_engine: Make, refused: bool) -> None:
    """Two of the request's five blocks are already cached. With `refused`, the manager allows no store in flight. So
    the other three blocks are not stored, and flexkv counts them as missed.
    """
    engine = make_engine(blocks=13, **LAZY)
    engine.run(make_request(PROMPT, "one"))
    manager = engine.unit.manager
    assert isinstance(manager, LocalCacheManager)
    assert stored_after_pressure(engine) == 5
    engine.forget()
    if refused:
        manager._limits = replace(manager._limits, inflight_store_pages=0)
    two = make_request([*PROMPT[:8], *range(500, 515)], "two")
    two.skip_reading_prefix_cache = True
    assert engine.run(two) == 0
    filler = make_request([*range(23)], "filler", extra_args={"flexkv.skip_save": True})
    engine.add(filler)
    engine.step({})
    taken = engine.pool.get_new_blocks(6)
    engine.step({})
    engine.pool.free_blocks(taken)
    engine.drain()
    assert engine.counters.value("flexkv_lazy_missed_pages_total") == (3 if refused else 0)
