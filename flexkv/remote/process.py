"""The helper's process as its unit sees it: started, spoken to, killed and reaped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

from flexkv.errors import StoreError
from flexkv.remote.messages import FromHelper, ToHelper, receive, send
from flexkv.remote.own_program import own_program

SOCKET_BYTES = 4 << 20
"""Of the socket's buffer, where the kernel allows it: for packets that come while the other end does something else."""


class HelperProcess:
    """One process. It ends with the thread that started it, as Linux has it for a parent's death: that thread is to
    live as long as the unit.

    Args:
        environment: variables that the client's library reads when it is loaded; those that are set already stay.

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
        """False: there is no room now, or the process is gone, which `ended` tells.

        Raises:
            StoreError: it is too long for a packet.
        """
        try:
            send(self._sock, message)
        except OSError:
            return False
        return True

    def receive(self) -> FromHelper | None:
        """The next message; None where there is none now.

        Raises:
            StoreError: what came is no message of a helper.
        """
        try:
            message = receive(self._sock)
        except OSError:
            return None
        if message is None or isinstance(message, FromHelper):
            return message
        raise StoreError(f"a packet that is no message of a helper: {type(message).__name__}")

    def fileno(self) -> int:
        """To wait for a message."""
        return self._sock.fileno()

    @property
    def ended(self) -> str:
        """How the process ended and that it was reaped, for a person; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"its process ended by signal {-code}" if code < 0 else f"its process ended with {code}"

    def kill(self) -> None:
        """What it was doing stops; when `ended` says so, and not before, nothing of it touches memory any more."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self, deadline_s: float) -> bool:
        """Lets the process end by itself, or kills it; whether it was reaped in time."""
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
