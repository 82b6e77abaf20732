"""One call's exchange with one server: sends commands back to back, and receives the answers in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.remote.redis.connection import Connection
from flexkv.remote.redis.resp import COMMON, Bulk, ConnectionFailed, OutOfStep, Refusal, Reply, parse_line
from flexkv.remote.redis.socket_stream import DeadlinePassed
from flexkv.remote.redis.turns import Steps

WINDOW_BYTES = 8 << 20
"""Most bytes of commands and values that are requested but not yet answered: four values of 2 MiB keep both sides busy,
and a server buffers no more than this for a client that reads slowly.
"""
SKIP_BYTES = 4 << 20
"""A value of a wrong size is read and dropped if it is no larger: that takes a few ms, as a new connection with TLS
does."""
STALE_CODES = frozenset({"READONLY", "NOAUTH"})
"""Errors that persist as long as the connection does: the server became a replica, or the login's user was removed."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or several commands without values that are sent together.

    Attributes:
        buffers: the bytes to send.
        weight_bytes: bytes to send or bytes to receive, whichever is more.
        good: lines of `COMMON` that answer it, besides errors and values.
        answers: how many answers come.
        into: memory for a value; None for a command whose answer is not a value.
    """

    buffers: Sequence[bytes | memoryview]
    weight_bytes: int
    good: frozenset[bytes]
    answers: int = 1
    into: Sequence[memoryview] | None = None


class Exchange:
    """Commands sent to one server, and the replies received so far.

    Attributes:
        replies: replies that came, in the order of `commands`; the last ones may be missing. The bytes of a `Bulk` are
            in its memory if their size is right; else they were dropped.
        reason: why replies are missing, or the first error among them; empty for neither.
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
        """Whether every command was answered, even if by an error."""
        return self._answered == len(self._commands)

    def steps(self) -> Steps:
        """Sends the commands and receives the replies. Raises nothing because of what the server does."""
        connection = self._connection
        may_be_stale = connection.is_kept()
        while self._answered < len(self._commands):
            try:
                yield from connection.open_steps(self._deadline_s)
                yield from self._converse()
            except ConnectionFailed as failure:
                # The server may just have closed a connection of an earlier call. It has answered nothing,
                # and sending the commands twice is harmless.
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
        """Continues until all commands are answered, or a value is too long to be skipped; the rest then needs a new
        connection.
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
        """Takes the answers to one command. Closes the connection if a value is too long to be skipped."""
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
        """Reads a value into its memory, or drops it if it has another size."""
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
        """Keeps the first reason, which is the cause of the others."""
        self.reason = self.reason or self._connection.explain(reason)
