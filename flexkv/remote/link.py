"""Links a unit to the process with its store's clients: watches and restarts the process, and makes no calls to a lost
store.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from flexkv.errors import StoreError
from flexkv.observe import get_logger
from flexkv.remote.breaker import Breaker, BreakerState
from flexkv.remote.messages import (
    Alive,
    Answer,
    Cancel,
    Done,
    FromHelper,
    Progress,
    Ready,
    Refused,
    Rename,
    Setup,
    ToHelper,
)
from flexkv.remote.process import HelperProcess

logger = get_logger(__name__)

ALIVE_S = 5.0
"""A process counts as hanging if it has not answered after this many seconds whether the store is alive."""

START_S = 30.0
"""How long a process may take to load its libraries."""

LOOK_S = 0.005


class LinkUser(Protocol):
    """The owner of the ops under way, as the link sees it."""

    def take(self, message: Done | Answer | Progress) -> None: ...

    def lost(self) -> None:
        """Called when the store is no longer called; ops that wait end when the process reports them."""

    def reaped(self, how: str) -> None:
        """Called when the process has ended, so that everything it was doing has stopped."""

    def silent_since(self) -> float | None:
        """Since when an op under way has shown no sign of life, on the clock; None if none is under way."""


class HelperLink:
    """Keeps one process at a time. The manager's thread drives it; only `start` and `close` wait.

    Args:
        setup: the first message to each process.
        launch: starts a process.
        stuck_s: a process that is silent for this long while it has work is killed.
        clock: monotonic, in seconds.

    Attributes:
        breaker: whether the store is used.
        restarts: processes that were started after the first.
        last_number: number of the last message that was sent.
    """

    def __init__(
        self, setup: Setup, launch: Callable[[], HelperProcess], stuck_s: float, clock: Callable[[], float]
    ) -> None:
        self._setup = setup
        self._launch = launch
        self._stuck_s = stuck_s
        self._clock = clock
        self.breaker = Breaker(clock(), "the store was not reached yet")
        self.restarts = -1
        self.last_number = 0
        self._numbers = itertools.count(1)
        self._process: HelperProcess | None = None
        self._ready = self._killed = self._garbled = self.closed = False
        self._refused = ""
        self._began_s = 0.0
        self._alive = 0
        """Number of the message that asks whether the store is alive; 0 for none."""
        self._alive_s = 0.0
        self._outgoing: deque[ToHelper] = deque()
        self._user: LinkUser | None = None

    @property
    def user(self) -> LinkUser:
        assert self._user is not None
        return self._user

    def join(self, user: LinkUser) -> None:
        self._user = user

    @property
    def usable(self) -> bool:
        """Whether it is useful to send messages now."""
        return self.breaker.closed and self._process is not None and not self.closed

    # --- messages ---

    def send(self, kind: Callable[..., ToHelper], *fields: object) -> int:
        """Sends a message with a number of its own, and returns the number."""
        number = self.last_number = next(self._numbers)
        self.post(kind(number, *fields))
        return number

    def post(self, message: ToHelper) -> None:
        self._outgoing.append(message)
        self._flush()

    def _flush(self) -> None:
        process = self._process
        while self._outgoing and process is not None and not self._killed and process.send(self._outgoing[0]):
            self._outgoing.popleft()

    def name_weights(self, weights: bytes) -> None:
        """Makes this process and those after it name values by these weights (32 bytes)."""
        owner = replace(self._setup.owner, weights=weights)
        self._setup = replace(self._setup, owner=owner)
        if self._process is not None:
            self.post(Rename(owner))

    def poll(self) -> None:
        """Takes new messages, and sends those that could not be sent before."""
        while (message := self._received()) is not None:
            self._take(message)
        self._flush()

    def _received(self) -> FromHelper | None:
        """The next message. Kills a process that sends anything but a message, and ignores the rest of its output."""
        if self._process is None or self._garbled:
            return None
        try:
            return self._process.receive()
        except StoreError as error:
            self._garbled = True
            self.lost(str(error))
            self._kill(self._process)
            return None

    def _take(self, message: FromHelper) -> None:
        if isinstance(message, Ready):
            self._ready = True
        elif isinstance(message, Refused):
            self._refused = message.reason
        elif isinstance(message, Answer) and message.number == self._alive:
            self._alive = 0
            if message.lost:
                self.lost(message.lost)
            elif self.breaker.state is BreakerState.HALF_OPEN:
                self.breaker.answered(self._clock())
                logger.info("remote tier: the store answers")
        else:
            self.user.take(message)

    # --- the process ---

    def start(self, wait_s: float) -> None:
        """Starts the first process, and waits up to `wait_s` seconds until the store has answered or is known to be
        away.

        Raises:
            StoreError: with these settings there can be no client of the store.
        """
        self._begin()
        ends_s, was_ready = time.monotonic() + wait_s, False
        while not self.breaker.closed and time.monotonic() < ends_s:
            self.watch()
            was_ready |= self._ready
            if self._refused:
                raise StoreError(self._refused)
            if self._process is None:
                if was_ready:
                    break  # the settings are right, and the store's fault may be temporary
                raise StoreError(f"the remote tier's process does not come up: {self.breaker.reason}")
            if (
                self._ready
                and self.breaker.state is BreakerState.OPEN
                and self.restarts == 0
                and not self._alive
            ):
                if self.breaker.due(self._clock()):
                    continue
                break  # the store was asked, and is away
            time.sleep(LOOK_S)

    def _begin(self) -> None:
        self._process, self._refused = self._launch(), ""
        self._ready = self._killed = self._garbled = False
        self._began_s = self._clock()
        self.restarts += 1
        self._alive = 0
        self._outgoing.clear()
        self.post(self._setup)

    def watch(self) -> None:
        """Kills a process that hangs, restarts one that has ended, and probes whether a lost store is back. Call it a
        few times per second.
        """
        if self.closed:
            return
        self.poll()
        now_s, process = self._clock(), self._process
        if process is None:
            if self.breaker.due(now_s):
                self._restart()
        elif ended := process.ended:
            self._reaped(ended)
        elif self._killed:
            return
        elif silent := self._silent(now_s):
            self.lost(silent)
            self._kill(process)
        elif self._ready and self.breaker.due(now_s):
            self.breaker.asked()
            self._alive_s = now_s
            self._alive = self.send(Alive)

    def _kill(self, process: HelperProcess) -> None:
        process.kill()
        self._killed = True

    def _silent(self, now_s: float) -> str:
        """Why the process seems to hang; empty if it does not."""
        if not self._ready:
            return (
                f"its process was not ready after {START_S:.0f} s" if now_s - self._began_s > START_S else ""
            )
        if self._alive and now_s - self._alive_s > ALIVE_S:
            return f"its process did not answer within {ALIVE_S:.0f} s"
        since_s = self.user.silent_since()
        if since_s is not None and now_s - since_s > self._stuck_s:
            return f"nothing has moved for {now_s - since_s:.1f} s"
        return ""

    def _restart(self) -> None:
        try:
            self._begin()
        except StoreError as error:
            self.lost(str(error))

    def _reaped(self, how: str) -> None:
        process = self._process
        assert process is not None
        process.close(0.0)
        self._process, self._ready, self._alive = None, False, 0
        self._outgoing.clear()
        how = self._refused or how
        if not self._killed:
            self.lost(how)
        self.user.reaped(how)

    def lost(self, reason: str) -> None:
        """Stops calling the store until it answers again."""
        if self.breaker.lost(reason, self._clock()):
            logger.warning("remote tier: not used for now: %s", reason)
        if self._process is not None and self._ready and not self._killed:
            # A call under way has its own deadline; messages that wait for it end at once.
            self.post(Cancel(self.last_number))
        self.user.lost()

    def close(self, deadline_s: float) -> bool:
        """Lets messages under way end, then ends the process. Idempotent. Returns False if the process was not reaped
        in time.
        """
        process, ends_s = self._process, time.monotonic() + deadline_s
        if process is None:
            self.closed = True
            return True
        if not self.closed and not self._killed:
            self.post(Cancel(self.last_number))
            while self.user.silent_since() is not None and time.monotonic() < ends_s - deadline_s / 2:
                self.poll()
                if process.ended:
                    break
                time.sleep(LOOK_S)
        self.closed = True
        if not process.close(max(0.0, ends_s - time.monotonic())):
            return False
        self._process = None
        self.user.reaped("closed")
        return True
