"""If one server of a store fails, only the values on that server are misses. No call takes longer than its deadline,
and the other servers' answers are used.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.remote.base import NOT_SAID, Outcome, Presence, Store, StoreOptions
from flexkv.remote.redis.placement import seeds_of, spread
from flexkv.remote.stores import open_store
from tests.servers.redis import RedisServer, free_port, redis_server
from tests.unit.remote.redis_fake import FakeRedis, hang_up, says
from tests.unit.remote.redis_values import Guarded, drawn

DEADLINE_S = 60.0
SHORT_S = 0.5
SLACK_S = 10.0
NAMES = [f"name {number}" for number in range(30)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisServer]]:
    with redis_server(tmp_path) as one, redis_server(tmp_path) as two, redis_server(tmp_path) as three:
        yield [one, two, three]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def places(servers: list[RedisServer]) -> list[int]:
    seeds = seeds_of([f"127.0.0.1:{server.port}/0" for server in servers])
    return spread([name.encode() for name in NAMES], seeds).tolist()


def fill(store: Store) -> None:
    assert set(store.put(NAMES, [[drawn(1000, 1)]] * len(NAMES), DEADLINE_S)) == {Outcome.OK}


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_one_servers_failure_costs_its_own_names(servers: list[RedisServer], how: str) -> None:
    store = open_store(StoreOptions(tuple(server.url for server in servers)))
    fill(store)
    servers[1].stop() if how == "killed" else servers[1].freeze()
    mine = [place == 1 for place in places(servers)]
    assert any(mine)
    for _ in range(2):  # the first pass uses the existing connection, the second one a new connection
        begun_s = time.monotonic()
        seen = store.exists(NAMES, SHORT_S)
        memory = [Guarded([1000]) for _ in NAMES]
        got = store.get(NAMES, [value.parts for value in memory], SHORT_S)
        put = store.put(NAMES, [[drawn(1000, 1)]] * len(NAMES), SHORT_S)
        gone = store.remove(["no such name", *NAMES], SHORT_S)[1:]
        assert time.monotonic() - begun_s < 4 * SHORT_S + SLACK_S
        assert seen == [Presence.UNKNOWN if dead else Presence.YES for dead in mine]
        assert {outcome for outcome, dead in zip(got, mine, strict=True) if dead} <= {
            Outcome.FAILED,
            Outcome.AWAY,
        }
        assert {outcome for outcome, dead in zip(put, mine, strict=True) if dead} <= {
            Outcome.FAILED,
            Outcome.AWAY,
        }
        alive = [number for number, dead in enumerate(mine) if not dead]
        assert {got[number] for number in alive} == {put[number] for number in alive} == {Outcome.OK}
        assert gone == [not dead for dead in mine]
        assert store.last_error.startswith(f"127.0.0.1:{servers[1].port}: ")
        fill_up = [name for name, dead in zip(NAMES, mine, strict=True) if not dead]
        assert set(store.put(fill_up, [[drawn(1000, 1)]] * len(fill_up), DEADLINE_S)) == {Outcome.OK}
    assert store.alive(SHORT_S) == "", "two of three answer"
    assert str(servers[1].port) in store.last_error
    servers[0].stop()
    servers[2].stop()
    assert "127.0.0.1" in store.alive(SHORT_S)
    store.close()


def test_a_server_that_does_not_answer_is_left_alone_and_used_when_it_is_back(
    servers: list[RedisServer],
) -> None:
    """If one of three servers is frozen, only the first call waits for it. Later calls leave the server out until it
    answers again."""
    store = open_store(StoreOptions(tuple(server.url for server in servers)))
    fill(store)
    servers[1].freeze()
    mine = [place == 1 for place in places(servers)]
    partly = [Presence.UNKNOWN if dead else Presence.YES for dead in mine]
    assert store.exists(NAMES, SHORT_S) == partly
    begun_s = time.monotonic()
    for _ in range(20):
        assert store.exists(NAMES, DEADLINE_S) == partly
        assert store.alive(DEADLINE_S) == ""
    assert time.monotonic() - begun_s < DEADLINE_S / 2, "no call has waited for its deadline"
    assert f":{servers[1].port}: " in store.last_error
    servers[1].thaw()
    ends_s = time.monotonic() + DEADLINE_S
    while store.exists(NAMES, DEADLINE_S) != [Presence.YES] * len(NAMES):
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    assert store.last_error == ""
    store.close()


def test_names_of_a_server_that_is_left_alone_are_known_to_be_away(servers: list[RedisServer]) -> None:
    """The first call fails for the names on the stopped server. Later calls report these names as AWAY without calling
    the server."""
    store = open_store(StoreOptions(tuple(server.url for server in servers)))
    fill(store)
    servers[1].stop()
    mine = [place == 1 for place in places(servers)]
    for away in (Outcome.FAILED, Outcome.AWAY):
        memory = [Guarded([1000]) for _ in NAMES]
        got = store.get(NAMES, [value.parts for value in memory], DEADLINE_S)
        assert got == [away if dead else Outcome.OK for dead in mine]
    put = store.put(NAMES, [[drawn(1000, 1)]] * len(NAMES), DEADLINE_S)
    assert put == [Outcome.AWAY if dead else Outcome.OK for dead in mine]
    assert store.sizes(NAMES, DEADLINE_S) == [NOT_SAID if dead else 1000 for dead in mine]
    store.close()


def test_all_servers_are_asked_again_where_none_is_used(servers: list[RedisServer]) -> None:
    """If every server has failed recently, the next call tries all of them. Normally a call leaves out a server that
    failed recently, so that it does not delay the answers of the other servers. With all servers left out, there are no
    other answers."""
    store = open_store(StoreOptions(tuple(server.url for server in servers)))
    fill(store)
    for server in servers:
        server.freeze()
    for _ in range(4):
        assert store.alive(0.1)
    for server in servers:
        server.thaw()
    assert store.alive(DEADLINE_S) == ""
    store.close()


def test_a_server_that_wakes_up_is_used_again(own_redis: RedisServer) -> None:
    store = open_store(StoreOptions((own_redis.url,)))
    fill(store)
    own_redis.freeze()
    assert set(store.exists(NAMES, SHORT_S)) == {Presence.UNKNOWN}
    assert store.last_error.endswith("no answer in time")
    own_redis.thaw()
    assert set(store.exists(NAMES, DEADLINE_S)) == {Presence.YES}
    assert store.alive(DEADLINE_S) == store.last_error == ""
    store.close()


def test_a_server_that_began_anew_is_empty(own_redis: RedisServer) -> None:
    """After a server restarts with no values, the first call already succeeds. The store notices that the old
    connection is closed, and makes a new one."""
    store = open_store(StoreOptions((own_redis.url,)))
    fill(store)
    own_redis.stop()
    own_redis.start()
    assert set(store.exists(NAMES, DEADLINE_S)) == {Presence.NO}
    fill(store)
    own_redis.stop()
    own_redis.start()
    fill(store)
    store.close()


def test_a_full_server_says_so(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory=16 << 20) as server:
        store = open_store(StoreOptions((server.url,)))
        value = drawn(2 << 20, 2)
        outcomes = store.put(NAMES, [[value]] * len(NAMES), DEADLINE_S)
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        assert "OOM" in store.last_error
        kept = [Presence.YES if outcome is Outcome.OK else Presence.NO for outcome in outcomes]
        assert store.exists(NAMES, DEADLINE_S) == kept
        assert store.alive(DEADLINE_S) == ""
        store.close()


VALUE = b"$100\r\n" + drawn(100, 3).tobytes() + b"\r\n"
GARBAGE = {
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "binary": bytes(range(256)) * 8 + b"\r\n",
    "empty line": b"\r\n" + VALUE,
    "no end": b"+" * 20_000,
    "array": b"*1\r\n" + VALUE,
    "another question": b"+OK\r\n" + VALUE,
    "number": b":100\r\n" + VALUE,
    "length with sign": b"$+100" + VALUE[4:],
    "negative length": b"$-7\r\n",
    "length too long": b"$" + b"9" * 400 + b"\r\n",
    "longer than said": VALUE[:-2] + b"xx\r\n",
    "no end of value": VALUE[:-2] + b"$100\r\n",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_a_failure_and_ends_the_connection(said: bytes) -> None:
    with FakeRedis(says(said)) as server:
        store = open_store(StoreOptions((server.url,)))
        memory = Guarded([100])
        assert store.get(["a", "b"], [memory.parts] * 2, DEADLINE_S) == [Outcome.FAILED] * 2
        memory.check()
        assert store.last_error.startswith(f"127.0.0.1:{server.port}: ")
        assert server.connections == 1
        store.get(["a"], [memory.parts], SHORT_S)
        assert server.connections == 2
        store.close()


def test_control_the_same_server_with_a_right_answer(tmp_path: Path) -> None:
    with FakeRedis(says(VALUE + VALUE)) as server:
        store = open_store(StoreOptions((server.url,)))
        memory = Guarded([100])
        assert store.get(["a", "b"], [memory.parts] * 2, DEADLINE_S) == [Outcome.OK] * 2
        assert memory.bytes() == drawn(100, 3).tobytes()
        store.close()


def test_what_nobody_asked_for_ends_the_connection() -> None:
    """An answer to which there was no question makes the store close the connection. If the connection stayed open,
    this answer would be taken for the answer to the next question."""
    with FakeRedis(says(b":0\r\n:1\r\n")) as server:
        store = open_store(StoreOptions((server.url,)))
        assert store.exists(["a"], DEADLINE_S) == [Presence.NO]
        assert store.exists(["b"], DEADLINE_S) == [Presence.NO]
        assert server.connections == 2
        store.close()


def test_a_value_too_long_to_be_skipped_costs_the_connection_alone() -> None:
    """If a value is too long to be skipped, the store closes the connection, and reads the next value over a new one.
    The server announces a very long value and sends none of its bytes, so skipping the value would last until the
    deadline."""

    def script(taken: socket.socket, number: int) -> None:
        says(b"$999999999\r\n" if number == 1 else VALUE)(taken, number)

    with FakeRedis(script) as server:
        store = open_store(StoreOptions((server.url,)))
        first, second = Guarded([100]), Guarded([100])
        got = store.get(["a", "b"], [first.parts, second.parts], DEADLINE_S)
        assert got == [Outcome.OTHER_SIZE, Outcome.OK]
        assert second.bytes() == drawn(100, 3).tobytes()
        first.check()
        assert server.connections == 2
        store.close()


@pytest.mark.parametrize("sent", [1, 8, 50, 107, len(VALUE) + 10])
@pytest.mark.parametrize("reset", [False, True])
def test_connection_cut_inside_a_value(sent: int, reset: bool) -> None:
    def cut(taken: socket.socket) -> None:
        if reset:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            hang_up(taken)

    with FakeRedis(says((VALUE * 2)[:sent], then=cut)) as server:
        store = open_store(StoreOptions((server.url,)))
        first, second = Guarded([100]), Guarded([99, 1])
        got = store.get(["a", "b"], [first.parts, second.parts], DEADLINE_S)
        # If the connection is reset, the kernel may discard data that has already arrived. So either result is right.
        assert got[1] is Outcome.FAILED
        assert got[0] is (Outcome.OK if sent > len(VALUE) and not reset else got[0])
        if sent < len(VALUE):
            assert got[0] is Outcome.FAILED
        if got[0] is Outcome.OK:
            assert first.bytes() == drawn(100, 3).tobytes()
        assert "connection lost" in store.last_error
        first.check()
        second.check()
        store.close()


def test_deadline_inside_a_value_ends_the_connection() -> None:
    """If the deadline comes in the middle of a value, the store closes the connection. Otherwise the rest of the value
    would be taken for the answer to the next question."""
    with FakeRedis(says(VALUE[:50])) as server:
        store = open_store(StoreOptions((server.url,)))
        memory = Guarded([100])
        begun_s = time.monotonic()
        assert store.get(["a"], [memory.parts], SHORT_S) == [Outcome.FAILED]
        assert time.monotonic() - begun_s < SHORT_S + SLACK_S
        memory.check()
        store.get(["a"], [memory.parts], SHORT_S)
        assert server.connections == 2
        store.close()


def test_a_server_that_drips_does_not_outlast_the_deadline() -> None:
    def drip(taken: socket.socket) -> None:
        while True:
            taken.sendall(b"x")
            time.sleep(0.01)

    with FakeRedis(says(b"$100000\r\n", then=drip)) as server:
        store = open_store(StoreOptions((server.url,)))
        begun_s = time.monotonic()
        assert store.get(["a"], [Guarded([100_000]).parts], SHORT_S) == [Outcome.FAILED]
        assert time.monotonic() - begun_s < SHORT_S + SLACK_S
        store.close()


def test_a_connection_closed_in_between_is_made_again_once() -> None:
    """If the server closes the connection after a question, without an answer, the store asks again over a new
    connection."""

    def script(taken: socket.socket, number: int) -> None:
        taken.recv(1 << 16)
        taken.sendall(b":1\r\n")
        taken.recv(1 << 16)

    with FakeRedis(script) as server:
        store = open_store(StoreOptions((server.url,)))
        assert store.exists(["a"], DEADLINE_S) == [Presence.YES]
        assert store.exists(["a"], DEADLINE_S) == [Presence.YES]
        assert server.connections == 2
        store.close()


def test_a_new_connection_that_is_closed_is_not_made_again() -> None:
    with FakeRedis(says(then=hang_up)) as server:
        store = open_store(StoreOptions((server.url,)))
        assert store.exists(["a"], DEADLINE_S) == [Presence.UNKNOWN]
        assert server.connections == 1
        store.close()


ERRORS = [
    "LOADING Redis is loading",
    "MOVED 1 10.0.0.1:6379",
    "READONLY You can't write",
    "NOPERM no",
    "ERR x",
]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_failures_with_a_reason(error: str) -> None:
    line = b"-" + error.encode() + b"\r\n"
    for ask, answer in [
        (lambda store: store.exists(["a", "b"], DEADLINE_S), [Presence.UNKNOWN] * 2),
        (lambda store: store.get(["a", "b"], [[drawn(9, 4)]] * 2, DEADLINE_S), [Outcome.FAILED] * 2),
        (lambda store: store.put(["a", "b"], [[drawn(9, 4)]] * 2, DEADLINE_S), [Outcome.FAILED] * 2),
        (lambda store: store.remove(["a", "b"], DEADLINE_S), [False] * 2),
        (lambda store: error in store.alive(DEADLINE_S), True),
    ]:
        with FakeRedis(says(line * 2)) as server:
            store = open_store(StoreOptions((server.url,)))
            assert ask(store) == answer
            assert error in store.last_error
            store.close()


def test_what_a_server_says_is_no_more_than_a_text() -> None:
    with FakeRedis(says(b"-ERR \x1b[31mred\x07\x9b\r\n" * 2)) as server:
        store = open_store(StoreOptions((server.url,)))
        store.exists(["a"], DEADLINE_S)
        assert "red" in store.last_error
        assert store.last_error.isprintable()
        store.close()


def test_nobody_listens() -> None:
    store = open_store(StoreOptions((f"redis://127.0.0.1:{free_port()}",)))
    assert "refused" in store.alive(DEADLINE_S)
    store.close()


def test_a_host_that_nobody_knows_ends_by_the_deadline() -> None:
    store = open_store(StoreOptions(("redis://no-such-host.invalid",)))
    begun_s = time.monotonic()
    assert "host" in store.alive(SHORT_S)
    assert time.monotonic() - begun_s < SHORT_S + SLACK_S
    store.close()
