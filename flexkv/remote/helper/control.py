"""Takes the unit's messages, one after the other, and hands them to the threads that carry them out."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from typing import Generic, TypeVar

from flexkv.errors import FlexKVError
from flexkv.observe import NamedThread
from flexkv.remote.helper.movers import Getter, Putter, Work
from flexkv.remote.helper.prober import Prober
from flexkv.remote.messages import (
    Alive,
    Cancel,
    FromHelper,
    Get,
    Probe,
    Put,
    Ready,
    Refused,
    Remove,
    Setup,
    receive,
    send,
)
from flexkv.remote.stores import open_store
from flexkv.remote.values import ValueFormat
from flexkv.transfer.host_pool import HostPool

logger = logging.getLogger(__name__)

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Messages for one thread, in order. How many there may be is the unit's to bound, which counts those under way."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._there = threading.Condition()

    def put(self, message: Message) -> None:
        with self._there:
            self._messages.append(message)
            self._there.notify()

    def take(self) -> Message:
        """Waits for one."""
        with self._there:
            while not self._messages:
                self._there.wait()
            return self._messages.popleft()


class Control:
    """Of one unit, until its end of the socket is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def _send(self, message: FromHelper) -> None:
        try:
            with self._sending:
                send(self._sock, message)
        except OSError:
            logger.debug("the unit is gone", exc_info=True)  # the next `receive` ends the process

    def serve(self) -> None:
        setup = receive(self._sock)
        if not isinstance(setup, Setup):
            return
        try:
            work = self._work(setup)
            gets, puts, probes = Getter(work), Putter(work), Prober(work)
        except FlexKVError as error:
            self._send(Refused(str(error)))
            return
        except (
            Exception
        ) as error:  # a library that does not load in its own way: the unit is to say why it has none
            self._send(Refused(f"{type(error).__name__}: {error}"))
            return
        self._send(Ready())
        get_box: Inbox[Get] = Inbox()
        put_box: Inbox[Put | Remove] = Inbox()
        probe_box: Inbox[Probe | Alive] = Inbox()
        NamedThread("flexkv-get", _run, (get_box, gets.carry_out)).start()
        NamedThread("flexkv-put", _run, (put_box, puts.carry_out)).start()
        NamedThread("flexkv-probe", _run, (probe_box, probes.carry_out)).start()
        while (message := receive(self._sock)) is not None:
            if isinstance(message, Get):
                get_box.put(message)
            elif isinstance(message, Put | Remove):
                put_box.put(message)
            elif isinstance(message, Probe | Alive):
                probe_box.put(message)
            elif isinstance(message, Cancel):
                work.cancelled = max(work.cancelled, message.number)

    def _work(self, setup: Setup) -> Work:
        formats = tuple(ValueFormat(setup.owner, group, n) for n, group in enumerate(setup.groups))
        pool = HostPool.attach(setup.pool)
        return Work(setup, formats, pool, lambda: open_store(setup.options), self._send)


def _run(box: Inbox[Message], carry_out: object) -> None:
    """Of a thread. An error of our own ends the process: the unit ends what was under way, and starts another."""
    assert callable(carry_out)
    try:
        while True:
            carry_out(box.take())
    except BaseException:
        logger.exception("the process of the remote store ends")
        os._exit(1)
