"""What a unit's process and the process with the clients of its store say to each other.

One message is one packet of a SEQPACKET socket pair, pickled: both ends are this package, and the socket has no name.
Lists of pages are cut so that a packet fits the kernel's default buffer.
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
"""Of a message at most."""

MOST_ASKED = 6144
"""Keys of one question at most: 96 KiB."""

PACKET_BYTES = 1 << 18
"""Larger than any packet: what is read at once."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: what the process works with.

    Attributes:
        groups: of the unit's pages, by number.
        pool: of the unit, shared.
        batch_pages: values of one call of the store.
        get_s, probe_s: deadlines of one call of gets or puts, and of one question.
        put_bytes_per_s: at most; None for as fast as it goes.
        ttl_s: values are a miss so long after they were written; None for never.
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
    """The answer to `Setup`: the store's client is there. Whether its servers are, calls show."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The other answer: with these settings it cannot be."""

    reason: str


class Packed:
    """A message that is pickled as its fields and nothing more: what a dataclass does by itself takes longer than the
    kernel takes to send it."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Pages(Packed):
    """Part of an op: pages between slots of the pool and the store.

    Attributes:
        number: of the message.
        keys, slots, tokens: of each page; tokens are the valid ones.
    """

    number: int
    group: int
    keys: Keys
    slots: SlotIds
    tokens: NDArray[np.int32]


class Get(Pages):
    """Read them into their slots, verified."""


class Put(Pages):
    """Write them, sealed."""


@dataclass(frozen=True, slots=True)
class Probe(Packed):
    """Which pages are there?

    Attributes:
        keys: per group, in order, as bytes: 16 a key.
        whole: per group, whether the pages after one that is not there are of no use.
    """

    number: int
    keys: tuple[bytes, ...]
    whole: tuple[bool, ...]

    def keys_of(self, group: int) -> Keys:
        return np.frombuffer(self.keys[group], np.uint8).reshape(-1, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Remove:
    """The store is to have these pages no more."""

    group: int
    keys: Keys


@dataclass(frozen=True, slots=True)
class Rename:
    """Names of values are this owner's from now on. Comes before the first page is asked for, read or written."""

    owner: ValueOwner


@dataclass(frozen=True, slots=True)
class Alive:
    """Is there anybody? Answered by `Answer` without pages."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Messages up to this number end as soon as no call is under way for them; what was not begun is not."""

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
        outcomes: how many pages fared how: "ok", the name of a miss, or what the store said.
        reason: of the first failure.
        lost: why the store cannot be reached; empty where it can.
        bytes: that were moved.
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
        presence: per group, `Presence` of the leading keys that were asked, a byte each.
        lost: why the store cannot be reached; empty where it can.
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
        OSError: the other end is gone; `BlockingIOError`: of a socket that does not block, there is no room.
        StoreError: it is too long for a packet.
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
        BlockingIOError: of a socket that does not block, there is none.
        StoreError: what came is no message: the other end has lost its mind.
    """
    try:
        packet = sock.recv(PACKET_BYTES)
    except ConnectionError:
        return None
    if not packet:
        return None
    try:
        message: ToHelper | FromHelper = pickle.loads(packet)
    except Exception as error:  # whatever bytes can make of unpickling
        raise StoreError(f"a packet that is no message: {type(error).__name__}: {error}") from error
    return message
