"""The messages between a unit's process and the process with the clients of its store.

One message is one packet of a SEQPACKET socket pair. It may be pickled, because both ends are this package and the
socket has no name. Lists of pages are cut so that a packet fits the kernel's default buffer.
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
"""Most pages of one message."""

MOST_ASKED = 6144
"""Most keys of one question: 96 KiB."""

PACKET_BYTES = 1 << 18
"""How many bytes are read at once; no packet is larger."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: the process's configuration.

    Attributes:
        groups: geometry of the unit's pages, by number of the KV group.
        pool: the unit's pool, which is shared.
        batch_pages: values per call of the store.
        get_s, probe_s: deadlines of one call of gets or puts, and of one question.
        put_bytes_per_s: most bytes to put per second; None for no limit.
        ttl_s: seconds after its write from which on a value is a miss; None for never.
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
    """The answer to `Setup`: the store's client is ready. Only calls show whether its servers are alive."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The other answer to `Setup`: with these settings there can be no client."""

    reason: str


class Packed:
    """A message that is pickled as just its fields, because the pickling of a dataclass takes longer than the kernel
    takes to send the message.
    """

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Pages(Packed):
    """Part of an op: pages that move between slots of the pool and the store.

    Attributes:
        number: number of the message.
        keys, slots, tokens: each page's key, slot and valid tokens.
    """

    number: int
    group: int
    keys: Keys
    slots: SlotIds
    tokens: NDArray[np.int32]


class Get(Pages):
    """Reads the pages into their slots, and verifies them."""


class Put(Pages):
    """Seals the pages, and writes them."""


@dataclass(frozen=True, slots=True)
class Probe(Packed):
    """Asks which pages the store has.

    Attributes:
        keys: per group, in order, as bytes: 16 per key.
        whole: per group, whether pages after a missing one are useless.
    """

    number: int
    keys: tuple[bytes, ...]
    whole: tuple[bool, ...]

    def keys_of(self, group: int) -> Keys:
        return np.frombuffer(self.keys[group], np.uint8).reshape(-1, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes these pages from the store."""

    group: int
    keys: Keys


@dataclass(frozen=True, slots=True)
class Rename:
    """Names values by this owner from now on. The unit sends it before it asks for, reads or writes the first page."""

    owner: ValueOwner


@dataclass(frozen=True, slots=True)
class Alive:
    """Asks whether the store is alive; the reply is an `Answer` without pages."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends messages up to this number as soon as no call is under way for them, and begins nothing more of them."""

    number: int


@dataclass(frozen=True, slots=True)
class Progress(Packed):
    """A batch of a `Get` or `Put` has ended, or waits for its share of the bandwidth."""

    number: int


@dataclass(slots=True)
class Done:
    """The end of a `Get` or `Put`, after its last byte has stopped moving.

    Attributes:
        failed, causes: positions of the pages that must not be used, int32, and the cause of each.
        outcomes: number of pages by outcome: "ok", "known", the name of a miss, or of the store's `Outcome`.
        reason: reason of the first failure.
        lost: why the store cannot be reached; empty if it can.
        bytes: bytes that were moved.
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
    """The end of a `Probe` or `Alive`.

    Attributes:
        presence: per group, `Presence` of the leading keys that were asked for, one byte per key.
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
    """
    Raises:
        OSError: the other end is gone, or (`BlockingIOError`) a socket that does not block has no room.
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
    """The next message; None: the other end is gone.

    Raises:
        BlockingIOError: a socket that does not block has no message now.
        StoreError: the packet is not a message, so the other end is broken.
    """
    try:
        packet = sock.recv(PACKET_BYTES)
    except ConnectionError:
        return None
    if not packet:
        return None
    try:
        message: ToHelper | FromHelper = pickle.loads(packet)
    except Exception as error:  # unpickling such bytes may raise anything
        raise StoreError(f"a packet that is no message: {type(error).__name__}: {error}") from error
    return message
