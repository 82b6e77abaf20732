"""A store of a segment begins in one step of an engine and finishes in a later one, without making the engine wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from flexkv.blend.cache import SegmentCache
from flexkv.blend.segment_store import SegmentStore
from flexkv.errors import ClosedError
from flexkv.transfer.base import Ticket
from tests.unit.blend.loaded_world import ROTATION, TOKENS, make_cache, planes_of

WITHIN_S = 30.0


@pytest.fixture
def cache() -> Iterator[SegmentCache]:
    made = make_cache()
    yield made
    made.manager.check_integrity()
    assert made.manager.inflight_ops() == 0
    made.close()


LONG = np.arange(40)
SHARING = np.array([*range(20), 7, 8, 9])
"""A segment that begins with the same 20 tokens as LONG, which fill complete blocks. Its partial tail of three tokens
is different."""


def begin(cache: SegmentCache, tokens: np.ndarray) -> SegmentStore:
    planes = planes_of(tokens)
    return cache.begin_store(tokens, lambda layer: (planes[layer, 0], planes[layer, 1]), ROTATION)


def wait_for(store: SegmentStore) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not store.advance():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_segment_is_found_once_its_store_has_ended(cache: SegmentCache, tokens: np.ndarray) -> None:
    """A segment is found when its store has ended. Covers segments of only complete blocks, and segments with a partial
    tail.
    """
    free = sorted(cache.staging.free)
    wait_for(begin(cache, tokens))
    assert cache.cached_tokens(tokens) == len(tokens)
    assert sorted(cache.staging.free) == free


def test_nobody_waits_for_a_store_that_still_moves(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def moving(ticket: int, deadline_s: float) -> bool:
        waits.append(deadline_s)
        return False

    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", moving)
        store = begin(cache, TOKENS[1])
        assert not store.advance()
        assert not store.advance()
        assert not store.is_late
        assert cache.cached_tokens(TOKENS[1]) == 0
    assert waits == [0.0, 0.0]
    wait_for(store)
    assert cache.cached_tokens(TOKENS[1]) == len(TOKENS[1])


def test_whole_blocks_are_free_while_the_tail_still_moves(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, wait = len(cache.staging.free), cache.engine.wait
    store = begin(cache, TOKENS[2])
    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        assert not store.advance()
        assert len(cache.staging.free) == free - 9, "the whole blocks move, the tail has its block"
        ended: list[Ticket] = []

        def first_alone(ticket: Ticket, deadline_s: float) -> bool:
            ended.append(ticket)
            return ticket == ended[0] and wait(ticket, WITHIN_S)

        slow.setattr(cache.engine, "wait", first_alone)
        assert not store.advance()
        assert len(ended) == 2
        assert len(cache.staging.free) == free - 1
    wait_for(store)
    assert cache.cached_tokens(TOKENS[2]) == len(TOKENS[2])
    assert len(cache.staging.free) == free


def test_a_store_that_is_left_frees_its_blocks_once_nothing_moves(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sorted(cache.staging.free)
    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        store = begin(cache, TOKENS[1])
        assert not store.advance()
        store.leave()
        store.leave()
        assert len(cache.staging.free) == len(free) - 2, (
            "its two whole blocks may still move; its tail never did"
        )
    ends_s = time.monotonic() + WITHIN_S
    while sorted(cache.staging.free) != free:
        assert time.monotonic() < ends_s
        cache.begin_load([None]).close()
        time.sleep(0.001)


def test_a_store_of_which_a_part_cannot_begin_leaves_nothing(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sorted(cache.staging.free)

    def closed(graph: object) -> None:
        raise ClosedError("the engine is closed")

    with monkeypatch.context() as patch:
        patch.setattr(cache.engine, "submit", closed)
        store = begin(cache, TOKENS[0])
        with pytest.raises(ClosedError):
            store.advance()
    assert sorted(cache.staging.free) == free


def test_a_store_that_cannot_be_waited_for_keeps_the_blocks_that_move(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sorted(cache.staging.free)

    def broken(ticket: Ticket, deadline_s: float) -> bool:
        raise MemoryError("no memory")

    store = begin(cache, TOKENS[1])
    with monkeypatch.context() as patch:
        patch.setattr(cache.engine, "wait", broken)
        with pytest.raises(MemoryError):
            store.advance()
    assert len(cache.staging.free) == len(free) - 2, "its two whole blocks may still move"
    ends_s = time.monotonic() + WITHIN_S
    while sorted(cache.staging.free) != free:
        assert time.monotonic() < ends_s
        cache.begin_load([None]).close()
        time.sleep(0.001)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_tail_is_kept_whose_whole_blocks_move_in_another_store(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        # No op is reported as finished, so the store `long` does not end. The store `sharing` waits for `long`, except
        # in the control.
        slow.setattr(cache.engine, "poll", list)
        if not waits:
            slow.setattr(cache.manager, "known", lambda group, keys: np.zeros(len(keys), np.bool_))
        long, sharing = begin(cache, LONG), begin(cache, SHARING)
        assert not long.advance()
        assert sharing.advance() is not waits
    wait_for(long)
    wait_for(sharing)
    assert cache.cached_tokens(LONG) == 40
    assert cache.cached_tokens(SHARING) == (23 if waits else 20)


def test_a_caller_that_waits_keeps_such_a_tail_too(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a caller waits for its store of a segment, the segment's partial tail is stored too, although another store is
    still moving the full blocks of the same segment. The wait ends even if no other caller advances that store.
    """
    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        long = begin(cache, LONG)
        assert not long.advance()
    sharing = begin(cache, SHARING)
    assert sharing.advance(wait=True)
    wait_for(long)
    assert cache.cached_tokens(SHARING) == 23


def test_a_tail_waits_no_longer_than_its_store_may_take(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sorted(cache.staging.free)
    with monkeypatch.context() as slow:
        slow.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        slow.setattr(cache.engine, "poll", list)
        long = begin(cache, LONG)
        assert not long.advance()
        slow.setattr(cache, "deadline_s", 0.05)
        sharing = begin(cache, SHARING)
        assert not sharing.advance(wait=True)
        assert sharing.is_late
        sharing.leave()
        assert len(cache.staging.free) == len(free) - len(LONG) // cache.block_tokens
    wait_for(long)
    assert cache.cached_tokens(SHARING) == 20
    assert sorted(cache.staging.free) == free
