"""One of a store's servers. When it does not answer, it is left alone for a while, so that only its own names get no
answer, and those of other servers get theirs as soon as ever."""

from __future__ import annotations

import time

from flexkv.remote.breaker import Breaker
from flexkv.remote.redis.connection import Connection
from flexkv.remote.redis.exchange import Command, Exchange
from flexkv.remote.redis.resp import command

PING = (Command((command(b"PING"),), 0, frozenset((b"+PONG",))),)


class Server:
    """
    Args:
        rests: it may be left alone. A store's only server may not: the caller of the store decides about it.
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
        """Whether the server has rested, and it is time to ask if it is there."""
        return self._breaker.due(time.monotonic())

    @property
    def why_not(self) -> str:
        """Why the server is left alone; empty if it is not."""
        return self._breaker.reason

    def ping(self, ends_s: float) -> Exchange:
        return Exchange(self.connection, PING, ends_s)

    def heard(self, exchange: Exchange) -> None:
        """Notes the end of an exchange with the server, with all answers or without."""
        if exchange.complete:
            if not self.usable:
                self._breaker.answered(time.monotonic())
        elif self._rests:
            self._breaker.lost(exchange.reason, time.monotonic())
