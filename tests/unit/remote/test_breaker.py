"""The breaker, which stops calls to a lost store for a while. Also `KeyMemory`, a set that forgets each key after some
seconds.
"""

from __future__ import annotations

import pytest

from flexkv.cache.tiers.remote.key_memory import KeyMemory
from flexkv.remote.breaker import (
    FIRST_REST_S,
    JITTER,
    LONGEST_REST_S,
    WATCHED,
    Breaker,
    BreakerState,
)
from tests.unit.remote.remote_unit import chain


def rest_of(breaker: Breaker, now_s: float) -> float:
    return breaker._until_s - now_s


def fail(breaker: Breaker, now_s: float) -> float:
    """Reports the store as lost at `now_s`. Returns the time at which the breaker allows the next call to the store."""
    breaker.lost("gone", now_s)
    assert not breaker.due(now_s)
    until_s = breaker._until_s
    assert breaker.due(until_s)
    return until_s


def closed(now_s: float = 0.0, spread: float = 0.0) -> Breaker:
    breaker = Breaker(now_s, "not reached yet", spread)
    assert breaker.due(now_s)
    breaker.asked()
    assert not breaker.due(now_s + 1e9), "one question at a time"
    breaker.answered(now_s)
    assert breaker.closed
    assert breaker.reason == ""
    return breaker


def test_rests_double_up_to_the_longest() -> None:
    breaker, now_s, rests = closed(), 0.0, []
    for _ in range(8):
        breaker.lost("gone", now_s)
        rests.append(rest_of(breaker, now_s))
        now_s = breaker._until_s
        breaker.asked()
        assert breaker.state is BreakerState.HALF_OPEN
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]


@pytest.mark.parametrize("spread", [-1.0, 1.0])
def test_rests_of_units_are_spread(spread: float) -> None:
    breaker = closed(spread=spread)
    breaker.lost("gone", 0.0)
    assert rest_of(breaker, 0.0) == pytest.approx(FIRST_REST_S * (1 + spread * JITTER))


def test_reports_of_one_loss_make_one_rest() -> None:
    breaker = closed()
    assert breaker.lost("first", 10.0)
    for _ in range(5):
        assert not breaker.lost("others", 10.1)
    assert rest_of(breaker, 10.0) == FIRST_REST_S
    assert breaker.reason == "first"


def test_store_that_answers_and_is_lost_again_rests_longer_each_time() -> None:
    """If a store answers and is lost again, the pause before the next call grows each time. Otherwise a helper that
    answers once and dies at the next call would be restarted every second for ever."""
    breaker, now_s = closed(), 0.0
    losses = 0
    while now_s < 600.0:
        now_s = fail(breaker, now_s)
        breaker.asked()
        breaker.answered(now_s)
        losses += 1
    assert losses <= 5 + 600 / LONGEST_REST_S + 1


def test_store_that_served_for_long_rests_briefly() -> None:
    breaker, now_s = closed(), 0.0
    for _ in range(6):
        now_s = fail(breaker, now_s)
        breaker.asked()
    breaker.answered(now_s)
    breaker.lost("gone", now_s + LONGEST_REST_S)
    assert rest_of(breaker, now_s + LONGEST_REST_S) == FIRST_REST_S


def test_more_than_half_of_the_last_values_failing_is_a_loss() -> None:
    breaker = closed()
    half = WATCHED // 2
    assert breaker.judge(0, half) == ""
    assert str(half + 1) in breaker.judge(0, 1)
    # Values that were judged before a loss do not count any longer.
    breaker.lost("values", 0.0)
    assert breaker.judge(0, half) == ""
    # Good values replace older bad values among the last ones.
    assert breaker.judge(WATCHED, 0) == ""
    assert breaker.judge(0, half) == ""


@pytest.mark.parametrize("pages", [WATCHED + 1, 101, 1011])
def test_of_many_values_at_once_the_share_counts(pages: int) -> None:
    """If more values are judged at once than the breaker watches, the breaker considers the share of bad values among
    all of these values."""
    half = pages // 2
    assert closed().judge(pages - half // 2, half // 2) == ""
    assert closed().judge(pages - half - 1, half + 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_keys_are_remembered_for_their_time_and_group() -> None:
    clock, keys = Clock(), chain("a", 3)
    memory = KeyMemory(2.0, 10, clock)
    assert memory.has(0, keys).tolist() == [False] * 3
    memory.add(0, keys[:2])
    clock.now_s += 1.9
    assert memory.has(0, keys).tolist() == [True, True, False]
    assert not memory.has(1, keys).any()
    memory.add(0, keys[1:2])
    clock.now_s += 0.2
    assert memory.has(0, keys).tolist() == [False, True, False]
    memory.clear()
    assert not memory.has(0, keys).any()


def test_keys_added_first_go_first() -> None:
    clock, keys = Clock(), chain("a", 5)
    memory = KeyMemory(2.0, 3, clock)
    memory.add(0, keys[:3])
    memory.add(0, keys[:1])  # adding the key again makes it the newest one
    memory.add(0, keys[3:])
    assert len(memory) == 3
    assert memory.has(0, keys).tolist() == [True, False, False, True, True]
