"""One call's exchange with one server. It sends commands without waiting for the reply to each, and receives the
replies in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.remote.redis.connection import Connection
from flexkv.remote.redis.resp import COMMON, Bulk, ConnectionFailed, OutOfStep, Refusal, Reply, parse_line
from flexkv.remote.redis.socket_stream import DeadlinePassed
from flexkv.remote.redis.turns import Steps

WINDOW_BYTES = 8 << 20
"""The maximum number of bytes of commands and values in flight, that is, sent or requested and not yet answered. Four
values of 2 MiB keep both sides busy. The limit also bounds how much a server must buffer for a client that reads
slowly.
"""
SKIP_BYTES = 4 << 20
"""A value of a wrong size is read and dropped if it has at most this many bytes. That takes a few ms, about as long as
opening a new connection with TLS. For a larger value the connection is closed instead.
"""
STALE_CODES = frozenset({"READONLY", "NOAUTH"})
"""The codes of errors that last as long as the connection: the server has become a replica, or the login's user was
removed. After such an error the connection is closed.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or several commands without values that are sent together.

    Attributes:
        buffers: the bytes to send.
        weight_bytes: the larger of the bytes to send and the bytes to receive, for WINDOW_BYTES.
        good: the lines in `COMMON` that are allowed as replies. Errors, and values if `into` is set, are always
            allowed.
        answers: number of replies that the server sends.
        into: memory for the value in the reply; None if the reply is not a value.
    """

    buffers: Sequence[bytes | memoryview]
    weight_bytes: int
    good: frozenset[bytes]
    answers: int = 1
    into: Sequence[memoryview] | None = None


class Exchange:
    """Commands sent to one server, and the replies received so far.

    Attributes:
        replies: the replies received, in the order of the commands; the last ones may be missing. The bytes of a `Bulk`
            were read into the command's memory if their size is right; else they were dropped.
        reason: why replies are missing, or the first error among the replies; empty if there is neither.
    """

    def __init__(self, connection: Connection, commands: Sequence[Command], deadline_s: float) -> None:
        self._connection = connection
        self._commands = commands
        self._deadline_s = deadline_s
        self._answered = 0
        self.replies: list[Reply] = []
        self.reason = ""

    @property
    def complete(self) -> bool:
        """Whether every command was answered, perhaps with an error."""
        return self._answered == len(self._commands)

    def steps(self) -> Steps:
        """Sends the commands and receives the replies. Raises no exception because of what the server does."""
        connection = self._connection
        may_be_stale = connection.is_kept()
        while self._answered < len(self._commands):
            try:
                yield from connection.open_steps(self._deadline_s)
                yield from self._converse()
            except ConnectionFailed as failure:
                # If no byte has come on a connection of an earlier call, the server may just have closed it. Then a new
                # connection is tried once, because sending the commands twice does no harm.
                again = (
                    may_be_stale
                    and not isinstance(failure, DeadlinePassed)
                    and not self.replies
                    and not connection.stream.received
                )
                may_be_stale = False
                connection.close()
                if not again:
                    self._note(str(failure))
                    return

    def _converse(self) -> Steps:
        """Sends commands and receives replies until all commands are answered. If a value is too long to be skipped,
        closes the connection and returns; the remaining commands then need a new connection.
        """
        stream, commands, first = self._connection.stream, self._commands, len(self.replies)
        sent, in_flight = self._answered, 0
        for number in range(self._answered, len(commands)):
            while sent < len(commands) and (
                sent == number or in_flight + commands[sent].weight_bytes <= WINDOW_BYTES
            ):
                stream.send(commands[sent].buffers)
                in_flight += commands[sent].weight_bytes
                sent += 1
            yield from self._hear(commands[number])
            self._answered += 1
            if not self._connection.is_open:
                return
            in_flight -= commands[number].weight_bytes
        if any(isinstance(reply, Refusal) and reply.code in STALE_CODES for reply in self.replies[first:]):
            self._connection.close()

    def _hear(self, command: Command) -> Steps:
        """Receives the replies to one command. Closes the connection if a value is too long to be skipped."""
        left = command.answers
        while left:
            lines = yield from self._connection.stream.lines(left)
            left -= len(lines)
            if command.good.issuperset(lines):
                self.replies.extend(map(COMMON.__getitem__, lines))
                continue
            for line in lines:
                reply = parse_line(line)
                if isinstance(reply, Bulk) and command.into is not None:
                    yield from self._take(reply.size, command.into)
                elif isinstance(reply, Refusal):
                    self._note(reply.text)
                elif line not in command.good:
                    raise OutOfStep(f"an answer to another question: {reply!r}")
                self.replies.append(reply)

    def _take(self, size: int, into: Sequence[memoryview]) -> Steps:
        """Reads a value into its memory, or drops it if it has a different size."""
        stream = self._connection.stream
        if size == sum(map(len, into)):
            for part in into:
                yield from stream.fill(part)
        elif size <= SKIP_BYTES:
            yield from stream.skip(size)
        else:
            self._connection.close()
            return
        if (yield from stream.line()):
            raise OutOfStep("a value that is longer than was said")

    def _note(self, reason: str) -> None:
        """Records a reason if it is the first one, because the first failure usually causes the others."""
        self.reason = self.reason or self._connection.explain(reason)
