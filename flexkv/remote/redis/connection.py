"""The connection to a server. It is opened when a call needs it, and closed if the next bytes from the server could be
a reply to an earlier call.
"""

from __future__ import annotations

import re
import ssl
import time
from dataclasses import dataclass

from flexkv.remote.redis.address import Address
from flexkv.remote.redis.resolver import Resolver
from flexkv.remote.redis.resp import ConnectionFailed, OutOfStep, Refusal, command, parse_line
from flexkv.remote.redis.socket_stream import SocketStream
from flexkv.remote.redis.turns import Steps

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, which are replaced, because a terminal or a log might interpret them."""
CODE = re.compile(r"[A-Z]{2,16}")


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """How this client logs in. Without a password, it does not log in; without a user, it logs in as the server's
    default user.
    """

    user: str = ""
    password: str = ""

    def words(self) -> list[bytes]:
        said = [self.user, self.password] if self.user else [self.password]
        return [b"AUTH", *(text.encode() for text in said)] if self.password else []

    def mask(self, text: str) -> str:
        """Masks the password in a text from the server, because some errors quote the command."""
        return text.replace(self.password, "***") if self.password else text


class Connection:
    """The connection to one server. Only one call may use it at a time. A call first runs `open_steps`, then uses
    `stream`.
    """

    def __init__(self, address: Address, login: Login, tls: ssl.SSLContext | None, connect_s: float) -> None:
        self.address = address
        self._login = login
        self._tls = tls
        self._connect_s = connect_s
        self._resolver = Resolver(address.host, address.port)
        self._stream: SocketStream | None = None

    @property
    def stream(self) -> SocketStream:
        assert self._stream is not None, "between open_steps and close"
        return self._stream

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def is_kept(self) -> bool:
        """Returns whether the connection of an earlier call is open and can be used. Closes it if it cannot be used."""
        if self._stream is not None and not self._stream.is_idle():
            self.close()
        return self._stream is not None

    def open_steps(self, deadline_s: float) -> Steps:
        """Connects if there is no connection, and sets the deadline of the stream.

        Args:
            deadline_s: the call's deadline on the monotonic clock.

        Raises:
            ConnectionFailed: no connection could be made.
        """
        if self._stream is None:
            yield from self._connect_steps(min(deadline_s, time.monotonic() + self._connect_s))
        self.stream.begin(deadline_s)

    def _connect_steps(self, until_s: float) -> Steps:
        yield from self._resolver.steps(until_s)
        found = self._resolver.found
        for number, address in enumerate(found):
            # Each address gets an equal share of the time left, so that an address that drops all packets does not use
            # up the time of the others.
            now_s = time.monotonic()
            share_s = (until_s - now_s) / (len(found) - number)
            try:
                stream = SocketStream(address, self._tls, self.address.host)
            except OSError as error:
                # This machine lacks the address family, or the process has no file descriptor left.
                if number == len(found) - 1:
                    raise ConnectionFailed(f"no connection: {error.strerror}") from None
                continue
            stream.begin(now_s + share_s)
            try:
                yield from stream.connect()
                stream.begin(until_s)
                yield from self._log_in(stream)
            except ConnectionFailed:
                stream.close()
                if number == len(found) - 1:
                    raise
            except BaseException:
                stream.close()
                raise
            else:
                self._stream = stream
                return

    def _log_in(self, stream: SocketStream) -> Steps:
        asked = [self._login.words()] if self._login.password else []
        if self.address.database:
            asked.append([b"SELECT", b"%d" % self.address.database])
        stream.send([command(*words) for words in asked])
        for words in asked:
            reply = parse_line((yield from stream.line()))
            if isinstance(reply, Refusal):
                # Shows only the error's code. A server that does not know AUTH quotes the arguments, perhaps cut off,
                # so that `mask` would not find the password.
                code = reply.code if CODE.fullmatch(reply.code) else "an error"
                raise ConnectionFailed(f"{words[0].decode()} was refused: {self._login.mask(code)}")
            if reply != "OK":
                raise OutOfStep(f"{words[0].decode()} was not answered with OK")

    def explain(self, text: str) -> str:
        """Returns `text` with the server's address before it and with secrets masked."""
        return f"{self.address}: {UNPRINTABLE.sub('?', self._login.mask(text))}"

    def close(self) -> None:
        """Closes the connection; the next call connects again. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
