"""Sends bytes to one server and receives its bytes, with or without TLS. Large buffers are not copied."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Generator, Iterable
from itertools import islice

from flexkv.remote.redis.resolver import Found
from flexkv.remote.redis.resp import ConnectionFailed, OutOfStep
from flexkv.remote.redis.turns import Steps, Turn, TurnWait

LINE_BYTES = 8192
"""Size of the buffer for the lines of replies, and so the maximum length of a line, in bytes. If the beginning of a
value arrives in this buffer, behind the line before the value, it is copied to the value's memory.
"""
MOST_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)
"""The maximum number of buffers in one `sendmsg` call."""
TLS_SEND_BYTES = 1 << 18
"""The maximum number of bytes that OpenSSL gets in one call. If OpenSSL cannot send the bytes, the next call must pass
the same bytes again, so this number is small.
"""
SCRATCH_BYTES = 1 << 16


class DeadlinePassed(ConnectionFailed):
    """No reply came in time. The reply may still come later and must not be taken for the reply to another call, so the
    connection is not used again.
    """


class SocketStream:
    """One connection that never blocks. Each method that has to wait is a generator, and yields the event that it waits
    for.

    The stream continues to send while it waits for replies. If it sent everything first, it would deadlock with a
    server that stops reading until its replies are read.

    Attributes:
        received: whether any byte has come since `begin`.
    """

    def __init__(self, address: Found, tls: ssl.SSLContext | None, host: str) -> None:
        family, self._address = address
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._tls, self._host = tls, host
        self._to_send: deque[memoryview] = deque()
        self._send_events = select.POLLOUT
        self._send_error = ""
        self._line_memory = bytearray(LINE_BYTES)
        self._lines = memoryview(self._line_memory)
        self._start = self._end = 0
        self._until_s = 0.0
        self._late = ""
        self.received = False

    def begin(self, until_s: float) -> None:
        """Sets a new deadline: a time in seconds of the monotonic clock."""
        self._until_s = until_s
        self._late = "no answer in time"
        self.received = False

    def close(self) -> None:
        self._to_send.clear()
        self._socket.close()

    def connect(self) -> Steps:
        """Connects to the server, with TLS if it is configured.

        Raises:
            ConnectionFailed: the connection was refused or not made in time, or TLS does not trust the server.
        """
        self._late = "no connection in time"
        try:
            self._socket.connect(self._address)
        except BlockingIOError:
            yield from self._wait(select.POLLOUT)
        except OSError as error:
            raise ConnectionFailed(f"no connection: {error.strerror}") from None
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise ConnectionFailed(f"no connection: {os.strerror(number)}")
        # Disables Nagle's algorithm, which would delay a packet to fill it with further bytes. No further bytes would
        # come, because the client sends commands in one piece and then waits for the replies.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            yield from self._handshake(self._tls)

    def _handshake(self, tls: ssl.SSLContext) -> Steps:
        # A server without TLS does not answer the handshake, because it waits for the end of a line.
        self._late = "TLS: no answer in time; does it use TLS?"
        try:
            wrapped = tls.wrap_socket(self._socket, server_hostname=self._host, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            raise ConnectionFailed(f"TLS: {error}") from None
        self._socket = wrapped
        while True:
            try:
                wrapped.do_handshake()
                return
            except ssl.SSLWantReadError:
                yield from self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                yield from self._wait(select.POLLOUT)
            except ssl.SSLCertVerificationError as error:
                raise ConnectionFailed(
                    f"TLS: its certificate is not trusted: {error.verify_message}"
                ) from None
            except OSError as error:
                raise ConnectionFailed(f"TLS: {getattr(error, 'reason', '') or error.strerror}") from None

    def is_idle(self) -> bool:
        """Returns whether the server keeps the connection open and has sent nothing that was not requested."""
        if self._end > self._start:
            return False
        try:
            self._socket.recv_into(self._lines)  # not MSG_PEEK, which TLS does not support
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def send(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Queues buffers, which are sent while the stream waits for replies. They must not change before all replies
        have come.
        """
        self._to_send.extend(memoryview(buffer) for buffer in buffers if len(buffer))

    def lines(self, most: int) -> Generator[Turn, None, list[bytes]]:
        """Returns the next lines without their line ends: all that have already been received, but at most `most`. If
        there is none, waits for one.
        """
        while True:
            *lines, _ = bytes(self._lines[self._start : self._end]).split(b"\r\n", most)
            if lines:
                self._start += sum(map(len, lines)) + 2 * len(lines)
                return lines
            if self._start:
                left = self._end - self._start
                self._lines[:left] = bytes(self._lines[self._start : self._end])
                self._start, self._end = 0, left
            if self._end == LINE_BYTES:
                raise OutOfStep(f"a reply without an end in {LINE_BYTES} bytes")
            self._end += yield from self._receive(self._lines[self._end :])

    def line(self) -> Generator[Turn, None, bytes]:
        return (yield from self.lines(1))[0]

    def fill(self, memory: memoryview) -> Steps:
        """Fills `memory` with the next bytes."""
        at = min(self._end - self._start, len(memory))
        memory[:at] = self._lines[self._start : self._start + at]
        self._start += at
        while at < len(memory):
            at += yield from self._receive(memory[at:])

    def skip(self, size: int) -> Steps:
        scratch = memoryview(bytearray(min(size, SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            yield from self.fill(part)
            size -= len(part)

    def _receive(self, memory: memoryview) -> Generator[Turn, None, int]:
        """Receives at least one byte. Returns how many bytes were received."""
        while True:
            self._send_more()
            events = self._send_events if self._to_send else 0
            try:
                size = self._socket.recv_into(memory)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield from self._wait(events | select.POLLIN)
                continue
            except ssl.SSLWantWriteError:
                yield from self._wait(events | select.POLLOUT)
                continue
            except OSError as error:
                raise ConnectionFailed(self._send_error or f"connection lost: {_reason(error)}") from None
            if not size:
                raise ConnectionFailed(self._send_error or "connection lost: closed by the server")
            self.received = True
            # A server that always has more bytes to read must neither exceed the deadline nor delay other servers.
            self._check_clock()
            yield None
            return size

    def _send_more(self) -> None:
        """Sends as much as is possible now. Does not raise errors, but leaves them to the next read, because a server
        often sends the reason before it closes the connection.
        """
        try:
            while self._to_send:
                if self._tls is None:
                    sent = self._socket.sendmsg(list(islice(self._to_send, MOST_BUFFERS)))
                else:
                    sent = self._socket.send(self._to_send[0][:TLS_SEND_BYTES])
                self._sent(sent)
        except (BlockingIOError, ssl.SSLWantWriteError):
            self._send_events = select.POLLOUT
        except ssl.SSLWantReadError:
            self._send_events = select.POLLIN
        except OSError as error:
            self._send_error = f"connection lost: {_reason(error)}"
            self._to_send.clear()

    def _sent(self, size: int) -> None:
        while size:
            first = self._to_send[0]
            if size < len(first):
                self._to_send[0] = first[size:]
                return
            size -= len(first)
            self._to_send.popleft()

    def _wait(self, events: int) -> Steps:
        self._check_clock()
        yield TurnWait(self._socket.fileno(), events, self._until_s)

    def _check_clock(self) -> None:
        if time.monotonic() >= self._until_s:
            raise DeadlinePassed(self._late)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
