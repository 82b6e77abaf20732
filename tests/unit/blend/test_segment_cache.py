"""Tests the segment cache with texts that do not fit, pages for which there is no slot, and copies that are not
finished in time.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexkv.blend import BlendPlan, precompute, prefill  # noqa: E402
from flexkv.errors import CapacityError, TransferError  # noqa: E402
from tests.unit.blend.blend_world import (  # noqa: E402
    ROUNDING,
    full,
    make_cache,
    random_segments,
    relative,
    worst_layer,
)


def test_more_than_the_pool_holds(model) -> None:
    cache = make_cache(model, slots=6, staging_tokens=40)
    segments = random_segments([20, 33, 17, 24, 9])
    precompute(model, segments[:4], cache)
    assert cache.cached_tokens(segments[0]) == 0
    logits, kv, report = prefill(model, segments, cache, BlendPlan.of_ratio(1.0))
    wanted_logits, wanted = full(model, segments)
    assert 0 < report.reused <= 40
    assert relative(logits, wanted_logits) < ROUNDING
    assert worst_layer(kv, wanted) < ROUNDING
    with pytest.raises(CapacityError, match="staging pool"):
        precompute(model, random_segments([100]), cache)
    cache.manager.check_integrity()
    cache.close()


def test_staging_blocks_are_freed_once_however_often_a_load_is_closed(
    model, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = random_segments([20, 33, 17])
    precompute(model, segments, cache)
    free = sorted(cache.staging.free)
    load = cache.begin_load(segments)
    late = load.hits[1].tickets[0]
    wait = cache.engine.wait
    # Fault: the second segment's load does not finish in time.
    monkeypatch.setattr(cache.engine, "wait", lambda ticket, s: ticket != late and wait(ticket, s))
    with pytest.raises(TransferError, match="1 segments of 3"):
        load.close()
    for _ in range(2):
        load.close()
        cache.begin_load([None]).close()
        assert len(cache.staging.free) == len(set(cache.staging.free)) == len(free) - 5
    monkeypatch.undo()
    for _ in range(2):
        cache.begin_load([None]).close()
        load.close()
        assert sorted(cache.staging.free) == free


@pytest.mark.parametrize("length", [24, 20])
def test_a_store_past_its_deadline_gives_everything_back_when_it_ends(
    model, cache, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    segment, other = random_segments([length, 8])
    free = sorted(cache.staging.free)
    late: list[int] = []
    wait = cache.engine.wait

    def slow(ticket: int, deadline_s: float) -> bool:
        late[:] = late or [ticket]
        return ticket not in late and wait(ticket, deadline_s)

    # Fault: the store of the segment's complete blocks does not finish in time.
    monkeypatch.setattr(cache.engine, "wait", slow)
    with pytest.raises(TransferError, match="a store still moves"):
        precompute(model, [segment], cache)
    assert len(cache.staging.free) == len(free) - length // 8, "what was not being stored is free"
    assert precompute(model, [other], cache) == 8, "its pages are counted as nobody else's"
    monkeypatch.undo()
    assert precompute(model, [segment], cache) == length
    cache.begin_load([None]).close()
    assert sorted(cache.staging.free) == free
    assert cache.manager.tables.access_orders._access_orders == {}, "every request has ended"


def test_a_store_without_a_queue_place_stores_nothing_and_leaves_nothing(
    model, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (segment,) = random_segments([20])
    free = sorted(cache.staging.free)
    # Fault: the engine's queue is full.
    monkeypatch.setattr(cache.engine, "submit", lambda graph: None)
    assert precompute(model, [segment], cache) == 0
    assert cache.manager.inflight_ops() == 0
    assert sorted(cache.staging.free) == free
    monkeypatch.undo()
    assert precompute(model, [segment], cache) == 20


def test_pages_that_are_still_moving_are_not_cached(model, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    (segment,) = random_segments([20])
    # Faults: the first store does not finish in time, and the engine does not report its result while the patches hold.
    with monkeypatch.context() as patched:
        patched.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        patched.setattr(cache.engine, "poll", lambda: [])
        with pytest.raises(TransferError, match="a store still moves"):
            precompute(model, [segment], cache)
        assert cache.manager.inflight_ops() == 1
        # The manager knows all complete blocks of the segment, but must not promise them yet. A second store of the
        # segment waits for these blocks until its deadline, because the first store's result is not reported.
        patched.setattr(cache, "deadline_s", 0.1)
        with pytest.raises(TransferError, match=r"a store still moves after 0\.1 s"):
            precompute(model, [segment], cache)
        assert cache.cached_tokens(segment) == 0
        load = cache.begin_load([segment])
        assert load.hits == []
        load.close()
    assert precompute(model, [segment], cache) == 20
    load = cache.begin_load([segment])
    assert [hit.tokens for hit in load.hits] == [20]
    load.close()
