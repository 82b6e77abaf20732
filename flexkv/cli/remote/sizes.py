"""How long values are: a store gives one only to who knows, and a person who asks does not."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from functools import partial

from flexkv.errors import StoreError
from flexkv.remote.base import StoreOptions
from flexkv.remote.mooncake.client import Client
from flexkv.remote.mooncake.store import ABSENT, CODES, parse_url
from flexkv.remote.redis.address import parse_addresses
from flexkv.remote.redis.connection import Connection, Login
from flexkv.remote.redis.exchange import Command, Exchange
from flexkv.remote.redis.placement import seeds_of, spread
from flexkv.remote.redis.resp import Bulk, command
from flexkv.remote.redis.turns import run_together

GET = partial(command, b"GET")
NOTHING = frozenset((b"$-1",))


def value_sizes(options: StoreOptions, names: Sequence[str], deadline_s: float) -> list[int | None]:
    """Bytes of each name's value; None: the store has no such name.

    Raises:
        StoreError: the store did not say.
    """
    of_scheme = _in_mooncake if options.urls[0].startswith("mooncake:") else _in_redis
    return of_scheme(options, names, deadline_s)


def _in_mooncake(options: StoreOptions, names: Sequence[str], deadline_s: float) -> list[int | None]:
    client = Client(*parse_url(options.urls), options.connect_s, options.rdma_devices)
    try:
        library = client.ready(time.monotonic() + deadline_s)
        if library is None:
            raise StoreError(client.why)
        sizes = [int(library.get_size(name)) for name in names]
    finally:
        client.close()
    for size in sizes:
        if size < 0 and size != ABSENT:
            raise StoreError(CODES.get(size, f"the library's code {size}"))
    return [None if size < 0 else size for size in sizes]


def _in_redis(options: StoreOptions, names: Sequence[str], deadline_s: float) -> list[int | None]:
    """By reading to nowhere, which needs no right beside those of an engine."""
    addresses = parse_addresses(options.urls)
    tls = ssl.create_default_context(cafile=options.ca_file or None) if addresses[0].tls else None
    keys = [name.encode() for name in names]
    servers = spread(keys, seeds_of([address.identity for address in addresses]))
    sizes: list[int | None] = []
    for key, server in zip(keys, servers.tolist(), strict=True):
        login = Login(options.user, options.password)
        connection = Connection(addresses[server], login, tls, options.connect_s)
        asked = Exchange(
            connection, [Command((GET(key),), len(key), NOTHING, 1, ())], time.monotonic() + deadline_s
        )
        try:
            run_together([asked.steps()])
        finally:
            connection.close()
        if asked.replies == [None]:
            sizes.append(None)
        elif asked.replies and isinstance(asked.replies[0], Bulk):
            sizes.append(asked.replies[0].size)
        else:
            raise StoreError(asked.reason or "the store did not answer")
    return sizes
