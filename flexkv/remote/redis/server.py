"""One of a store's servers. If it does not answer, it is not called for a while, so that only its own names go
unanswered, and the other servers' names are not delayed.
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
        rests: whether the server may be left alone. A store's only server may not, because the store's caller decides
            about it.
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
        """Whether the server has rested long enough to be probed."""
        return self._breaker.due(time.monotonic())

    @property
    def why_not(self) -> str:
        """Why the server is not called; empty if it is."""
        return self._breaker.reason

    def ping(self, ends_s: float) -> Exchange:
        return Exchange(self.connection, PING, ends_s)

    def heard(self, exchange: Exchange) -> None:
        """Records the end of an exchange with the server, whether or not all answers came."""
        if exchange.complete:
            if not self.usable:
                self._breaker.answered(time.monotonic())
        elif self._rests:
            self._breaker.lost(exchange.reason, time.monotonic())
