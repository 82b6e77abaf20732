"""Links a unit to its helper, the process with the clients of its store. Watches and restarts the helper, and stops
using a store that is lost.
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
"""The helper counts as hanging if it has not answered an `Alive` message after this many seconds."""

START_S = 30.0
"""The maximum number of seconds until a started helper is ready. This includes the time for loading libraries."""

LOOK_S = 0.005


class LinkUser(Protocol):
    """The owner of the ops in flight. The link calls these methods."""

    def take(self, message: Done | Answer | Progress) -> None: ...

    def lost(self) -> None:
        """Called when the store is not used any more. Ops in flight end later, when the helper reports them."""

    def reaped(self, how: str) -> None:
        """Called when a helper has ended and was reaped, so that it no longer touches memory. `how` says how it
        ended.
        """

    def silent_since(self) -> float | None:
        """Returns the time since which the helper has shown no progress, in seconds of the link's clock: the earliest
        such time among the ops and probes in flight. Returns None if none is in flight.
        """


class HelperLink:
    """Keeps one helper running at a time. Only the manager's thread calls it. Only `start` and `close` wait.

    Args:
        setup: the first message to each helper.
        launch: starts a helper.
        stuck_s: a helper that has work and reports no progress for this many seconds is killed.
        clock: returns monotonic time in seconds.

    Attributes:
        breaker: decides whether the store is used.
        restarts: how many helpers were started after the first; -1 before `start`.
        last_number: number of the last message sent; 0 if there is none.
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
        """Number of the `Alive` message in flight; 0 if there is none."""
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
        """Whether the store is used and a helper is running, so that messages may be sent."""
        return self.breaker.closed and self._process is not None and not self.closed

    # --- messages ---

    def send(self, kind: Callable[..., ToHelper], *fields: object) -> int:
        """Sends a message of this kind with the next number, and returns the number."""
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
        """Makes the current helper and later ones derive the names of values from the digest `weights` (32 bytes)."""
        owner = replace(self._setup.owner, weights=weights)
        self._setup = replace(self._setup, owner=owner)
        if self._process is not None:
            self.post(Rename(owner))

    def poll(self) -> None:
        """Handles the helper's messages. Sends the unit's messages that could not be sent before."""
        while (message := self._received()) is not None:
            self._take(message)
        self._flush()

    def _received(self) -> FromHelper | None:
        """Returns the helper's next message; None if there is none. If the helper sends anything but a message, kills
        the helper and ignores the rest of its output.
        """
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
        """Starts the first helper. Waits up to `wait_s` seconds until the store has answered, or has failed to answer a
        probe.

        Raises:
            StoreError: the helper cannot make a client of the store with these settings, or does not start.
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
                    break  # the helper was ready once, so the settings are right, and the fault may be temporary
                raise StoreError(f"the remote tier's process does not come up: {self.breaker.reason}")
            if (
                self._ready
                and self.breaker.state is BreakerState.OPEN
                and self.restarts == 0
                and not self._alive
            ):
                if self.breaker.due(self._clock()):
                    continue
                break  # a probe was sent, and the store did not answer
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
        """Kills a helper that hangs, starts a new one if it has ended, and probes whether a lost store is back. Call
        this a few times per second.
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
        """Why the helper seems to hang; empty if it does not."""
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
        """Stops using the store until it answers a probe."""
        if self.breaker.lost(reason, self._clock()):
            logger.warning("remote tier: not used for now: %s", reason)
        if self._process is not None and self._ready and not self._killed:
            # The helper's call in flight ends at its own deadline. Messages that wait for that call then end at once.
            self.post(Cancel(self.last_number))
        self.user.lost()

    def close(self, deadline_s: float) -> bool:
        """Cancels the messages in flight, waits until they have ended, then ends the helper. Idempotent. Returns False
        if the helper was not reaped within `deadline_s` seconds.
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
