"""The contract of a store that machines share: names to values, on other machines, which may be slow, dead or lying.

A store is trusted with nothing. What it says of a value is a hint, what it gives is verified by who asked, and every
call ends: each takes a deadline, in seconds from its start, and returns within it, give or take the time of one system
call. One object is used by one thread; a process that asks and moves at the same time opens two.
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
    """It did not say, or said what nobody understands."""


class Outcome(IntEnum):
    """How one value of a call fared."""

    OK = 0
    """All of its bytes are where they were to go. A put may also find that the store has the name already."""
    ABSENT = 1
    """A get: the store has no such name."""
    OTHER_SIZE = 2
    """A get: the store has another number of bytes under the name, or something that is no value of bytes. What was
    read of it is of no use."""
    FULL = 3
    """A put: the store has no room, or lets nothing in now. It is of no use to try again at once."""
    FAILED = 4
    """The store, the way to it, or the deadline. The memory of a get may have been written to."""
    AWAY = 5
    """The name's server, one of several, is known to be away and was not asked, which says nothing of the others."""


NO_VALUE = -1
"""For a size: the store has no such name."""

NOT_SAID = -2
"""For a size: the store did not say; `last_error` has the reason."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is reached.

    Attributes:
        urls: one or more of one scheme.
        user, password: of those who must say who they are; empty for nobody. Never in a log, an error or `repr`.
        ca_file: certificates that servers are trusted by; empty for the system's.
        connect_s: to connect, or to set a client up, for at most so many seconds.
        ttl_s: the store drops a value so many seconds after it was put, 0 for never. Where a store cannot, nothing is
            lost by it: the value's own trailer says when it expires.
        rdma_devices: by name; empty for TCP.
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
        """For people."""
        return ", ".join(map(masked_url, self.urls))

    def __repr__(self) -> str:
        return f"StoreOptions(urls={self.shown_urls}, user={self.user!r}, password={'***' if self.password else ''!r})"


def masked_url(url: str) -> str:
    """`url` without what may be a secret: what stands before an @ or after a question mark."""
    return re.sub(r"[?#].*", "?***", re.sub(r"//.*@", "//***@", url, flags=re.S), flags=re.S)


class Store(ABC):
    """One client of a store. Its servers may come and go: each call connects again where that is needed.

    No call raises for what servers do; `StoreError` is for `open_store` alone.

    A store whose library cannot be interrupted may come back later than a deadline, and says by how much: whoever owns
    the process of such a store ends it, and with it whatever the call would still have written.

    Attributes:
        last_error: why something of the last call was UNKNOWN, FULL or FAILED, or why a server was not alive; empty if
            nothing was, or nobody knows. No secrets.
    """

    last_error: str = ""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        """One answer a name."""

    @abstractmethod
    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Reads each name's value into its parts, whose lengths must add up to its own."""

    @abstractmethod
    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        """Stores values under names that the store is not known to have. Which of two writers wins is the store's."""

    @abstractmethod
    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        """Bytes of each name's value, or NO_VALUE, or NOT_SAID. For people, who do not know what they look at: it may
        read the values to find out."""

    @abstractmethod
    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        """Of each name, whether the store does not have it any more, whoever holds it there."""

    @abstractmethod
    def alive(self, deadline_s: float) -> str:
        """Asks the least that shows whether calls have a chance; why they have none, or nothing. Of several servers one
        that answers is enough; `last_error` names one that does not."""

    def register(self, memory: Part) -> str:
        """Values lie in this memory from now on, which stays where it is until `close`. Only a store whose transport
        wants to know does anything. Why it cannot be used, or nothing."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections. No call follows. Idempotent."""
