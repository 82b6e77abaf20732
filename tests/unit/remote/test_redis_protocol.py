"""The store parses replies that arrive in any pieces, and distributes names over servers in the same way on every
machine.
"""

from __future__ import annotations

import socket
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.remote.base import Outcome, StoreOptions
from flexkv.remote.redis.placement import seeds_of, spread
from flexkv.remote.stores import open_store
from tests.unit.remote.redis_fake import FakeRedis
from tests.unit.remote.redis_values import Guarded

DEADLINE_S = 60.0
VALUES = (
    st.binary(max_size=40) | st.binary(min_size=8180, max_size=8200) | st.sampled_from([b"\r\n", b"$-1\r\n"])
)
REPLIES = st.lists(st.none() | st.just("-ERR no") | st.tuples(VALUES, st.booleans()), min_size=1, max_size=6)


class Cutter:
    """A server that sends the bytes in `pieces`, one piece after another, on each connection."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.asked = 0

    def script(self, taken: socket.socket, number: int) -> None:
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        heard = b""
        while heard.count(b"GET") < self.asked:
            heard += taken.recv(1 << 16)
        for piece in self.pieces:
            taken.sendall(piece)
        while taken.recv(1 << 16):
            pass


def test_replies_may_be_cut_anywhere() -> None:
    cutter = Cutter()
    with FakeRedis(cutter.script) as server:

        @settings(max_examples=150, deadline=None)
        @given(replies=REPLIES, data=st.data())
        def check(replies: list, data: st.DataObject) -> None:
            said, expected, memory, wanted = b"", [], [], []
            for reply in replies:
                value, right = reply if isinstance(reply, tuple) else (b"", True)
                if reply is None:
                    said, outcome = said + b"$-1\r\n", Outcome.ABSENT
                elif isinstance(reply, str):
                    said, outcome = said + reply.encode() + b"\r\n", Outcome.FAILED
                else:
                    said += b"$%d\r\n%b\r\n" % (len(value), value)
                    outcome = Outcome.OK if right else Outcome.OTHER_SIZE
                at = data.draw(st.integers(0, len(value)))
                memory.append(Guarded([at, len(value) - at + (not right)]))
                expected.append(outcome)
                wanted.append(value)
            cuts = sorted(data.draw(st.sets(st.integers(1, len(said)), max_size=12)))
            cutter.pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
            cutter.asked = len(replies)
            store = open_store(StoreOptions((server.url,)))
            try:
                names = [str(number) for number in range(len(replies))]
                assert store.get(names, [guarded.parts for guarded in memory], DEADLINE_S) == expected
            finally:
                store.close()
            for guarded, value, outcome in zip(memory, wanted, expected, strict=True):
                guarded.check()
                assert outcome is not Outcome.OK or guarded.bytes() == value

        check()


PLACES = [4, 4, 3, 4, 0, 4, 4, 1, 2, 2, 3, 3]
NAMES = [f"name {number}".encode() for number in range(4000)]


def test_names_are_spread_evenly_and_in_any_order_of_servers() -> None:
    servers = [f"10.0.0.{number}:6379/0" for number in range(5)]
    placed = [servers[number] for number in spread(NAMES, seeds_of(servers))]
    assert all(600 < count < 1000 for count in Counter(placed).values())
    assert len(set(placed)) == 5
    turned = servers[::-1]
    assert placed == [turned[number] for number in spread(NAMES, seeds_of(turned))]


def test_a_server_less_moves_its_names_only() -> None:
    servers = [f"10.0.0.{number}:6379/0" for number in range(5)]
    before, after = spread(NAMES, seeds_of(servers)), spread(NAMES, seeds_of(servers[:4]))
    stays = before != 4
    assert np.array_equal(before[stays], after[stays])


def test_places_are_those_of_every_version() -> None:
    """The distribution of names over servers is the same in every version. Otherwise a version would not find the
    values that other versions have stored."""
    servers = [f"10.0.0.{number}:6379/0" for number in range(5)]
    assert spread(NAMES[:12], seeds_of(servers)).tolist() == PLACES
