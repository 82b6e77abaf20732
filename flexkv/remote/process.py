"""The unit's handle on its helper: starts the process, exchanges messages with it, kills and reaps it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

from flexkv.errors import StoreError
from flexkv.remote.messages import FromHelper, ToHelper, receive, send
from flexkv.remote.own_program import own_program

SOCKET_BYTES = 4 << 20
"""Size in bytes of each socket's buffer, if the kernel allows it, for packets that are sent while the other end is
busy.
"""


class HelperProcess:
    """One helper process. Linux kills it when the thread that started it ends, because that thread counts as its
    parent. So the helper must be started by a thread that lives as long as the unit.

    Args:
        environment: environment variables that the client's library reads when it is loaded. Variables that are already
            set keep their values.

    Raises:
        StoreError: the process cannot be started.
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
        """Sends a message. Returns False if the socket's buffer is full, or if the process is gone, which `ended`
        shows.

        Raises:
            StoreError: the message is too long for a packet.
        """
        try:
            send(self._sock, message)
        except OSError:
            return False
        return True

    def receive(self) -> FromHelper | None:
        """Returns the next message; None if there is none now.

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
        """The file descriptor that becomes readable when a message arrives."""
        return self._sock.fileno()

    @property
    def ended(self) -> str:
        """How the process ended, for logs; empty until it has ended and was reaped."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"its process ended by signal {-code}" if code < 0 else f"its process ended with {code}"

    def kill(self) -> None:
        """Kills the process, which may still touch memory while `ended` is empty."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, deadline_s: float) -> bool:
        """Waits for the process to end by itself, and kills it after half of `deadline_s` seconds. Returns whether it
        was reaped within `deadline_s`.
        """
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
