"""What one call asks of one server: commands in a row, answers in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.remote.redis.connection import Connection
from flexkv.remote.redis.resp import COMMON, Bulk, ConnectionFailed, OutOfStep, Refusal, Reply, parse_line
from flexkv.remote.redis.socket_stream import DeadlinePassed
from flexkv.remote.redis.turns import Steps

WINDOW_BYTES = 8 << 20
"""Of commands and values that are asked for and not yet answered: four values of 2 MiB keep both sides busy, and a
server holds no more than this for a client that is slow to read."""
SKIP_BYTES = 4 << 20
"""A value of a wrong size is read and dropped up to here: it takes a few ms, as a new connection with TLS does."""
STALE_CODES = frozenset({"READONLY", "NOAUTH"})
"""Errors that stay as long as the connection: the server became a replica, or the user that it was made by is gone."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or several without a value that are sent as one.

    Attributes:
        buffers: what is sent.
        weight_bytes: of what is sent or of what is to come, whichever is more.
        good: lines that answer it, but for errors and values; of `COMMON`.
        answers: how many of them come.
        into: where a value goes, None for a command that is not answered by one.
    """

    buffers: Sequence[bytes | memoryview]
    weight_bytes: int
    good: frozenset[bytes]
    answers: int = 1
    into: Sequence[memoryview] | None = None


class Exchange:
    """
    Attributes:
        replies: those that came: the first of what `commands` ask for, in their order. A `Bulk` of the right size is in
            its memory, of one of another size nothing is.
        reason: why some are missing, or the first error among them; empty for neither.
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
        """Whether everything was answered, if only by errors."""
        return self._answered == len(self._commands)

    def steps(self) -> Steps:
        """Raises nothing for what the server does."""
        connection = self._connection
        may_be_stale = connection.is_kept()
        while self._answered < len(self._commands):
            try:
                yield from connection.open_steps(self._deadline_s)
                yield from self._converse()
            except ConnectionFailed as failure:
                # The server may have closed a connection of an earlier call just now. It has answered nothing, and what
                # was sent may be sent twice.
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
        """Until all are answered, or a value came that is too long to be skipped: the rest needs a new connection."""
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
        """The answers to one command. Closes the connection where a value is too long to be skipped."""
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
        """Reads a value to where it goes; of another size, to nowhere."""
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
        """The first reason is the cause of the others."""
        self.reason = self.reason or self._connection.explain(reason)
