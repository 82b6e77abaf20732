"""Implements the RESP2 protocol for commands whose reply is one line or one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ConnectionFailed(Exception):
    """The connection can no longer be used. The text says why, and contains no secret."""


class OutOfStep(ConnectionFailed):
    """The server sent something that is not a reply to the command. So nothing that follows on this connection can be
    trusted.
    """


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a server sent, or a text by this client that stands for a reply that never came."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Bulk:
    """A value of `size` bytes, which follow the line with the size."""

    size: int


Reply = int | str | Refusal | Bulk | None
"""The meaning of one line: a number, a word, an error, a value that follows, or (None) no value."""

MOST_DIGITS = 18
"""The maximum number of digits of a number in a reply. A longer number is invalid, although Python's integers would
accept it.
"""
SHOWN_BYTES = 40

COMMON: dict[bytes, Reply] = {b":0": 0, b":1": 1, b"+OK": "OK", b"+PONG": "PONG", b"$-1": None}
"""The most frequent lines with their meaning. The table saves parsing time, because hundreds of these lines come in one
call.
"""


def command(*words: bytes) -> bytes:
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))


def command_a_name(word: bytes, names: Sequence[bytes]) -> bytes:
    """Builds the command `word` for each of the names, as one buffer."""
    head = b"*2\r\n$%d\r\n%b\r\n" % (len(word), word)
    # The head is formatted once per length of a name. There are few lengths, and formatting would take most of the time
    # of a probe with hundreds of names.
    heads = {size: b"%b$%d\r\n" % (head, size) for size in set(map(len, names))}
    return b"".join([part for name in names for part in (heads[len(name)], name, b"\r\n")])


def set_frame(name: bytes, value_bytes: int, ttl_s: int) -> tuple[bytes, bytes]:
    """Returns the bytes of a SET command before and after the value's bytes, which can then be sent without a copy."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(name), name, value_bytes)
    tail = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else b"\r\n"
    return head, tail


def parse_line(line: bytes) -> Reply:
    """Returns the meaning of one line of a server's reply.

    Args:
        line: the line without its end.

    Raises:
        OutOfStep: the line is not a reply to any command of this client.
    """
    if line in COMMON:
        return COMMON[line]
    kind, rest = line[:1], line[1:]
    digits = rest.removeprefix(b"-") if kind == b":" else rest
    if kind in (b":", b"$") and digits.isdigit() and len(digits) <= MOST_DIGITS:
        return int(rest) if kind == b":" else Bulk(int(rest))
    if kind in (b"+", b"-"):
        text = rest.decode("utf-8", "replace")
        return text if kind == b"+" else Refusal(text)
    raise OutOfStep(f"a reply that nobody understands: {line[:SHOWN_BYTES]!r}")
