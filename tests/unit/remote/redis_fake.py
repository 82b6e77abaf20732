"""A fake Redis server that sends exactly the bytes that a test gives it. It simulates faults that a test cannot cause
in a real server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

Script = Callable[[socket.socket, int], None]
"""A function that the server calls with a connection's socket and number. When the function returns, the server closes
the connection."""


class FakeRedis:
    """A context manager that runs the server. The server handles one connection after another.

    Args:
        script: called for each connection, with its socket and its number, counted from 1.

    Attributes:
        connections: number of connections so far.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeRedis:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        with socket.socket() as waker:
            waker.connect(("127.0.0.1", self.port))
        self._thread.join(30.0)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            taken, _ = self._listener.accept()
            with taken:
                if self._ends.is_set():
                    return
                self.connections += 1
                taken.settimeout(20.0)
                try:
                    self._script(taken, self.connections)
                except OSError:
                    continue  # the client is right to disconnect after these bytes


def says(*pieces: bytes, then: Callable[[socket.socket], None] | None = None) -> Script:
    """Returns a script that waits for a request, sends each of the given pieces with a separate call, and then calls
    `then`.

    Without `then`, the connection stays open until the client closes it.
    """

    def script(taken: socket.socket, number: int) -> None:
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken.recv(1 << 16)
        for piece in pieces:
            taken.sendall(piece)
        if then is not None:
            then(taken)
            return
        while taken.recv(1 << 16):
            pass

    return script


def hang_up(taken: socket.socket) -> None:
    taken.shutdown(socket.SHUT_RDWR)
