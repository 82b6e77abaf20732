"""If there was no free slot or queue entry for a page, flexkv offers the page for storing again, while the page's
request lives and for some time after its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.adapters.vllm.store_watch import BlockWatch
from flexkv.cache.base import OpRole
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.stores.eager import PROBE_PAGES, EagerStores
from flexkv.cache.stores.holds import Hold, Holds
from flexkv.observe import PageLoss
from flexkv.observe.page_losses import NOT_STORED, reasons_of
from tests import testing_ext
from tests.unit.adapters.faulty_worker import FaultyWorker, faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request
from tests.unit.transfer.transfer_world import STALL

Make = Callable[..., MiniEngine]
D2H = 1
PAGES = 5
PROMPT = list(range(100, 100 + BLOCK_TOKENS * PAGES + 3))
MANY_STEPS = 16


def two_in_flight(make_engine: Make, **options: Any) -> tuple[MiniEngine, type[FaultyWorker]]:
    """Returns an engine that may have at most two pages in flight, and whose first store stalls until the test releases
    it.
    """
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    settings = {"blocks": 17, "worker_class": worker, "store.inflight_pages": 2} | options
    return make_engine(**settings), worker


def dropped(engine: MiniEngine) -> dict[str, int]:
    """Returns the number of pages that were computed but not stored, by reason."""
    counted = {
        reason: int(engine.counters.value("flexkv_dropped_store_pages_total", reason=reason))
        for reason in reasons_of(NOT_STORED)
    }
    return {reason: pages for reason, pages in counted.items() if pages}


def holds_of(engine: MiniEngine) -> Holds:
    holds = engine.side._stores.holds
    assert holds is not None
    return holds


def hold_three(make_engine: Make, **options: Any) -> tuple[MiniEngine, type[FaultyWorker]]:
    """Returns an engine whose request "one" has ended, with two pages in flight and three pending pages held."""
    engine, worker = two_in_flight(make_engine, **options)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    (hold,) = holds_of(engine)
    assert hold.pages == 3
    return engine, worker


def stores_whole(engine: MiniEngine) -> bool:
    """Returns whether all full blocks of the request are stored and served with the right KV."""
    engine.drain()
    engine.forget()
    found = engine.run(make_request(PROMPT, "again"))
    return found == BLOCK_TOKENS * PAGES


# --- while the request lives ---


def test_a_live_requests_blocks_need_no_room_by_share(make_engine: Make) -> None:
    engine = make_engine(blocks=17, **{"store.max_reference_share": 0.125})
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert engine.unit.manager.inflight_ops() + engine.stored_pages > 0
    engine.drain()
    assert engine.stored_pages == PAGES
    assert dropped(engine) == {}


def _wait_and_store(make_engine: Make) -> tuple[int, dict[str, int]]:
    """The stores of two pages begin at once. The other pages wait for many steps, until the first two copies are
    released. Returns the number of stored pages, and the dropped pages by reason.
    """
    engine, worker = two_in_flight(make_engine)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    for _ in range(3 * MANY_STEPS):
        engine.step({"one": 0})
    worker.movers[0].release()
    for _ in range(PAGES):
        engine.drain()
        engine.step({"one": 0})
    engine.drain()
    return engine.stored_pages, dropped(engine)


def test_pages_wait_for_room_while_their_request_lives(make_engine: Make) -> None:
    assert _wait_and_store(make_engine) == (PAGES, {})


def test_control_a_request_that_gives_up_loses_pages(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, tries = EagerStores._offer, [0]

    def give_up(self: EagerStores, tracker: Any, group: int, end: int, *rest: Any) -> Any:
        tries[0] += 1
        if tries[0] > MANY_STEPS:
            tracker.tables[group].cursor = end
        return offer(self, tracker, group, end, *rest)

    monkeypatch.setattr(EagerStores, "_offer", give_up)
    stored, _ = _wait_and_store(make_engine)
    assert stored == 2


def test_a_step_without_room_makes_one_small_offer(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no further page may be in flight, a step offers only a few pages for storing. It offers no more if more pages
    are pending or if more requests have pending pages.
    """
    blocks = 4 * PROBE_PAGES
    engine, worker = two_in_flight(make_engine, blocks=5 * blocks, **{"host.bytes": "32MiB"})
    for name in range(4):
        engine.add(make_request(range(1000 * name, 1000 * name + blocks * BLOCK_TOKENS), f"r{name}"))
    engine.step()
    offers: list[int] = []
    begin_store = engine.unit.manager.begin_store

    def noted(request_id: str, group: int, keys: Any, *rest: Any, **named: Any) -> Any:
        offers.append(len(keys))
        return begin_store(request_id, group, keys, *rest, **named)

    monkeypatch.setattr(engine.unit.manager, "begin_store", noted)
    engine.step({f"r{name}": 0 for name in range(4)})
    assert offers == [PROBE_PAGES]
    worker.movers[0].release()


def test_pending_pages_of_a_preempted_request_are_counted(make_engine: Make) -> None:
    engine, worker = two_in_flight(make_engine)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.preempt("one")
    assert dropped(engine) == {"preempted": 3}
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == 2


def test_a_tail_beyond_the_share_of_unheld_blocks_is_counted(make_engine: Make) -> None:
    engine, worker = two_in_flight(
        make_engine, **{"store.max_reference_share": 0.01, "store.partial_blocks": True}
    )
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == PAGES
    assert dropped(engine) == {"reference_limit": 1}


def test_a_prompt_longer_than_the_host_tier_keeps_its_beginning(make_engine: Make) -> None:
    slot = make_engine().unit.pool.slot_bytes
    engine = make_engine(blocks=17, **{"host.bytes": 4 * slot})
    assert engine.unit.slots == 4
    engine.run(make_request(PROMPT, "one"))
    assert dropped(engine) == {"no_slot": 1}
    engine.forget()
    assert engine.run(make_request(PROMPT, "again")) == 4 * BLOCK_TOKENS


def _fill_lane(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, dict[str, int]]:
    """Fills a rank's queue with one store, which stalls for many steps and then ends. Returns the number of stores
    planned while it stalled, the number of pages stored in the end, and the lost pages.
    """
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make_engine(blocks=17, worker_class=worker, **{"transfer.queue_ops": 1})
    offers = 0
    begin_store = engine.unit.manager.begin_store

    def noted(*args: Any, **named: Any) -> Any:
        nonlocal offers
        offers += 1
        return begin_store(*args, **named)

    monkeypatch.setattr(engine.unit.manager, "begin_store", noted)
    engine.add(make_request(PROMPT, "one"))
    for _ in range(PAGES):
        engine.step({"one": BLOCK_TOKENS})
    assert worker.movers[0].wait_stalled(1, 10)
    for _ in range(MANY_STEPS):
        engine.step({"one": 0})
    found = offers
    worker.movers[0].release()
    for _ in range(PAGES):
        engine.drain()
        engine.step({"one": 0})
    engine.drain()
    engine.check("one")
    return found, engine.stored_pages, dropped(engine)


def test_a_store_for_which_a_rank_has_no_place_waits(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _fill_lane(make_engine, monkeypatch) == (1, PAGES, {})


def test_control_stores_beyond_a_ranks_places_are_lost(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerStores, "places", 100)
    offers, stored, lost = _fill_lane(make_engine, monkeypatch)
    assert offers > 1
    assert lost == {"busy": PAGES - stored}
    assert stored < PAGES


# --- after the request's end ---


def test_what_is_pending_at_the_end_is_stored_when_the_copies_before_it_end(make_engine: Make) -> None:
    engine, worker = hold_three(make_engine)
    assert engine.side.has_work, "the engine has to step on"
    for _ in range(3 * MANY_STEPS):
        engine.step({})
    worker.movers[0].release()
    assert stores_whole(engine)
    assert dropped(engine) == {}
    assert not engine.side.has_work


def test_control_without_a_hold_pending_pages_are_lost(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holds, "begin", lambda self, tracker, ends: None)
    engine, worker = two_in_flight(make_engine)
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    worker.movers[0].release()
    assert not stores_whole(engine)


def _end_six(make_engine: Make) -> tuple[int, dict[str, int]]:
    """Ends six requests while a rank's queue takes two stores and the first store stalls. Then releases the stalled
    store. Returns the number of stored pages, and the dropped pages by reason.
    """
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    settings = {"transfer.queue_ops": 2, "store.hold_s": 1000, "store.max_reference_share": 1.0}
    engine = make_engine(blocks=40, worker_class=worker, **settings)
    for number in range(6):
        engine.add(make_request(range(100 * number, 100 * number + len(PROMPT)), f"r{number}"))
        engine.step()
        engine.finish(f"r{number}")
    assert worker.movers[0].wait_stalled(1, 10)
    worker.movers[0].release()
    engine.drain()
    return engine.stored_pages, dropped(engine)


def test_ended_requests_wait_for_a_place_in_a_ranks_queue(make_engine: Make) -> None:
    assert _end_six(make_engine) == (6 * PAGES, {})


def test_control_stores_of_ended_requests_beyond_a_ranks_places_are_lost(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerStores, "places", 100)
    stored, lost = _end_six(make_engine)
    assert lost == {"busy": 6 * PAGES - stored}
    assert stored < 6 * PAGES


def test_a_tail_for_which_a_rank_has_no_place_is_counted(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, nth_op=0))
    engine = make_engine(
        blocks=17,
        worker_class=worker,
        **{"transfer.queue_ops": 1, "store.partial_blocks": True, "store.max_reference_share": 1.0},
    )
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    assert worker.movers[0].wait_stalled(1, 10)
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == PAGES
    assert dropped(engine) == {"busy": 1}


def test_an_aborted_request_is_held_too(make_engine: Make) -> None:
    """The pending pages of an aborted request are held too. The request is aborted between two steps, in the middle of
    its prompt.
    """
    engine, worker = two_in_flight(make_engine)
    engine.add(make_request(PROMPT, "one"))
    engine.step({"one": 3 * BLOCK_TOKENS})
    engine.finish("one")
    worker.movers[0].release()
    engine.drain()
    engine.forget()
    assert engine.run(make_request(PROMPT, "again")) == 3 * BLOCK_TOKENS


def test_held_blocks_are_free_for_the_engine(make_engine: Make) -> None:
    engine, worker = hold_three(make_engine)
    assert engine.pool.get_num_free_blocks() == 16
    assert not any(block.ref_cnt for block in engine.pool.blocks if not block.is_null)
    worker.movers[0].release()


def _take_all_held(make_engine: Make) -> tuple[MiniEngine, dict[str, int]]:
    """Makes the engine use all of its memory for new KV while three pages are held. Returns the engine and the lost
    pages by reason.
    """
    engine, worker = hold_three(make_engine)
    engine.add(make_request(range(16 * BLOCK_TOKENS), "two", extra_args={"flexkv.skip_save": True}))
    worker.movers[0].release()
    engine.step()
    engine.finish("two")
    engine.drain()
    engine.forget()
    lost = dropped(engine)
    name = "again"
    engine.add(make_request(PROMPT, name))
    engine.end_load(name)
    return engine, lost


def test_blocks_that_the_engine_needs_are_held_no_more(make_engine: Make) -> None:
    engine, lost = _take_all_held(make_engine)
    assert lost == {"reused": 3}
    assert engine.wrong("again") == []


def test_control_a_hold_that_does_not_hear_of_it_stores_another_requests_kv(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holds, "drop_lost", lambda self, hold: None)
    monkeypatch.setattr(BlockWatch, "still_held", lambda self, block_ids: len(block_ids))
    engine, lost = _take_all_held(make_engine)
    assert lost == {}
    assert engine.wrong("again") != []


def test_a_part_that_the_engine_needs_leaves_the_blocks_before_it(make_engine: Make) -> None:
    engine, worker = hold_three(make_engine)
    # The engine frees a request's last block first, so it also reuses that block first.
    free = engine.pool.get_num_free_blocks()
    held = {block for hold in holds_of(engine) for part in hold.blocks if part for block in part.block_ids}
    taken: list[KVCacheBlock] = []
    while not held & {block.block_id for block in taken}:
        taken += engine.pool.get_new_blocks(1)
    engine.step({})
    assert dropped(engine) == {"reused": 1}
    assert engine.pool.get_num_free_blocks() == free - len(taken)
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == PAGES - 1
    engine.pool.free_blocks(taken)


def test_another_watcher_in_our_place_ends_what_is_held(make_engine: Make) -> None:
    engine, worker = hold_three(make_engine)
    (hold,) = holds_of(engine)
    (blocks,) = hold.blocks
    assert blocks is not None
    other = [engine.pool.blocks[blocks.block_ids[1]]]
    engine.pool.touch(other)
    engine.pool.unpin_blocks(other, lambda block: None)
    worker.movers[0].release()
    engine.drain()
    assert dropped(engine) == {"reused": 2}
    assert engine.stored_pages == PAGES - 2


@pytest.mark.parametrize("engine_only", [True, False])
def test_a_reset_ends_what_is_held(make_engine: Make, engine_only: bool) -> None:
    """A reset ends all holds, and no held page is stored after it. The engine's own reset succeeds, because holding
    takes no reference to a block.
    """
    engine, worker = hold_three(make_engine)
    assert engine.pool.reset_prefix_cache()
    if not engine_only:
        engine.side.reset()
        assert not holds_of(engine)
    worker.movers[0].release()
    engine.drain()
    assert not holds_of(engine)
    assert dropped(engine) == {"reset": 3}
    assert engine.stored_pages == (2 if engine_only else 0)


def test_control_a_hold_that_outlives_a_reset_stores_old_kv(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holds, "end_all", lambda self, reason: None)
    engine, worker = hold_three(make_engine)
    engine.side.reset()
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == 3


def _expire(make_engine: Make) -> tuple[int, dict[str, int]]:
    """Lets the hold time of the held pages expire before the pages can be stored. Returns the stored pages, and the
    dropped pages by reason.
    """
    engine, worker = hold_three(make_engine, **{"store.hold_s": 1000})
    (hold,) = holds_of(engine)
    hold.until_s -= 1000
    engine.step({})
    worker.movers[0].release()
    engine.drain()
    return engine.stored_pages, dropped(engine)


def test_what_is_held_is_given_up_after_hold_s(make_engine: Make) -> None:
    assert _expire(make_engine) == (2, {"hold_expired": 3})


def test_control_a_hold_beyond_its_time_is_seen(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Holds.end

    def never(self: Holds, hold: Hold, reason: PageLoss | None = None) -> None:
        if reason is not PageLoss.HOLD_EXPIRED:
            end(self, hold, reason)

    monkeypatch.setattr(Holds, "end", never)
    assert _expire(make_engine) == (PAGES, {})


def _in_flight_of_held(make_engine: Make) -> int:
    """Ends a request with two pages in flight, as many as the share of referenced blocks allows (17 * 0.125). Then
    raises the limit of pages in flight, but not this share. Returns the number of pages in flight after a step.
    """
    engine, worker = hold_three(make_engine, **{"store.max_reference_share": 0.125})
    manager = engine.unit.manager
    assert isinstance(manager, LocalCacheManager)
    manager._limits = replace(manager._limits, inflight_store_pages=100)
    engine.step({})
    pages = manager.tables.ops.pages(OpRole.STORE)
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == PAGES
    return pages


def test_the_share_bounds_stores_of_blocks_that_no_request_holds(make_engine: Make) -> None:
    assert _in_flight_of_held(make_engine) == 2


def test_control_stores_beyond_the_share_are_seen(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockWatch, "room", 100)
    assert _in_flight_of_held(make_engine) == PAGES


def test_an_engine_at_rest_gives_up_what_nothing_will_make_room_for(make_engine: Make) -> None:
    """An idle engine drops pages for which no slot will become free. Another request's lease holds the only slots, and
    nothing is in flight.
    """
    slot = make_engine().unit.pool.slot_bytes
    engine = make_engine(blocks=17, **{"host.bytes": 5 * slot})
    engine.run(make_request(range(23), "kept"))
    assert engine.side.match(make_request([*range(23)], "asks"), 0)[0] == BLOCK_TOKENS * PAGES
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    engine.drain()
    assert dropped(engine) == {"no_slot": PAGES}
    assert not engine.side.has_work


def test_blocks_behind_a_failed_load_are_not_stored(make_engine: Make) -> None:
    """Held pages that were computed from failed blocks are not stored. The failure is known one step late, when the
    request has ended.
    """
    engine, worker = two_in_flight(make_engine)
    engine.add(make_request(PROMPT, "one"))
    tell = engine.hold_reports()
    engine.step()
    blocks = engine.finish("one")
    (hold,) = holds_of(engine)
    assert hold.pages == 3
    tell()
    engine.failed_by_another = {blocks[3].block_id}
    engine.step({})
    worker.movers[0].release()
    engine.drain()
    assert engine.stored_pages == 3


def test_a_name_that_is_used_again_ends_the_hold(make_engine: Make) -> None:
    engine, worker = hold_three(make_engine)
    engine.add(make_request([*range(23)], "one"))
    assert not holds_of(engine)
    worker.movers[0].release()
    engine.step()
    engine.finish("one")
    engine.drain()
    assert dropped(engine) == {"hold_expired": 3}


def test_where_nothing_says_what_becomes_of_blocks_they_are_counted(make_engine: Make) -> None:
    """Under `FlexKVConnectorV1`, flexkv cannot learn when a block is reused, because stores end in the step. So it
    holds no pages and counts pending ones as dropped.
    """
    engine, worker = two_in_flight(make_engine, role=EngineRole(stores_end_in_step=True))
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    engine.finish("one")
    assert not holds_of(engine)
    worker.movers[0].release()
    engine.drain()
    assert dropped(engine) == {"ended": 3}
