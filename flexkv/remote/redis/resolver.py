"""Resolves host names to addresses in a thread, because the system's call for this has no deadline."""

from __future__ import annotations

import socket
import time
from typing import Any

from flexkv.observe import NamedThread
from flexkv.remote.redis.resp import ConnectionFailed
from flexkv.remote.redis.turns import Steps, TurnWait

LOOK_S = 0.002
"""While a call waits, it checks at intervals of this many seconds whether the thread has an answer."""

Found = tuple[socket.AddressFamily, Any]
"""Address family and address, as `socket.socket` and `connect` take them."""


class Resolver:
    """Resolves one host and port. Only one thread resolves the name at a time. If a call gives up waiting, the thread
    continues, and the next call waits for the same thread.

    Attributes:
        found: the addresses that the last `steps` found, in the system's order of preference.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._asking: _Asking | None = None
        self.found: list[Found] = []

    def steps(self, until_s: float) -> Steps:
        """Finds the addresses of the host.

        Raises:
            ConnectionFailed: the name is unknown, or its address was not found by `until_s`.
        """
        try:
            self.found = _ask(self._host, self._port, socket.AI_NUMERICHOST)
            return
        except (OSError, UnicodeError):
            pass  # the host is a name, not a numeric address
        asking = self._asking = self._asking or _Asking(self._host, self._port)
        while asking.is_alive():
            if time.monotonic() >= until_s:
                raise ConnectionFailed("the address of its host was not found in time")
            yield TurnWait(-1, 0, min(time.monotonic() + LOOK_S, until_s))
        self._asking = None
        if asking.error:
            raise ConnectionFailed(asking.error)
        self.found = asking.found


class _Asking(NamedThread):
    def __init__(self, host: str, port: int) -> None:
        super().__init__("flexkv-resolve", self._look_up, (host, port))
        self.found: list[Found] = []
        self.error = ""
        self.start()

    def _look_up(self, host: str, port: int) -> None:
        try:
            self.found = _ask(host, port, 0)
        except (OSError, UnicodeError) as error:
            self.error = f"its host is not known: {error}"


def _ask(host: str, port: int, flags: int) -> list[Found]:
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in rows]
