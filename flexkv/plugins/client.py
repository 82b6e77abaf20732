"""Lets a plugin call its unit:

from flexkv.plugins.client import connect

with connect() as unit:
    print(unit.status()["host_slots_used"])
    print(unit.lookup([1, 2, 3, 4])[0].cached)
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from flexkv.errors import PluginCallError
from flexkv.plugins.unit_socket import MOST_LINE_BYTES, decoded, encoded
from flexkv.same_user import is_same_user

CHUNK_BYTES = 1 << 16

MARGIN_S = 1.0
"""Seconds that the client waits beyond a call's deadline. At the deadline the unit answers that the call was too late.
That answer takes a moment to arrive.
"""


@dataclass(frozen=True, slots=True)
class CachedPages:
    """The cached pages of a prompt in one KV group.

    Attributes:
        pages: number of complete blocks of the prompt.
        cached: number of these blocks whose pages are in host memory, on the unit's disks, or with peers.
        leading: number of blocks at the prompt's beginning that are cached without a gap.
        in_host: number of blocks whose pages are in host memory.
    """

    pages: int
    cached: int
    leading: int
    in_host: int


class UnitClient:
    """A connection to a unit. `connect` makes it. Only one thread may use it at a time.

    The unit abandons a call after `deadline_s` seconds, and the client waits `MARGIN_S` longer. The unit carries out
    all calls except `status` in the engine's steps, so these calls wait while the engine has nothing to do.

    Every call raises PluginCallError if the unit refuses it (the message says why), does not answer in time, or is
    gone.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._received = b""

    def status(self) -> dict[str, Any]:
        """Returns the state that the unit had in the engine's last step; `age_s` says how many seconds ago that was.
        docs/plugins.md lists the fields."""
        return self._call("status")

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[CachedPages]:
        """Returns which pages of a prompt are cached, for each KV group. Changes nothing.

        Args:
            tokens: the prompt's token ids, from its first token on.
            salt: the request's cache salt; empty if it has none.
        """
        return self._pages(self._call("lookup", tokens=list(tokens), salt=salt))

    def prefetch(self, tokens: Sequence[int], salt: str = "") -> list[CachedPages]:
        """Reads a prompt's pages from the tiers behind host memory into free slots of host memory, as many as fit. When
        they have arrived, returns which pages of the prompt are cached. Host memory may evict the pages like any
        others.
        """
        return self._pages(self._call("prefetch", tokens=list(tokens), salt=salt))

    def forget(self, tokens: Sequence[int], salt: str = "") -> int:
        """Turns a prompt's pages into misses in all tiers, and returns the number of pages. Pages that other prompts
        with the same beginning share become misses for those prompts, too.
        """
        return int(self._call("forget", tokens=list(tokens), salt=salt)["pages"])

    def erase_namespace(self, name: str) -> int:
        """Turns all pages of requests with this `flexkv.namespace` into misses in all tiers, and returns the number of
        pages. Pages that such requests store afterwards are cached again.
        """
        return int(self._call("erase_namespace", namespace=name)["pages"])

    def pin(self, tokens: Sequence[int], seconds: float, salt: str = "") -> int:
        """Pins a prompt's pages in host memory for `seconds`, at most an hour: they are not evicted meanwhile. Begins
        with the prompt's first page, stops at the limit of pinned pages, and returns how many pages were pinned.
        `unpin`, the end of this connection and a reset of the cache end the pins earlier.
        """
        return int(self._call("pin", tokens=list(tokens), salt=salt, seconds=seconds)["pages"])

    def unpin(self) -> int:
        """Ends the pins of this connection, and returns how many pages were pinned."""
        return int(self._call("unpin")["pages"])

    def _pages(self, reply: dict[str, Any]) -> list[CachedPages]:
        return [CachedPages(**group) for group in reply["groups"]]

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        ends_s = time.monotonic() + self._deadline_s + MARGIN_S
        try:
            self._connection.settimeout(self._deadline_s + MARGIN_S)
            self._connection.sendall(encoded({"call": name, "deadline_s": self._deadline_s, **arguments}))
            reply = decoded(self._line(ends_s))
        except OSError as error:
            self.close()  # a late answer would look like the answer to the next call
            raise PluginCallError(f"{name}: {error or type(error).__name__}") from error
        if refusal := reply.pop("error", ""):
            raise PluginCallError(f"{name}: {refusal}")
        return reply

    def _line(self, ends_s: float) -> bytes:
        while b"\n" not in self._received:
            self._connection.settimeout(max(0.001, ends_s - time.monotonic()))
            chunk = self._connection.recv(CHUNK_BYTES)
            if not chunk or len(self._received) > MOST_LINE_BYTES:
                raise OSError("the unit has ended the connection")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> UnitClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(name: str | None = None, deadline_s: float = 30.0) -> UnitClient:
    """Connects to a unit on this machine.

    Args:
        name: name of the unit's socket; None for the unit of this plugin, whose environment has the name.
        deadline_s: seconds that each call may take, at most 600.

    Raises:
        PluginCallError: no name is given and this process is not a plugin, or no unit of this user listens at the
            socket.
    """
    name = name or os.environ.get("FLEXKV_PLUGIN_SOCKET", "")
    if not name:
        raise PluginCallError("FLEXKV_PLUGIN_SOCKET is not set: this process is no plugin of flexkv")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(deadline_s)
        connection.connect("\0" + name)
        if not is_same_user(connection):
            raise OSError("a process of another user listens there")
    except OSError as error:
        connection.close()
        raise PluginCallError(f"no unit listens at {name} on this machine: {error}") from error
    return UnitClient(connection, deadline_s)
