"""The messages between a unit and its helper, the process with the clients of its store.

One message is one packet of a SEQPACKET socket pair. Messages are pickled, which is safe because both ends run this
package and no other process can connect to the socket. Lists of pages are split so that a packet fits into the kernel's
default buffer.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import StoreError
from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.remote.base import StoreOptions
from flexkv.remote.values import ValueOwner
from flexkv.storage.base import DiskGroup
from flexkv.transfer.graph import PageCauses, SlotIds
from flexkv.transfer.host_pool import PoolDescriptor

MOST_PAGES = 1024
"""The maximum number of pages in one message."""

MOST_ASKED = 6144
"""The maximum number of keys in one probe. They take 96 KiB."""

PACKET_BYTES = 1 << 18
"""The maximum length of a packet, in bytes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a helper: its configuration.

    Attributes:
        options: how to reach the store.
        owner: owner of the pages, from which the names of values are derived.
        groups: encoding of the unit's pages, indexed by number of the KV group.
        pool: the unit's host pool, to which the helper attaches.
        batch_pages: maximum number of values per get or put call of the store.
        get_s: deadline of one get or put call, in seconds.
        probe_s: deadline of one probe, in seconds.
        put_bytes_per_s: maximum number of bytes to put per second; None for no limit.
        ttl_s: a value is a miss from this many seconds after it was written; None for never.
    """

    options: StoreOptions
    owner: ValueOwner
    groups: tuple[DiskGroup, ...]
    pool: PoolDescriptor
    batch_pages: int
    get_s: float
    probe_s: float
    put_bytes_per_s: int | None
    ttl_s: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to `Setup` if the helper has clients of the store. It does not say whether the store's servers are
    alive.
    """


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to `Setup` if the helper cannot make a client with these settings."""

    reason: str


class Packed:
    """A message that is pickled as its plain fields, because pickling a dataclass takes longer than the kernel takes to
    send the message.
    """

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Pages(Packed):
    """Part of an op: pages that move between slots of the host pool and the store.

    Attributes:
        group: number of the pages' KV group.
        keys, slots, tokens: key, host slot and number of valid tokens of each page.
    """

    number: int
    group: int
    keys: Keys
    slots: SlotIds
    tokens: NDArray[np.int32]


class Get(Pages):
    """Asks the helper to read the pages into their slots and verify them."""


class Put(Pages):
    """Asks the helper to make the pages' trailers and write the pages to the store."""


@dataclass(frozen=True, slots=True)
class Probe(Packed):
    """Asks the helper which pages the store has.

    Attributes:
        keys: for each group, the pages' keys in order, 16 bytes each.
        whole: for each group, whether all pages after a missing page are useless.
    """

    number: int
    keys: tuple[bytes, ...]
    whole: tuple[bool, ...]

    def keys_of(self, group: int) -> Keys:
        return np.frombuffer(self.keys[group], np.uint8).reshape(-1, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Remove:
    """Asks the helper to remove these pages from the store."""

    group: int
    keys: Keys


@dataclass(frozen=True, slots=True)
class Rename:
    """Makes the helper derive the names of values from this owner from now on. The unit sends this before it probes,
    reads or writes the first page.
    """

    owner: ValueOwner


@dataclass(frozen=True, slots=True)
class Alive:
    """Asks the helper whether the store is alive. The reply is an `Answer` without pages."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Makes the helper end all messages up to this number as soon as the store's call in flight returns."""

    number: int


@dataclass(frozen=True, slots=True)
class Progress(Packed):
    """Reports that a call to the store for a `Get` or `Put` has ended, or that the `Put` waits for bandwidth. This
    shows the unit that the helper does not hang.
    """

    number: int


@dataclass(slots=True)
class Done:
    """Reports that a `Get` or `Put` has ended, and that its bytes no longer move.

    Attributes:
        failed, causes: indices of the failed pages in the message, int32, and the cause of each.
        outcomes: number of pages by outcome: "ok", "known" (the store had the page before the put), the name of a miss,
            or the name of an `Outcome`, in lower case.
        reason: why the first page failed; empty if none did.
        lost: why the store cannot be reached; empty if it can.
        bytes: bytes of the values that were moved.
    """

    number: int
    failed: SlotIds
    causes: PageCauses
    outcomes: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    lost: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer(Packed):
    """Answers a `Probe` or `Alive`.

    Attributes:
        presence: for each group, one byte per key that was looked up: the key's `Presence`. The keys that were looked
            up are the leading ones.
        lost: why the store cannot be reached; empty if it can.
    """

    number: int
    presence: tuple[bytes, ...] = ()
    lost: str = ""

    @property
    def presences(self) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(of_group, np.uint8) for of_group in self.presence]


ToHelper = Setup | Rename | Get | Put | Probe | Remove | Alive | Cancel
FromHelper = Ready | Refused | Progress | Done | Answer


def send(sock: socket.socket, message: ToHelper | FromHelper) -> None:
    """Sends a message in one packet.

    Raises:
        OSError: the other end is gone, or (as `BlockingIOError`) the buffer of a socket that does not block is full.
        StoreError: the message is too long for a packet.
    """
    packet = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    try:
        if len(packet) > PACKET_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        sock.send(packet)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        raise StoreError(
            f"{type(message).__name__} of {len(packet)} bytes for the process of the remote store is too long"
        ) from None


def receive(sock: socket.socket) -> ToHelper | FromHelper | None:
    """Returns the next message; None if the other end is gone.

    Raises:
        BlockingIOError: the socket does not block, and there is no message now.
        StoreError: the packet is not a message.
    """
    try:
        packet = sock.recv(PACKET_BYTES)
    except ConnectionError:
        return None
    if not packet:
        return None
    try:
        message: ToHelper | FromHelper = pickle.loads(packet)
    except Exception as error:  # unpickling invalid bytes may raise any exception
        raise StoreError(f"a packet that is no message: {type(error).__name__}: {error}") from error
    return message
