"""The unit's end of the socket to its plugins: a thread that receives calls, passes them to the unit, and sends the
answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from flexkv.errors import FlexKVError, PluginCallError
from flexkv.observe import get_logger
from flexkv.observe.named_thread import NamedThread
from flexkv.plugins.unit_socket import MOST_LINE_BYTES, MOST_WAIT_S, decoded, encoded
from flexkv.same_user import is_same_user

logger = get_logger(__name__)

MOST_CONNECTIONS = 32
"""The maximum number of connections at once: two for each plugin that a folder may have. Further connections wait until
an earlier one has ended.
"""

CHUNK_BYTES = 1 << 18

DEFAULT_WAIT_S = 30.0
"""Deadline in seconds of a call that does not give one."""

PAUSE_S = 0.1
"""After a connection was refused or failed, no connection is accepted for this many seconds. Otherwise a process of
another user could keep the thread busy, and without free descriptors the same connection would fail again at once.
"""

WARN_EVERY_S = 60.0

CLOSE_S = 2.0
"""Seconds that a close waits for the thread, which is woken and then needs only the time of a few system calls."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a plugin. The server's thread makes it, and abandons it if it takes too long. The unit's thread
    answers it.

    Attributes:
        name: which function of the unit is called.
        ends_s: when the call is abandoned, in seconds of the monotonic clock.
        connection: the connection from which the call came.
        reply: the answer; None until there is one.
        is_over: whether the call was answered or abandoned.
    """

    name: str
    arguments: dict[str, Any]
    ends_s: float
    server: UnitServer
    connection: Connection
    reply: dict[str, Any] | None = None
    is_over: bool = False

    def answer(self, reply: dict[str, Any]) -> None:
        """Answers the call, from any thread."""
        self.reply = reply
        self.server.note_answer(self)


class CallTaker(ABC):
    """The interface through which the server passes calls to the unit."""

    @abstractmethod
    def take(self, call: Call) -> None:
        """Answers the call, or keeps it to be answered later. The server's thread calls this, so it must not wait.

        Raises:
            FlexKVError: the call is refused; the message is the answer.
        """


@dataclass(slots=True, eq=False)
class Connection:
    """One plugin's connection. It has one call at a time, until the last byte of the call's answer was sent. Further
    calls wait in the socket, so the server needs no queue for them.

    Attributes:
        received: received bytes of calls that have not begun.
        unsent: bytes of an answer for which the socket's buffer had no space.
        call: the call that is not answered yet; None if there is none.
        is_over: whether the connection has ended. The server's thread sets it, and the unit's thread reads it.
    """

    socket: socket.socket
    received: bytearray
    unsent: bytearray
    call: Call | None = None
    is_over: bool = False


class UnitServer:
    """The thread that serves plugins' calls on the unit's socket.

    Args:
        name: name of the socket, from `socket_name`.
        taker: receives the calls.

    Raises:
        OSError: the socket or the thread cannot be made.
    """

    def __init__(self, name: str, taker: CallTaker) -> None:
        self._taker = taker
        self._connections: dict[int, Connection] = {}
        self._answered: deque[Call] = deque()
        self._is_closing = False
        self._listens_at_s = 0.0
        self._warned_s = -WARN_EVERY_S
        self._turned_away = 0
        with contextlib.ExitStack() as on_error:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            on_error.callback(self._listener.close)
            self._listener.setblocking(False)
            self._listener.bind("\0" + name)
            self._listener.listen(MOST_CONNECTIONS)
            self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            on_error.callback(os.close, self._woken)
            self._thread = NamedThread("flexkv-unit-api", self._serve)
            try:
                self._thread.start()
            except RuntimeError as error:
                raise OSError(f"no thread: {error}") from error
            on_error.pop_all()

    def note_answer(self, call: Call) -> None:
        """Queues the answer of a call, and wakes the server's thread, which sends it. Any thread may call this."""
        self._answered.append(call)
        if self._woken >= 0:
            self._wake()

    def close(self) -> bool:
        """Ends all connections, and returns whether the thread has ended. Idempotent. The unit's thread calls this."""
        self._is_closing = True
        if self._woken >= 0:
            self._wake()
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                # Nothing else writes to `_woken`: answers come only from this thread and from the server's, which has
                # ended.
                os.close(self._woken)
                self._woken = -1
        return self._woken < 0

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full, so the thread will wake anyway
            os.eventfd_write(self._woken, 1)

    # --- the thread ---

    def _serve(self) -> None:
        while not self._is_closing:
            self._turn()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._listener.close()

    def _turn(self) -> None:
        """Waits for connections, calls, answers or deadlines, and handles them."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        now_s = time.monotonic()
        due = [c.call.ends_s for c in self._connections.values() if c.call is not None]
        if now_s < self._listens_at_s:
            due.append(self._listens_at_s)
        elif len(self._connections) < MOST_CONNECTIONS:
            poll.register(self._listener, select.POLLIN)
        for number, connection in self._connections.items():
            poll.register(number, self._wanted(connection))
        timeout_ms = 1000 * max(0.0, min(due) - now_s) + 1 if due else None
        ready = dict(poll.poll(timeout_ms))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._listener.fileno() in ready:
            self._accept()
        for number, events in ready.items():
            if (one := self._connections.get(number)) is not None:
                self._attend(one, events)
        while self._answered:
            self._send_answer(self._answered.popleft())
        self._give_up_late(time.monotonic())

    def _wanted(self, connection: Connection) -> int:
        """Returns the poll event to wait for. No call is received until the previous answer was sent."""
        if connection.unsent:
            return select.POLLOUT
        return select.POLLIN if connection.call is None else 0

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            self._turn_away(str(error))
            return
        if not is_same_user(accepted):
            accepted.close()
            self._turn_away("it came from a process of another user")
            return
        accepted.setblocking(False)
        self._connections[accepted.fileno()] = Connection(accepted, bytearray(), bytearray())

    def _turn_away(self, reason: str) -> None:
        """Counts a connection that was not accepted. Logs the count and the last reason at most once per minute."""
        now_s = time.monotonic()
        self._listens_at_s = now_s + PAUSE_S
        self._turned_away += 1
        if now_s - self._warned_s >= WARN_EVERY_S:
            logger.warning(
                "%d connections to the unit's socket were turned away, the last because %s",
                self._turned_away,
                reason,
            )
            self._warned_s, self._turned_away = now_s, 0

    def _attend(self, connection: Connection, events: int) -> None:
        if events & select.POLLIN:
            self._receive(connection)
        elif events & (select.POLLHUP | select.POLLERR):
            self._end(connection)
            return
        if connection.unsent and events & select.POLLOUT:
            self._send(connection)
            self._go_on(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            chunk = connection.socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        connection.received += chunk
        if not chunk or len(connection.received) > MOST_LINE_BYTES:
            self._end(connection)
            return
        self._begin_call(connection)

    def _begin_call(self, connection: Connection) -> None:
        """Passes the first received call to the unit, if the call is complete."""
        line, found, rest = connection.received.partition(b"\n")
        if not found:
            return
        connection.received = rest
        connection.call = call = Call("", {}, time.monotonic() + DEFAULT_WAIT_S, self, connection)
        try:
            call.arguments = decoded(bytes(line))
            call.name = str(call.arguments.pop("call", ""))
            wait_s = call.arguments.pop("deadline_s", DEFAULT_WAIT_S)
            if not isinstance(wait_s, (int, float)) or not 0 < wait_s <= MOST_WAIT_S:
                raise PluginCallError(f"deadline_s={wait_s!r}; allowed are numbers up to {MOST_WAIT_S:g}")
            call.ends_s = time.monotonic() + wait_s
            self._taker.take(call)
        except FlexKVError as error:
            call.answer({"error": str(error)})
        except Exception as error:
            logger.exception("a plugin's call %r failed", call.name)
            call.answer({"error": f"{type(error).__name__}: {error}"})

    def _send_answer(self, call: Call) -> None:
        if call.is_over:
            return
        call.is_over = True
        connection = next((each for each in self._connections.values() if each.call is call), None)
        if connection is None or call.reply is None:
            return
        connection.call = None
        try:
            connection.unsent += encoded(call.reply)
        except PluginCallError as error:
            connection.unsent += encoded({"error": str(error)})
        self._send(connection)
        self._go_on(connection)

    def _go_on(self, connection: Connection) -> None:
        """Begins the next call if all of the last answer was sent. So answers cannot pile up if a plugin does not read
        them.
        """
        if connection.socket.fileno() >= 0 and connection.call is None and not connection.unsent:
            self._begin_call(connection)

    def _send(self, connection: Connection) -> None:
        try:
            del connection.unsent[: connection.socket.send(connection.unsent[:CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._end(connection)

    def _give_up_late(self, now_s: float) -> None:
        for connection in list(self._connections.values()):
            call = connection.call
            if call is not None and not call.is_over and now_s >= call.ends_s:
                call.reply = {"error": "not carried out in time: the engine takes calls in its steps alone"}
                self._send_answer(call)

    def _end(self, connection: Connection) -> None:
        """Ends a connection and abandons its call."""
        connection.is_over = True
        if connection.call is not None:
            connection.call.is_over = True
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
