"""The contract of a store that machines share. It maps names to values, on servers that may be slow, dead or lying.

A store is not trusted. Its answers about values are hints, and readers verify every value. Every call takes a deadline,
in seconds from its start, and returns within it, plus at most the time of one system call. Only one thread may use an
object; a process that asks and moves at the same time opens two.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Part = NDArray[np.uint8]
"""Bytes of a value in memory: uint8 [n], C-contiguous; writable if a value is read into it."""

Value = Sequence[Part]
"""One value: its parts, which are contiguous in the store."""


ALIVE_S = 1.0
"""How long a store has, after a failed call, to show that it is alive."""


class Presence(IntEnum):
    """A store's answer about a name."""

    NO = 0
    YES = 1
    UNKNOWN = 2
    """The store did not say, or its answer makes no sense."""


class Outcome(IntEnum):
    """The outcome of a call for one value."""

    OK = 0
    """All bytes of the value arrived. A put may also find that the store has the name already."""
    ABSENT = 1
    """A get: the store has no such name."""
    OTHER_SIZE = 2
    """A get: the store has another number of bytes under the name, or something that is not a string of bytes. The
    bytes that were read are of no use."""
    FULL = 3
    """A put: the store has no room, or accepts nothing now. An immediate retry would not help."""
    FAILED = 4
    """The store or the way to it failed, or the deadline passed. A get may have written to the value's memory."""
    AWAY = 5
    """The name's server is known to be away and was not asked. This says nothing about the store's other servers."""


NO_VALUE = -1
"""For a size: the store has no such name."""

NOT_SAID = -2
"""For a size: the store did not answer; `last_error` has the reason."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is reached.

    Attributes:
        urls: one or more URLs of one scheme.
        user, password: login; empty for a store without users. The password is never in a log, an error or `repr`.
        ca_file: certificates by which servers are trusted; empty for the system's.
        connect_s: longest time to connect, or to set a client up, in seconds.
        ttl_s: the store drops a value this many seconds after the put; 0 for never. It does not matter if a store
            cannot do that, because the value's own trailer says when it expires.
        rdma_devices: names of RDMA devices; empty for TCP.
    """

    urls: tuple[str, ...]
    user: str = ""
    password: str = ""
    ca_file: str = ""
    connect_s: float = 2.0
    ttl_s: int = 0
    rdma_devices: tuple[str, ...] = ()

    @property
    def shown_urls(self) -> str:
        """The URLs for display, without secrets."""
        return ", ".join(map(masked_url, self.urls))

    def __repr__(self) -> str:
        return f"StoreOptions(urls={self.shown_urls}, user={self.user!r}, password={'***' if self.password else ''!r})"


def masked_url(url: str) -> str:
    """`url` without the parts that may be secret: everything before an @ or after a question mark."""
    return re.sub(r"[?#].*", "?***", re.sub(r"//.*@", "//***@", url, flags=re.S), flags=re.S)


class Store(ABC):
    """One client of a store. Its servers may come and go: each call reconnects if needed.

    No call raises because of what servers do; only `open_store` raises `StoreError`.

    A library call that cannot be interrupted may return after its deadline; the store's class says by how much. The
    owner of the process can then kill it, which also stops whatever the call would still have written.

    Attributes:
        last_error: why a part of the last call was UNKNOWN, FULL or FAILED, or why a server was not alive; empty if
            there was no such failure, or if the reason is unknown. Contains no secrets.
    """

    last_error: str = ""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        """Asks which names the store has; one answer per name."""

    @abstractmethod
    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Reads each name's value into its parts, whose lengths must add up to its own."""

    @abstractmethod
    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Stores values under names that the store is not known to have. The store picks the winner of two writers."""

    @abstractmethod
    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        """Bytes of each name's value, or NO_VALUE, or NOT_SAID. For commands that users run, not for engines: it may
        have to read the values.
        """

    @abstractmethod
    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """Removes names, even those of other writers; returns for each whether the store no longer has it."""

    @abstractmethod
    def alive(self, deadline_s: float) -> str:
        """Checks cheaply whether calls have a chance; returns why not, or an empty string. It is enough if one of
        several servers answers; `last_error` names one that does not.
        """

    def register(self, memory: Part) -> str:
        """Announces memory that will hold values and does not move until `close`. Does something only if the store's
        transport needs it. Returns why the memory cannot be used, or an empty string.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections. No other call may follow. Idempotent."""
