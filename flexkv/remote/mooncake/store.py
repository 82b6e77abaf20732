"""A client of Mooncake Store, for the remote tier. Operators run Mooncake's master and its owners (the processes whose
memory holds the values).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from flexkv.errors import ContractError, StoreError
from flexkv.remote.base import (
    NO_VALUE,
    NOT_SAID,
    Outcome,
    Part,
    Presence,
    Store,
    StoreOptions,
    Value,
    masked_url,
)
from flexkv.remote.mooncake.client import UNREACHABLE, Client

BATCH_VALUES = 8
"""The maximum number of values per library call. Larger calls are no faster (values of 2 MiB over loopback), and a call
cannot be interrupted.
"""
BATCH_NAMES = 256
"""The maximum number of names per library call of `exists` and `remove`. Such a call takes one round trip of 0.2 ms."""

INFINIBAND = Path("/sys/class/infiniband")
PROBE = "flexkv/alive"
"""The name that `alive` asks for. No value is ever put under this name."""

NO_ROOM, BAD_SIZE, ABSENT, EXISTS, TRANSFER = -200, -600, -704, -705, -800
CODES = {
    NO_ROOM: "the store has no room",
    BAD_SIZE: "the library refused the arguments",
    -703: "the value was never written to its end",
    TRANSFER: "an owner of the store's memory did not answer",
    -900: "the master cannot be reached",
    -901: "the master did not answer",
}
"""What the library's error codes mean, for messages."""

Batch = Callable[[Any, Sequence[str], list[list[int]], list[list[int]]], list[int]]


def parse_url(urls: Sequence[str]) -> tuple[str, int]:
    """Returns host and port of the master.

    Raises:
        StoreError: `urls` is not one URL of the form `mooncake://host:port`.
    """
    shown = [masked_url(url) for url in urls]
    allowed = (
        f"remote.urls={shown}: allowed is one URL mooncake://HOST:PORT, the RPC address of Mooncake's master"
    )
    if len(urls) != 1:
        raise StoreError(allowed)
    try:
        parts = urlsplit(urls[0])
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise StoreError(f"{allowed} ({error})") from None
    rest = (parts.username, parts.password, parts.path.strip("/"), parts.query, parts.fragment)
    if parts.scheme != "mooncake" or not host or not port or any(rest) or ":" in host:
        raise StoreError(allowed)
    return host, port


def check_options(options: StoreOptions) -> None:
    """Refuses options that Mooncake does not have.

    Raises:
        StoreError: a user, a password or certificates are given, or this machine does not have one of the RDMA devices.
    """
    if options.user or options.password or options.ca_file:
        raise StoreError(
            "Mooncake knows neither users nor TLS: remote.user, remote.password_file and remote.ca_file must be empty"
        )
    found = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    absent = [name for name in options.rdma_devices if name not in found]
    if absent:
        raise StoreError(
            f"remote.rdma_devices: {', '.join(absent)} not in {INFINIBAND}; there are: {', '.join(found) or 'none'}"
        )


class MooncakeStore(Store):
    """A client of Mooncake Store. Its calls may return after their deadline: see `Store`.

    A library call moves up to BATCH_VALUES values, or asks about up to BATCH_NAMES names. With CLIENT_ENVIRONMENT it
    takes 1 s if the master is stopped, 2 s if a process that holds values is stopped, and 4.3 s if the master dies
    during the call. No library call begins after the deadline.
    """

    def __init__(self, options: StoreOptions) -> None:
        host, port = parse_url(options.urls)
        check_options(options)
        self._client = Client(host, port, options.connect_s, options.rdma_devices)

    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        codes = self._ask(lambda client, some: client.batch_is_exist(some), names, deadline_s)
        meaning = {1: Presence.YES, 0: Presence.NO}
        return [meaning.get(code, Presence.UNKNOWN) for code in codes]

    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        codes = self._ask(lambda client, some: client.batch_remove(some, force=True), names, deadline_s)
        return [code in (0, ABSENT) for code in codes]

    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        until_s = time.monotonic() + deadline_s
        sizes = [sum(_nbytes(value)) for value in values]
        codes = self._move(_get, names, values, deadline_s, written=True)
        outcomes = []
        for code, size in zip(codes, sizes, strict=True):
            known = {size: Outcome.OK, ABSENT: Outcome.ABSENT}
            outcomes.append(known.get(code, Outcome.OTHER_SIZE if code >= 0 else Outcome.FAILED))
        doubtful = [i for i, code in enumerate(codes) if code in (BAD_SIZE, TRANSFER)]
        for number in self._of_other_size(names, sizes, doubtful, until_s):
            outcomes[number] = Outcome.OTHER_SIZE
        if Outcome.FAILED not in outcomes:
            self.last_error = ""
        return outcomes

    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        codes = self._move(_put, names, values, deadline_s, written=False)
        known = {0: Outcome.OK, EXISTS: Outcome.OK, NO_ROOM: Outcome.FULL}
        return [known.get(code, Outcome.FAILED) for code in codes]

    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        until_s = self._begin(deadline_s)
        codes = [self._size(name, until_s) for name in names]
        return [code if code >= 0 else NO_VALUE if code == ABSENT else NOT_SAID for code in codes]

    def _size(self, name: str, until_s: float) -> int:
        """Returns the size in bytes of the name's value, or the library's error code; -900 if the library was not
        called.
        """
        client = self._client_until(until_s)
        return -900 if client is None else self._heard([int(client.get_size(name))])[0]

    def alive(self, deadline_s: float) -> str:
        # If the master's machine has vanished, the old connection to it does not end. Only a new connection shows
        # whether the master answers.
        self._client.doubt()
        self._ask(lambda client, some: client.batch_is_exist(some), [PROBE], deadline_s, at_once=True)
        return self.last_error

    def register(self, memory: Part) -> str:
        return self._client.register(memory)

    def close(self) -> None:
        self._client.close()

    def _ask(
        self,
        call: Callable[[Any, list[str]], list[int]],
        names: Sequence[str],
        deadline_s: float,
        at_once: bool = False,
    ) -> list[int]:
        """Returns the library's code for each name; -900 if the library was not called for it."""
        until_s = self._begin(deadline_s)
        codes: list[int] = []
        for start in range(0, len(names), BATCH_NAMES):
            client = self._client_until(until_s, at_once)
            if client is None:
                break
            codes += self._heard(call(client, list(names[start : start + BATCH_NAMES])))
        return codes + [-900] * (len(names) - len(codes))

    def _move(
        self, batch: Batch, names: Sequence[str], values: Sequence[Value], deadline_s: float, written: bool
    ) -> list[int]:
        """Returns the library's code for each value; -900 if the library was not called for it.

        Raises:
            ContractError: a part is not a `Part`. The check is needed because the library gets plain addresses and
                checks nothing.
        """
        if len(names) != len(values):
            raise ContractError(f"{len(names)} names with {len(values)} values")
        for value in values:
            for part in value:
                if (
                    part.dtype != np.uint8
                    or not part.flags.c_contiguous
                    or (written and not part.flags.writeable)
                ):
                    raise ContractError(f"a part must be uint8, contiguous{', writable' if written else ''}")
        until_s = self._begin(deadline_s)
        codes: list[int] = []
        for start in range(0, len(names), BATCH_VALUES):
            client = self._client_until(until_s)
            if client is None:
                break
            some = values[start : start + BATCH_VALUES]
            addresses = [[part.ctypes.data for part in value] for value in some]
            codes += self._heard(
                batch(client, names[start : start + BATCH_VALUES], addresses, [*map(_nbytes, some)])
            )
        return codes + [-900] * (len(names) - len(codes))

    def _begin(self, deadline_s: float) -> float:
        self.last_error = ""
        return time.monotonic() + deadline_s

    def _client_until(self, until_s: float, at_once: bool = False) -> Any:
        if time.monotonic() >= until_s:
            self.last_error = self.last_error or "the deadline was over"
            return None
        client = self._client.ready(until_s, at_once)
        if client is None:
            self.last_error = self.last_error or self._client.why
        return client

    def _heard(self, codes: list[int]) -> list[int]:
        """If one of `codes` says that the master did not answer, makes the next call reconnect to it. Also records the
        first error in words. Returns `codes`.
        """
        if min(codes) >= 0:
            return codes
        if not UNREACHABLE.isdisjoint(codes):
            self._client.doubt()
        wrong = next((code for code in codes if code < 0 and code not in (ABSENT, EXISTS)), 0)
        if wrong and not self.last_error:
            self.last_error = f"{CODES.get(wrong, 'Mooncake failed')} (code {wrong})"
        return codes

    def _of_other_size(
        self, names: Sequence[str], sizes: Sequence[int], doubtful: Sequence[int], until_s: float
    ) -> list[int]:
        """Returns the indices in `doubtful` whose values have a size in the store that differs from `sizes`. Asks for
        the sizes, because the library returns the same codes for a value that does not fit as for a failed transfer.
        """
        found = []
        for number in doubtful:
            stored = self._size(names[number], until_s)
            if stored < 0 and stored != ABSENT:
                break
            if stored >= 0 and stored != sizes[number]:
                found.append(number)
        return found


def _nbytes(value: Value) -> list[int]:
    return [part.nbytes for part in value]


def _get(client: Any, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
    codes: list[int] = client.batch_get_into_multi_buffers(list(names), addresses, sizes)
    return codes


def _put(client: Any, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
    codes: list[int] = client.batch_put_from_multi_buffers(list(names), addresses, sizes)
    return codes
