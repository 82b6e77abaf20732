"""Receives the unit's messages one by one, and passes each to the thread that carries it out."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from flexkv.errors import FlexKVError
from flexkv.observe import NamedThread
from flexkv.remote.helper.movers import Getter, Putter, Work
from flexkv.remote.helper.prober import HelperProber
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
    Rename,
    Setup,
    receive,
    send,
)
from flexkv.remote.stores import open_store
from flexkv.remote.values import ValueFormat, ValueOwner
from flexkv.transfer.host_pool import HostPool

logger = logging.getLogger(__name__)

Message = TypeVar("Message")
Taken = TypeVar("Taken", contravariant=True)

MOVERS_NICE = 5
"""The nice value of the threads for gets and puts, so that they have a lower priority than the engine's threads. The
thread for probes has the engine's priority, because requests wait for probes, which take little time.
"""


class Inbox(Generic[Message]):
    """Messages for one thread, in order. The unit bounds their number, because it limits the ops and probes in
    flight.
    """

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._there = threading.Condition()

    def put(self, message: Message) -> None:
        with self._there:
            self._messages.append(message)
            self._there.notify()

    def take(self) -> Message:
        """Waits for the next message."""
        with self._there:
            while not self._messages:
                self._there.wait()
            return self._messages.popleft()


class Control:
    """Serves one unit until the unit closes its end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def _send(self, message: FromHelper) -> None:
        try:
            with self._sending:
                send(self._sock, message)
        except OSError:
            logger.debug("the unit is gone", exc_info=True)  # the next `receive` returns None

    def serve(self) -> None:
        setup = receive(self._sock)
        if not isinstance(setup, Setup):
            return
        get_box: Inbox[Get] = Inbox()
        put_box: Inbox[Put | Remove] = Inbox()
        probe_box: Inbox[Probe | Alive] = Inbox()
        try:
            work = self._work(setup)
            _start("flexkv-probe", probe_box, lambda: HelperProber(work), nice=0)
            _start("flexkv-get", get_box, lambda: Getter(work), MOVERS_NICE)
            _start("flexkv-put", put_box, lambda: Putter(work), MOVERS_NICE)
        except FlexKVError as error:
            self._send(Refused(str(error)))
            return
        except Exception as error:
            # A library may fail to load with any exception, and the unit must get the reason in order to report it.
            self._send(Refused(f"{type(error).__name__}: {error}"))
            return
        self._send(Ready())
        while (message := receive(self._sock)) is not None:
            if isinstance(message, Get):
                get_box.put(message)
            elif isinstance(message, Put | Remove):
                put_box.put(message)
            elif isinstance(message, Probe | Alive):
                probe_box.put(message)
            elif isinstance(message, Rename):
                # The unit sends `Rename` before it probes, reads or writes the first page.
                work.formats = _formats(setup, message.owner)
            elif isinstance(message, Cancel):
                work.cancelled = max(work.cancelled, message.number)

    def _work(self, setup: Setup) -> Work:
        pool = HostPool.attach(setup.pool)
        return Work(setup, _formats(setup, setup.owner), pool, lambda: open_store(setup.options), self._send)


def _formats(setup: Setup, owner: ValueOwner) -> tuple[ValueFormat, ...]:
    return tuple(ValueFormat(owner, group, number) for number, group in enumerate(setup.groups))


class Worker(Protocol[Taken]):
    def carry_out(self, message: Taken) -> None: ...


def _start(name: str, box: Inbox[Message], make: Callable[[], Worker[Message]], nice: int) -> None:
    """Starts a thread that makes a worker, which then carries out the messages in `box`. The thread makes the worker
    itself, so that the threads of the client's library inherit its nice value.

    Raises:
        Exception: `make` raised it.
    """
    made: Future[None] = Future()
    NamedThread(name, _run, (box, make, nice, made)).start()
    made.result()


def _run(box: Inbox[Message], make: Callable[[], Worker[Message]], nice: int, made: Future[None]) -> None:
    """Runs in the started thread. If the worker raises an exception, which is a bug, ends the process. The unit then
    ends the ops in flight and starts another helper.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)  # sets only this thread's nice value
        worker = make()
    except BaseException as error:
        made.set_exception(error)
        return
    made.set_result(None)
    try:
        while True:
            worker.carry_out(box.take())
    except BaseException:
        logger.exception("the process of the remote store ends")
        os._exit(1)
