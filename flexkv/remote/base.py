"""The contract of a store that machines share. A store maps names to values, on servers that may be slow, dead or
wrong.

A store is not trusted: its answers are hints, and readers verify every value. Every call has a deadline, in seconds
from its start, and returns by that deadline, or at most the time of one system call later. Only one thread may use a
client. A process that probes and moves values at the same time opens several clients.
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
"""A part of a value in memory: uint8 [n], C-contiguous; writable if a value is read into it."""

Value = Sequence[Part]
"""One value: its parts in memory, which follow each other without gaps in the store."""


ALIVE_S = 1.0
"""After a failed call, the helper checks whether the store is alive. The store has this many seconds to answer."""


class Presence(IntEnum):
    """A store's answer to the question whether it has a name."""

    NO = 0
    YES = 1
    UNKNOWN = 2
    """The store did not answer, or its answer cannot be understood."""


class Outcome(IntEnum):
    """The outcome of a get or a put for one value."""

    OK = 0
    """All bytes of the value arrived. For a put, this is also the outcome if the store already has the name."""
    ABSENT = 1
    """For a get: the store does not have the name."""
    OTHER_SIZE = 2
    """For a get: the store has something else under the name, with a different number of bytes or of a type other than
    a string of bytes. The memory for the value has no valid content.
    """
    FULL = 3
    """For a put: the store has no space, or accepts nothing now. An immediate retry would not help."""
    FAILED = 4
    """The store or the network failed, or the deadline passed. A get may have written to the value's memory."""
    AWAY = 5
    """The server that is responsible for the name did not answer earlier calls, so it was not called. This says nothing
    about the store's other servers.
    """


NO_VALUE = -1
"""Returned as a size if the store does not have the name."""

NOT_SAID = -2
"""Returned as a size if the store did not answer; `last_error` has the reason."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store, and how to use it.

    Attributes:
        urls: one or more URLs with the same scheme.
        user, password: the login; empty for a store without users. The password never appears in a log, an error or
            `repr`.
        ca_file: file with the certificates of trusted authorities; empty for the authorities that the system trusts.
        connect_s: maximum number of seconds that connecting, or setting up a client, may take.
        ttl_s: number of seconds after which the store drops a value; 0 for never. A store that cannot drop values can
            be used nevertheless, because the value's own trailer says when it expires.
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
    """Returns `url` with masks in place of the parts that may be secret: everything before an @, and after a ? or #."""
    return re.sub(r"[?#].*", "?***", re.sub(r"//.*@", "//***@", url, flags=re.S), flags=re.S)


class Store(ABC):
    """One client of a store. Servers may come and go: each call reconnects if needed.

    No call raises an exception because of what servers do. Only `open_store` raises `StoreError`.

    If a store's library has calls that cannot be interrupted, a call may return after its deadline; the store's class
    says by how much. Meanwhile the unit can kill the helper process that made the call, which also stops the call's
    writes.

    Attributes:
        last_error: why some results of the last call were UNKNOWN, FULL or FAILED, or why a server was not alive. Empty
            if there was no such failure, or its reason is unknown. Contains no secrets.
    """

    last_error: str = ""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        """Asks which of these names the store has. Returns one answer per name."""

    @abstractmethod
    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Reads each name's value into its parts in `values`. The lengths of the parts must add up to the value's
        length.
        """

    @abstractmethod
    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Stores each value under its name. Callers pass only names that they do not know to be in the store. If two
        clients write one name, the store decides whose value stays.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        """Returns the size in bytes of each name's value, or NO_VALUE, or NOT_SAID. Only the command line calls this
        method, because a client may have to read the values to find their sizes.
        """

    @abstractmethod
    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """Removes these names, no matter who wrote them. Returns for each name whether the store no longer has it."""

    @abstractmethod
    def alive(self, deadline_s: float) -> str:
        """Checks at little cost whether at least one server of the store answers. Returns the reason if no server
        answers, else an empty string. If only some servers answer, `last_error` says why another one does not.
        """

    def register(self, memory: Part) -> str:
        """Registers memory that will contain values and that keeps its address until `close`. Does nothing unless the
        store's transport needs this. Returns why the memory cannot be used; empty if it can.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections. No other call may follow. Idempotent."""
