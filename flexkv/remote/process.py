"""The unit's handle on the helper's process: starts it, exchanges messages with it, kills and reaps it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

from flexkv.errors import StoreError
from flexkv.remote.messages import FromHelper, ToHelper, receive, send
from flexkv.remote.own_program import own_program

SOCKET_BYTES = 4 << 20
"""Size of the socket's buffer, if the kernel allows it: room for packets that come while the other end is busy."""


class HelperProcess:
    """One process. Linux ends it together with the thread that started it, which counts as its parent, so that thread
    must live as long as the unit.

    Args:
        environment: variables that the client's library reads when it is loaded; variables that are already set keep
            their values.

    Raises:
        StoreError: it cannot be started.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise StoreError(f"the process of the remote store does not start: {error}") from error
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        ours.setblocking(False)
        self._sock = ours
        command = [*own_program("flexkv.remote.helper"), str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**environment, **os.environ},
            )
        except OSError as error:
            ours.close()
            raise StoreError(f"the process of the remote store does not start: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToHelper) -> bool:
        """Sends a message; returns False if there is no room now, or if the process is gone, which `ended` shows.

        Raises:
            StoreError: the message is too long for a packet.
        """
        try:
            send(self._sock, message)
        except OSError:
            return False
        return True

    def receive(self) -> FromHelper | None:
        """The next message; None if there is none now.

        Raises:
            StoreError: the packet is not a message of a helper.
        """
        try:
            message = receive(self._sock)
        except OSError:
            return None
        if message is None or isinstance(message, FromHelper):
            return message
        raise StoreError(f"a packet that is no message of a helper: {type(message).__name__}")

    def fileno(self) -> int:
        """The descriptor to wait on for a message."""
        return self._sock.fileno()

    @property
    def ended(self) -> str:
        """How the process ended, for a message; empty until it has ended and was reaped."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"its process ended by signal {-code}" if code < 0 else f"its process ended with {code}"

    def kill(self) -> None:
        """Kills the process. It may touch memory until `ended` reports its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, deadline_s: float) -> bool:
        """Lets the process end by itself, or kills it; returns whether it was reaped in time."""
        self._sock.close()
        for step in (self._process.wait, self._killed):
            try:
                step(max(0.01, deadline_s / 2))
                return True
            except subprocess.TimeoutExpired:
                continue
        return False

    def _killed(self, timeout: float) -> None:
        self.kill()
        self._process.wait(timeout)
