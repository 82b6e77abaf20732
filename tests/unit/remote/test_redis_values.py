"""With a real Redis, values come back unchanged, and a get writes to no memory outside of a value's parts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flexkv.remote.base import NO_VALUE, NOT_SAID, Outcome, Presence, Store, StoreOptions
from flexkv.remote.redis.exchange import SKIP_BYTES
from flexkv.remote.stores import open_store
from tests.servers.redis import RedisServer
from tests.unit.remote.redis_values import Guarded, drawn, split

DEADLINE_S = 60.0
SIZES = [[1], [0], [7, 0, 1], [4096, 1], [8191], [8192], [8193, 3], [65_537, 1, 99_999], [3] * 2500]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}")
def test_values_of_odd_sizes_and_several_parts_come_back(redis_store: Store, sizes: list[int]) -> None:
    whole = drawn(sum(sizes), 1)
    assert redis_store.put(["v", "w"], [split(whole, sizes), [whole]], DEADLINE_S) == [Outcome.OK] * 2
    memory, one = Guarded(sizes), Guarded([sum(sizes)])
    assert redis_store.get(["w", "v"], [memory.parts, one.parts], DEADLINE_S) == [Outcome.OK] * 2
    assert memory.bytes() == one.bytes() == whole.tobytes()
    memory.check()
    one.check()


def test_batches_of_64_large_values_come_back(redis_store: Store) -> None:
    pages = drawn(64 << 21, 2).reshape(64, 1 << 21)
    names = [f"page {number}" for number in range(64)]
    assert set(redis_store.put(names, [[page] for page in pages], DEADLINE_S)) == {Outcome.OK}
    back = np.zeros_like(pages)
    assert set(redis_store.get(names, [[page] for page in back], DEADLINE_S)) == {Outcome.OK}
    assert np.array_equal(pages, back)
    assert redis_store.remove(names, DEADLINE_S) == [True] * 64


@pytest.mark.parametrize("stored", [0, 1, 99, 101, 100_000, SKIP_BYTES, SKIP_BYTES + 1])
def test_value_of_another_size_is_never_written_beyond_the_parts(redis_store: Store, stored: int) -> None:
    """A value with another size than expected is not written outside of the parts. The call must also read the values
    that follow the one of the wrong size."""
    right = drawn(100, 3)
    assert redis_store.put(["other", "right"], [[drawn(stored, 4)], [right]], DEADLINE_S) == [Outcome.OK] * 2
    other, after = Guarded([60, 40]), Guarded([100])
    got = redis_store.get(["other", "right", "other"], [other.parts, after.parts, other.parts], DEADLINE_S)
    assert got == [Outcome.OTHER_SIZE, Outcome.OK, Outcome.OTHER_SIZE]
    assert after.bytes() == right.tobytes()
    other.check()
    after.check()


@pytest.mark.parametrize(
    "kind", [("LPUSH", "foreign", "1"), ("HSET", "foreign", "a", "b"), ("SADD", "foreign", "1")]
)
def test_a_key_of_another_type_is_not_our_value_and_can_be_removed(
    redis: RedisServer, redis_store: Store, kind: tuple[str, ...]
) -> None:
    """A key of another Redis type counts as a value of another size, and can be removed. The last part is a control: if
    the server refuses for a different reason, a missing permission, the outcome is a failure."""
    right = drawn(100, 3)
    redis_store.put(["right"], [[right]], DEADLINE_S)
    redis.ask(*kind)
    memory = Guarded([100])
    names, parts = ["foreign", "right"], [memory.parts, memory.parts]
    assert redis_store.get(names, parts, DEADLINE_S) == [Outcome.OTHER_SIZE, Outcome.OK]
    assert redis_store.remove(["foreign"], DEADLINE_S) == [True]
    assert redis_store.get(names, parts, DEADLINE_S) == [Outcome.ABSENT, Outcome.OK]
    redis.ask("ACL", "SETUSER", "default", "-get")
    try:
        assert redis_store.get(["right"], [memory.parts], DEADLINE_S) == [Outcome.FAILED]
    finally:
        redis.ask("ACL", "SETUSER", "default", "+get")


def test_absent_names_are_told_from_present_ones(redis_store: Store) -> None:
    value = drawn(10, 5)
    redis_store.put(["here", "ünïcode \r\n name"], [[value], [value]], DEADLINE_S)
    names = ["here", "gone", "ünïcode \r\n name", ""]
    expected = [Presence.YES, Presence.NO, Presence.YES, Presence.NO]
    assert redis_store.exists(names, DEADLINE_S) == expected
    memory = Guarded([10])
    assert redis_store.get(names[:2], [memory.parts, memory.parts], DEADLINE_S) == [
        Outcome.OK,
        Outcome.ABSENT,
    ]
    assert redis_store.last_error == ""
    assert redis_store.remove(names, DEADLINE_S) == [True] * 4
    assert redis_store.exists(names, DEADLINE_S) == [Presence.NO] * 4


def test_sizes_are_those_of_the_values(redis_store: Store) -> None:
    """`sizes` returns the size of each value. One size is 4, which is also the number of an outcome, and one is much
    larger than the others."""
    sizes = [0, 1, 4, 3_000_001, 7]
    names = [f"of {size}" for size in sizes]
    redis_store.put(names, [[drawn(size, size)] for size in sizes], DEADLINE_S)
    asked = [*names[:3], "nothing", *names[3:]]
    assert redis_store.sizes(asked, DEADLINE_S) == [0, 1, 4, NO_VALUE, 3_000_001, 7]
    assert redis_store.sizes(asked[:2], 0.0) == [NOT_SAID] * 2
    assert redis_store.last_error


def test_nothing_is_asked_for_no_names(redis_store: Store) -> None:
    assert redis_store.exists([], DEADLINE_S) == []
    assert redis_store.get([], [], DEADLINE_S) == []


def test_thousands_of_names_are_answered_in_order(redis_store: Store) -> None:
    names = [f"{number:0100}" for number in range(20_000)]
    redis_store.put(names[::7], [[drawn(1, 6)]] * len(names[::7]), DEADLINE_S)
    expected = [Presence.YES if number % 7 == 0 else Presence.NO for number in range(20_000)]
    assert redis_store.exists(names, DEADLINE_S) == expected


def test_a_put_overwrites(redis_store: Store) -> None:
    """A put replaces an existing value. Otherwise a value that fails its check would stay in the store for ever."""
    for seed, size in [(7, 50), (8, 50), (9, 70)]:
        assert redis_store.put(["name"], [[drawn(size, seed)]], DEADLINE_S) == [Outcome.OK]
    memory = Guarded([70])
    assert redis_store.get(["name"], [memory.parts], DEADLINE_S) == [Outcome.OK]
    assert memory.bytes() == drawn(70, 9).tobytes()


def test_values_expire_where_that_is_asked_for(redis: RedisServer) -> None:
    store = open_store(StoreOptions((redis.url,), ttl_s=1000))
    assert store.put(["name"], [[drawn(5, 10)]], DEADLINE_S) == [Outcome.OK]
    store.close()
    assert 900 < int(redis.ask("TTL", "name")[1:]) <= 1000


def test_databases_are_apart(redis: RedisServer, redis_store: Store) -> None:
    other = open_store(StoreOptions((redis.url + "/3",)))
    assert other.put(["name"], [[drawn(5, 11)]], DEADLINE_S) == [Outcome.OK]
    assert redis_store.exists(["name"], DEADLINE_S) == [Presence.NO]
    assert other.exists(["name"], DEADLINE_S) == [Presence.YES]
    other.close()


def test_of_two_writers_a_reader_sees_one(redis: RedisServer) -> None:
    size, rounds = 1 << 20, 40
    values = [np.full(size, fill, np.uint8) for fill in (1, 2)]
    outcomes: list[list[Outcome]] = []

    def write(value: np.ndarray) -> None:
        store = open_store(StoreOptions((redis.url,)))
        outcomes.extend(store.put(["name"], [[value]], DEADLINE_S) for _ in range(rounds))
        store.close()

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    reader = open_store(StoreOptions((redis.url,)))
    reader.put(["name"], [[values[0]]], DEADLINE_S)
    for writer in writers:
        writer.start()
    seen = np.zeros(size, np.uint8)
    while any(writer.is_alive() for writer in writers):
        assert reader.get(["name"], [[seen]], DEADLINE_S) == [Outcome.OK]
        assert seen.min() == seen.max()
    assert outcomes == [[Outcome.OK]] * 2 * rounds
    reader.close()
