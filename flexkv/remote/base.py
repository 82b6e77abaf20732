"""The contract of a store that machines share: it maps names to values, on servers that may be slow, dead or lying.

A store is trusted with nothing. What it says of a value is a hint, the reader verifies what it gets, and every call
ends: each takes a deadline, in seconds from its start, and returns within it, give or take the time of one system call.
One thread uses one object; a process that asks and moves at the same time opens two.
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
"""Bytes of a value in memory: uint8 [n], C-contiguous; writable where a value is read into it."""

Value = Sequence[Part]
"""One value: its parts follow one another in the store. Their lengths add up to the value's."""


ALIVE_S = 1.0
"""How long a store has, after a call that failed, to show that it is there."""


class Presence(IntEnum):
    """What a store says of a name."""

    NO = 0
    YES = 1
    UNKNOWN = 2
    """The store did not say, or its answer makes no sense."""


class Outcome(IntEnum):
    """How one value of a call fared."""

    OK = 0
    """All bytes of the value arrived. A put may also find that the store has the name already."""
    ABSENT = 1
    """A get: the store has no such name."""
    OTHER_SIZE = 2
    """A get: the store has another number of bytes under the name, or something that is no value of bytes. The bytes
    that were read are of no use."""
    FULL = 3
    """A put: the store has no room, or takes nothing now. It is of no use to try again at once."""
    FAILED = 4
    """The store or the way to it failed, or the deadline passed. A get may have written to the value's memory."""
    AWAY = 5
    """The name's server, one of several, is known to be away and was not asked. This says nothing about the others."""


NO_VALUE = -1
"""For a size: the store has no such name."""

NOT_SAID = -2
"""For a size: the store did not say; `last_error` has the reason."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is reached.

    Attributes:
        urls: one or more URLs of one scheme.
        user, password: login; empty for a store without users. The password is never in a log, an error or `repr`.
        ca_file: certificates by which servers are trusted; empty for the system's.
        connect_s: longest time to connect, or to set a client up, in seconds.
        ttl_s: the store drops a value so many seconds after it was put, 0 for never. A store that cannot do so loses
            nothing: the value's own trailer says when it expires.
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
        """The URLs for people, without secrets."""
        return ", ".join(map(masked_url, self.urls))

    def __repr__(self) -> str:
        return f"StoreOptions(urls={self.shown_urls}, user={self.user!r}, password={'***' if self.password else ''!r})"


def masked_url(url: str) -> str:
    """`url` without what may be a secret: what stands before an @ or after a question mark."""
    return re.sub(r"[?#].*", "?***", re.sub(r"//.*@", "//***@", url, flags=re.S), flags=re.S)


class Store(ABC):
    """One client of a store. Its servers may come and go: each call connects again where that is needed.

    No call raises for what servers do; only `open_store` raises `StoreError`.

    A call of a library that cannot be interrupted may return after its deadline; the store's class says by how much.
    The owner of the process can kill it then, and with it whatever the call would still have written.

    Attributes:
        last_error: why a part of the last call was UNKNOWN, FULL or FAILED, or why a server was not alive; empty if
            none was, or if the reason is unknown. Holds no secrets.
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
        """Bytes of each name's value, or NO_VALUE, or NOT_SAID. For commands that people run, not for engines: it may
        read the values to find out."""

    @abstractmethod
    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """Removes names, whoever holds them there; returns for each whether the store does not have it any more."""

    @abstractmethod
    def alive(self, deadline_s: float) -> str:
        """Asks the least that shows whether calls have a chance; returns why they have none, or an empty string. One of
        several servers that answers is enough; `last_error` names one that does not."""

    def register(self, memory: Part) -> str:
        """Announces memory that holds values from now on and stays where it is until `close`. Only a store whose
        transport needs this does anything. Returns why the memory cannot be used, or an empty string."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections. No call follows. Idempotent."""
