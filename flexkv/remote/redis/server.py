"""One server of a store that has several: left alone for a while when it does not answer, so that only its own names
are without an answer, and the others' come as soon as ever."""

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
        rests: it may be left alone. An only server may not: whoever asks it decides.
    """

    def __init__(self, connection: Connection, rests: bool) -> None:
        self.connection = connection
        self._rests = rests
        now_s = time.monotonic()
        self._breaker = Breaker(now_s, "")
        self._breaker.answered(now_s)

    @property
    def usable(self) -> bool:
        """Whether it is asked for what it has."""
        return self._breaker.closed

    @property
    def due(self) -> bool:
        """Whether it has rested, and is to be asked if it is there."""
        return self._breaker.due(time.monotonic())

    @property
    def why_not(self) -> str:
        """Why it is left alone; empty if it is not."""
        return self._breaker.reason

    def ping(self, ends_s: float) -> Exchange:
        return Exchange(self.connection, PING, ends_s)

    def heard(self, exchange: Exchange) -> None:
        """What was asked of it has ended, with all its answers or without."""
        if exchange.complete:
            if not self.usable:
                self._breaker.answered(time.monotonic())
        elif self._rests:
            self._breaker.lost(exchange.reason, time.monotonic())
