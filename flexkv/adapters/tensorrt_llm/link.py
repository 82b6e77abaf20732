"""Sockets between rank 0's scheduler and the workers of all ranks, in addition to the engine's own channel.

TensorRT-LLM carries no data from a worker to the scheduler, and none from the scheduler to a worker in an iteration
without a batch. So rank 0 listens on a local socket with an unguessable name, which the ranks get with their first
metadata. Neither side ever waits: bytes that cannot be sent yet are kept, up to MAX_WAITING_BYTES.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from typing import Any

from flexkv.errors import ClosedError
from flexkv.observe import get_logger
from flexkv.same_user import is_same_user

logger = get_logger(__name__)

LENGTH = struct.Struct("<I")

CHUNK_BYTES = 1 << 18
"""Largest number of bytes that one system call sends or receives; a socket's default buffer holds about as much."""

MAX_STRANGERS = 64
"""Largest number of connections that may be open without being admitted. If there are more, the oldest are closed."""

MAX_WAITING_BYTES = 64 << 20
"""Largest number of unsent bytes of one connection, enough for the orders for about a million pages. If there are more,
the peer has probably stopped reading, and the connection is closed. A message longer than this is not accepted
either."""


class Wire:
    """One end of a connection. It sends and receives complete messages in order, and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._out = bytearray()
        self._in = bytearray()
        self.closed = ""
        """Why the connection was closed; empty while it is open."""

    def send(self, message: object) -> None:
        """Sends a message. Bytes that the socket does not accept yet are kept for the next `flush`. Does nothing if the
        connection is closed."""
        if self.closed:
            return
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._out += LENGTH.pack(len(content)) + content
        if len(self._out) > MAX_WAITING_BYTES:
            self.close(f"the other side left more than {MAX_WAITING_BYTES} bytes unread")
        self.flush()

    def flush(self) -> None:
        """Sends as many of the kept bytes as the socket accepts now."""
        while self._out and not self.closed:
            try:
                sent = self._socket.send(self._out[:CHUNK_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                self.close(str(error))
                return
            del self._out[:sent]

    def receive(self) -> list[Any]:
        """Flushes, and returns the messages that have arrived since the last call."""
        self.flush()
        while not self.closed:
            try:
                chunk = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.close(str(error))
                break
            if not chunk:
                self.close("the other side ended")
            self._in += chunk
        messages: list[Any] = []
        while len(self._in) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._in)
            if size > MAX_WAITING_BYTES:
                return self._end_garbled(
                    messages, f"a message of {size} bytes; allowed are {MAX_WAITING_BYTES}"
                )
            if len(self._in) < LENGTH.size + size:
                break
            content = bytes(self._in[LENGTH.size : LENGTH.size + size])
            del self._in[: LENGTH.size + size]
            try:
                messages.append(pickle.loads(content))
            except Exception as error:  # for bytes that are not a pickle, loads() may raise any exception
                return self._end_garbled(messages, f"{type(error).__name__}: {error}")
        return messages

    def _end_garbled(self, messages: list[Any], reason: str) -> list[Any]:
        self._in.clear()
        self.close(f"what came is no message: {reason}")
        return messages

    def close(self, reason: str = "closed here") -> None:
        """Closes the connection. Idempotent; the first reason is kept."""
        self.closed = self.closed or reason
        self._out.clear()
        self._socket.close()


class Listener:
    """The scheduler's end of all connections. Only processes of the same user on this machine may connect.

    Before a connection is admitted with `admit`, its messages are received, but `broadcast` sends nothing to it, and
    `broken` does not report its closing.
    """

    def __init__(self) -> None:
        self.address = f"flexkv-{os.getpid()}-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The name is in Linux's abstract namespace, so no file is left behind however the process ends.
        self._socket.bind("\0" + self.address)
        self._socket.setblocking(False)
        self._socket.listen(64)
        self._wires: list[Wire] = []
        self._strangers: list[Wire] = []

    def poll(self) -> list[tuple[Wire, Any]]:
        """Accepts new connections, and returns the messages that have arrived on all connections since the last call:
        pairs of a connection and a message. The messages of each connection are in the order in which they were
        sent."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                break
            if is_same_user(connection):
                self._strangers.append(Wire(connection))
            else:
                logger.warning("a process of another user tried to connect; it was turned away")
                connection.close()
        for wire in self._strangers[:-MAX_STRANGERS]:
            wire.close("too many connections that never joined")
        received = [
            (wire, message) for wire in (*self._wires, *self._strangers) for message in wire.receive()
        ]
        self._strangers = [wire for wire in self._strangers if not wire.closed]
        return received

    def admit(self, wire: Wire) -> None:
        """Admits a connection as that of a rank. If the connection was closed after its message arrived, `broken`
        reports the closing."""
        if wire in self._strangers:
            self._strangers.remove(wire)
        self._wires.append(wire)

    def broadcast(self, message: object) -> None:
        """Sends a message to every admitted rank."""
        for wire in self._wires:
            wire.send(message)

    @property
    def broken(self) -> str:
        """Why the connection of an admitted rank was closed; empty while all of them are open."""
        return next((wire.closed for wire in self._wires if wire.closed), "")

    def close(self) -> None:
        self._socket.close()
        for wire in (*self._wires, *self._strangers):
            wire.close()


def connect(address: str) -> Wire:
    """Connects a rank to its scheduler, and returns the rank's end.

    Raises:
        ClosedError: no process of this user listens at the address, because the scheduler has exited or runs on a
            different machine.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + address)
    except OSError as error:
        connection.close()
        raise ClosedError(f"no scheduler listens at {address} on this machine: {error}") from error
    if not is_same_user(connection):
        connection.close()
        raise ClosedError(f"a process of another user listens at {address}")
    return Wire(connection)
