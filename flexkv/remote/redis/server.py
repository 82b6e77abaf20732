"""One of a store's servers. If a server does not answer, it is not called for a while. So the server affects only the
names for which it is responsible, and does not delay calls for other servers' names.
"""

from __future__ import annotations

import time

from flexkv.remote.breaker import Breaker
from flexkv.remote.redis.connection import Connection
from flexkv.remote.redis.exchange import Command, Exchange
from flexkv.remote.redis.resp import command

PING = (Command((command(b"PING"),), 0, frozenset((b"+PONG",))),)


class Server:
    """One of a store's servers, with its connection and breaker.

    Args:
        rests: whether the server is left alone for a while if it does not answer. False for a store's only server,
            because the store's caller then decides when to call it.
    """

    def __init__(self, connection: Connection, rests: bool) -> None:
        self.connection = connection
        self._rests = rests
        now_s = time.monotonic()
        self._breaker = Breaker(now_s, "")
        self._breaker.answered(now_s)

    @property
    def usable(self) -> bool:
        """Whether calls use the server."""
        return self._breaker.closed

    @property
    def due(self) -> bool:
        """Whether the server was left alone long enough to be probed again."""
        return self._breaker.due(time.monotonic())

    @property
    def why_not(self) -> str:
        """Why the server is not called; empty if it is called."""
        return self._breaker.reason

    def ping(self, ends_s: float) -> Exchange:
        return Exchange(self.connection, PING, ends_s)

    def heard(self, exchange: Exchange) -> None:
        """Records that an exchange with the server has ended, with or without all replies."""
        if exchange.complete:
            if not self.usable:
                self._breaker.answered(time.monotonic())
        elif self._rests:
            self._breaker.lost(exchange.reason, time.monotonic())
