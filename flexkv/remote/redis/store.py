"""Redis as a store: a client of one or more independent servers.

Each name belongs to one server, which `placement` chooses. A server that does not answer affects only its own names,
and is not called for a while. The login's user needs the permissions `+ping +exists +get +set +unlink`, and `+select`
if a URL contains a database.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flexkv.errors import StoreError
from flexkv.remote.base import NO_VALUE, NOT_SAID, Outcome, Presence, Store, StoreOptions, Value
from flexkv.remote.redis.address import parse_addresses
from flexkv.remote.redis.connection import Connection, Login
from flexkv.remote.redis.exchange import Command, Exchange
from flexkv.remote.redis.placement import seeds_of, spread
from flexkv.remote.redis.resp import Bulk, Refusal, Reply, command, command_a_name, set_frame
from flexkv.remote.redis.server import Server
from flexkv.remote.redis.turns import run_together

NO_SPACE = "OOM"
FLAG = frozenset((b":0", b":1"))
NOTHING = frozenset((b"$-1",))
OK = frozenset((b"+OK",))
RETRY_S = 0.25
"""A server that did not answer is not called for a while: it rests. After its rest, a call also pings the server, and
waits at most this many seconds for the answer to the ping.
"""

WRONG_TYPE = "WRONGTYPE"
"""The error code for a key whose value is not a string but a list, a set or another type that another program has
stored.
"""

AWAY = Refusal("its server is left alone for now")

PRESENCE: dict[Reply, Presence] = {0: Presence.NO, 1: Presence.YES}


class RedisStore(Store):
    """A client of Redis servers. A put overwrites a value. No reader sees a half-written value, because SET is atomic
    on the server. Overwriting also replaces a value that has failed its verification and could not be removed.

    Raises:
        StoreError: a URL is not allowed, `ca_file` cannot be used, there is a user without a password, or there are
            RDMA devices.
    """

    def __init__(self, options: StoreOptions) -> None:
        addresses = parse_addresses(options.urls)
        if options.user and not options.password:
            raise StoreError(f"remote.user={options.user!r} needs remote.password_file")
        tls = _trusting(options.ca_file) if addresses[0].tls else None
        if options.ca_file and tls is None:
            raise StoreError(
                f"remote.ca_file={options.ca_file!r} needs rediss:// in remote.urls: redis:// is no TLS"
            )
        if options.rdma_devices:
            raise StoreError("Redis is reached over TCP alone: remote.rdma_devices must be empty")
        login = Login(options.user, options.password)
        connections = [Connection(address, login, tls, options.connect_s) for address in addresses]
        self._servers = [Server(connection, rests=len(addresses) > 1) for connection in connections]
        self._seeds = seeds_of([address.identity for address in addresses])
        self._ttl_s = options.ttl_s

    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        replies = self._ask_flags(b"EXISTS", names, deadline_s)
        return [PRESENCE.get(reply, Presence.UNKNOWN) for reply in replies]

    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        keys = [name.encode() for name in names]
        commands, sizes = [], []
        for key, value in zip(keys, values, strict=True):
            into = [part.data for part in value]
            sizes.append(sum(map(len, into)))
            commands.append(Command((command(b"GET", key),), max(sizes[-1], len(key)), NOTHING, 1, into))
        replies = self._ask(keys, lambda mine: [commands[number] for number in mine], deadline_s)
        return [_got(reply, size) for reply, size in zip(replies, sizes, strict=True)]

    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        keys = [name.encode() for name in names]
        commands = []
        for key, value in zip(keys, values, strict=True):
            parts = [part.data for part in value]
            size = sum(map(len, parts))
            head, tail = set_frame(key, size, self._ttl_s)
            commands.append(Command((head, *parts, tail), len(head) + size, OK))
        replies = self._ask(keys, lambda mine: [commands[number] for number in mine], deadline_s)
        return [_put(reply) for reply in replies]

    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        """See `Store.sizes`. Reads the values and drops them, because that needs only the permissions that engines
        need.
        """
        keys = [name.encode() for name in names]

        def commands(mine: Sequence[int]) -> list[Command]:
            return [
                Command((command(b"GET", keys[number]),), len(keys[number]), NOTHING, 1, ())
                for number in mine
            ]

        return [_size(reply) for reply in self._ask(keys, commands, deadline_s)]

    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        return [reply in PRESENCE for reply in self._ask_flags(b"UNLINK", names, deadline_s)]

    def alive(self, deadline_s: float) -> str:
        ends_s = time.monotonic() + deadline_s
        used = {number for number, server in enumerate(self._servers) if server.usable}
        resting = set(range(len(self._servers))) - used
        # Resting servers (servers that are not called for now) are pinged with the full deadline only if no other
        # server answers. Otherwise `_run` pings those whose rest is over, and waits for them RETRY_S at most.
        for numbers in filter(None, (used, resting)):
            pings = {number: self._servers[number].ping(ends_s) for number in numbers}
            self._run(pings)
            if any(ping.replies == ["PONG"] for ping in pings.values()):
                self.last_error = next((each.why_not for each in self._servers if each.why_not), "")
                return ""
        return self.last_error

    def close(self) -> None:
        for server in self._servers:
            server.connection.close()

    def _ask_flags(self, word: bytes, names: Sequence[str], deadline_s: float) -> list[Reply]:
        keys = [name.encode() for name in names]

        def commands(mine: Sequence[int]) -> list[Command]:
            sent = command_a_name(word, [keys[number] for number in mine])
            return [Command((sent,), len(sent), FLAG, len(mine))]

        return self._ask(keys, commands, deadline_s)

    def _ask(
        self, keys: Sequence[bytes], commands: Callable[[Sequence[int]], list[Command]], deadline_s: float
    ) -> list[Reply]:
        """Sends the commands for all keys, each to its server. Returns one reply per key; a `Refusal` if none came.

        Args:
            commands: makes the commands for the keys with given numbers.
            deadline_s: deadline of the call, in seconds from now.
        """
        ends_s = time.monotonic() + deadline_s
        servers = spread(keys, self._seeds)
        numbers = {
            server: np.nonzero(servers == server)[0].tolist() for server in np.unique(servers).tolist()
        }
        exchanges = {
            server: Exchange(self._servers[server].connection, commands(mine), ends_s)
            for server, mine in numbers.items()
            if self._servers[server].usable
        }
        self._run(exchanges)
        replies: list[Reply] = [Refusal("no answer")] * len(keys)
        for server, mine in numbers.items():
            if server not in exchanges:
                for number in mine:
                    replies[number] = AWAY
                self.last_error = self.last_error or self._servers[server].why_not
                continue
            for number, reply in zip(mine, exchanges[server].replies, strict=False):
                replies[number] = reply
        return replies

    def _run(self, exchanges: Mapping[int, Exchange]) -> None:
        """Carries out `exchanges`, which maps servers' numbers to the exchanges with them. At the same time pings
        servers whose rest (the time without calls after a failure) is over.
        """
        retry_s = time.monotonic() + RETRY_S
        pings = {
            number: server.ping(retry_s)
            for number, server in enumerate(self._servers)
            if server.due and number not in exchanges
        }
        asked = {**exchanges, **pings}
        try:
            run_together(exchange.steps() for exchange in asked.values())
        except BaseException:
            self.close()  # replies in flight would be taken for replies to later calls
            raise
        for number, exchange in asked.items():
            self._servers[number].heard(exchange)
        self.last_error = next((each.reason for each in exchanges.values() if each.reason), "")


def _got(reply: Reply, size: int) -> Outcome:
    if reply is AWAY:
        return Outcome.AWAY
    if reply is None:
        return Outcome.ABSENT
    if isinstance(reply, Bulk):
        return Outcome.OK if reply.size == size else Outcome.OTHER_SIZE
    foreign = isinstance(reply, Refusal) and reply.code == WRONG_TYPE
    return Outcome.OTHER_SIZE if foreign else Outcome.FAILED


def _size(reply: Reply) -> int:
    if isinstance(reply, Bulk):
        return reply.size
    return NO_VALUE if reply is None else NOT_SAID


def _put(reply: Reply) -> Outcome:
    if reply == "OK":
        return Outcome.OK
    if reply is AWAY:
        return Outcome.AWAY
    return Outcome.FULL if isinstance(reply, Refusal) and reply.code == NO_SPACE else Outcome.FAILED


def _trusting(ca_file: str) -> ssl.SSLContext:
    """Returns a TLS context that trusts a server if its certificate is for the name in its URL, and is signed by an
    authority in `ca_file`. If `ca_file` is empty, the system's authorities are used.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"remote.ca_file={ca_file!r}: no certificates can be read from it: {error}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
