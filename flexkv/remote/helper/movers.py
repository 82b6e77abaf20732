"""Gets and puts: pages between the store and the unit's host pool, sealed and verified here."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import StoreError
from flexkv.observe import unix_now_s
from flexkv.remote.base import Outcome, Part, Presence, Store
from flexkv.remote.messages import Done, FromHelper, Get, Pages, Progress, Put, Remove, Setup
from flexkv.remote.values import ValueFormat
from flexkv.transfer.graph import FailureCause
from flexkv.transfer.host_pool import HostPool

ALIVE_S = 1.0
"""How long a store has, after a call that failed, to show that it is there."""

REMOVE_S = 1.0
"""A value that is not what it should be is removed by who found it; where that takes longer, by the next one."""

PAUSE_S = 0.5
"""Longest wait for a share of the bandwidth between two signs of life."""

NO_TICKET = -1


@dataclass(slots=True)
class Work:
    """What the threads have in common.

    Attributes:
        open: another client of the store; each thread has its own.
        tell: sends a message to the unit.
        cancelled: messages up to this number end early.
    """

    setup: Setup
    formats: tuple[ValueFormat, ...]
    pool: HostPool
    open: Callable[[], Store]
    tell: Callable[[FromHelper], None]
    cancelled: int = 0


def why_lost(store: Store) -> str:
    """After a call that failed: why the store cannot be reached; empty where it can."""
    return store.alive(ALIVE_S)


class Mover(ABC):
    """Carries out messages of one kind, batch by batch, with a client and trailers of its own."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.store = work.open()
        batch = work.setup.batch_pages
        self._trailers = [np.zeros((batch, f.trailer_bytes), np.uint8) for f in work.formats]
        self._registered_slots = 0
        for trailers in self._trailers:
            self._register(trailers.reshape(-1))

    def _register(self, memory: Part) -> None:
        if why := self.store.register(memory):
            raise StoreError(f"the store's transport does not take the host pool's memory: {why}")

    def _register_slots(self) -> None:
        """Those that came up since the last call."""
        pool = self.work.pool
        ready = pool.ready_slots
        while self._registered_slots < ready:
            memory = pool.extent_of(self._registered_slots)
            self._register(memory)
            self._registered_slots += len(memory) // pool.slot_bytes

    def move(self, message: Pages) -> None:
        """Carries out one message and reports its end."""
        self._register_slots()
        done = Done(message.number, np.empty(0, np.int32), np.empty(0, np.uint8))
        causes = np.full(len(message.slots), FailureCause.NOT_EXECUTED, np.uint8)
        ended = np.zeros(len(message.slots), np.bool_)
        batch = self.work.setup.batch_pages
        for first in range(0, len(message.slots), batch):
            if message.number <= self.work.cancelled or done.lost:
                done.reason = done.reason or done.lost or "cancelled"
                break
            part = range(first, min(first + batch, len(message.slots)))
            self.pause(message, len(part) * self.work.formats[message.group].value_bytes)
            for page, cause in zip(part, self._move_batch(message, part, done), strict=True):
                ended[page], causes[page] = cause is None, cause or 0
            self.work.tell(Progress(message.number))
        done.failed = np.flatnonzero(~ended).astype(np.int32)
        done.causes = causes[~ended]
        self.work.tell(done)

    def _move_batch(self, message: Pages, part: range, done: Done) -> list[FailureCause | None]:
        form, trailers = self.work.formats[message.group], self._trailers[message.group]
        slots = [self.work.pool.slot(int(message.slots[page])) for page in part]
        names = form.names(message.keys[part.start : part.stop])
        values = [form.parts(slot, trailer) for slot, trailer in zip(slots, trailers, strict=False)]
        begun_s, arrived = time.monotonic(), done.outcomes["ok"]
        causes = self.call(message, part, names, values, slots, done)
        if any(cause is FailureCause.SOURCE for cause in causes):
            done.lost = why_lost(self.store)
            if not done.lost and time.monotonic() - begun_s > self.work.setup.get_s + ALIVE_S:
                done.lost = f"a call took {time.monotonic() - begun_s:.1f} s"
        done.bytes += form.value_bytes * (done.outcomes["ok"] - arrived)
        return causes

    def failed(self, done: Done, outcome: str, reason: str) -> None:
        """Counts a page that did not arrive."""
        done.outcomes[outcome] += 1
        done.reason = done.reason or reason or outcome

    @abstractmethod
    def pause(self, message: Pages, value_bytes: int) -> None:
        """Waits until so many bytes may be moved."""

    @abstractmethod
    def call(
        self,
        message: Pages,
        part: range,
        names: Sequence[str],
        values: Sequence[Sequence[Part]],
        slots: Sequence[NDArray[np.uint8]],
        done: Done,
    ) -> list[FailureCause | None]:
        """Moves the pages of `part`; of each why it failed, or None. SOURCE: the store, or the way to it."""


class Getter(Mover):
    """Reads values into slots. What is not the page that was asked for never counts, and the store is to lose it."""

    def carry_out(self, message: Get) -> None:
        self.move(message)

    def pause(self, message: Pages, value_bytes: int) -> None:
        """Somebody waits for what is read."""

    def call(
        self,
        message: Pages,
        part: range,
        names: Sequence[str],
        values: Sequence[Sequence[Part]],
        slots: Sequence[NDArray[np.uint8]],
        done: Done,
    ) -> list[FailureCause | None]:
        outcomes = self.store.get(names, values, self.work.setup.get_s)
        form, now = self.work.formats[message.group], unix_now_s()
        causes: list[FailureCause | None] = []
        bad: list[str] = []
        for i, (page, outcome) in enumerate(zip(part, outcomes, strict=True)):
            cause, miss, reason = FailureCause.CONTENT, outcome.name.lower(), self.store.last_error
            if outcome is Outcome.OK:
                tokens = int(message.tokens[page])
                miss, reason = form.check(slots[i], values[i][-1], message.keys[page], tokens, now)
            elif outcome is Outcome.FAILED:
                cause = FailureCause.SOURCE
            if miss == "none":
                done.outcomes["ok"] += 1
                causes.append(None)
                continue
            if outcome in (Outcome.OK, Outcome.OTHER_SIZE):
                bad.append(names[i])
            self.failed(done, miss, reason)
            causes.append(cause)
        if bad:
            self.store.remove(bad, REMOVE_S)
        return causes


class Putter(Mover):
    """Writes pages of slots, each with a trailer made here; what the store has is not sent again."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._allowance = 0.0
        """Bytes that may be sent at once; below zero those that were sent ahead of their time."""
        self._since_s = time.monotonic()

    def carry_out(self, message: Put | Remove) -> None:
        if isinstance(message, Remove):
            form = self.work.formats[message.group]
            self.store.remove(form.names(message.keys), REMOVE_S)
        else:
            self.move(message)

    def pause(self, message: Pages, value_bytes: int) -> None:
        rate = self.work.setup.put_bytes_per_s
        if rate is None:
            return
        while True:
            now_s = time.monotonic()
            # A second's worth may be sent at once after a quiet time, and no more.
            self._allowance = min(float(rate), self._allowance + rate * (now_s - self._since_s))
            self._since_s = now_s
            if self._allowance >= 0 or message.number <= self.work.cancelled:
                self._allowance -= value_bytes
                return
            time.sleep(min(PAUSE_S, -self._allowance / rate))
            self.work.tell(Progress(message.number))

    def call(
        self,
        message: Pages,
        part: range,
        names: Sequence[str],
        values: Sequence[Sequence[Part]],
        slots: Sequence[NDArray[np.uint8]],
        done: Done,
    ) -> list[FailureCause | None]:
        setup = self.work.setup
        there = self.store.exists(names, setup.get_s)
        new = [i for i, presence in enumerate(there) if presence is not Presence.YES]
        causes: list[FailureCause | None] = [None] * len(names)
        done.outcomes["known"] += len(names) - len(new)
        form, now = self.work.formats[message.group], unix_now_s()
        expiry = 0 if setup.ttl_s is None else now + setup.ttl_s
        for i in new:
            page = part[i]
            form.seal(slots[i], values[i][-1], message.keys[page], int(message.tokens[page]), expiry, now)
        outcomes = (
            self.store.put([names[i] for i in new], [values[i] for i in new], setup.get_s) if new else []
        )
        for i, outcome in zip(new, outcomes, strict=True):
            if outcome is Outcome.OK:
                done.outcomes["ok"] += 1
                continue
            full = outcome is Outcome.FULL
            causes[i] = FailureCause.NOT_EXECUTED if full else FailureCause.SOURCE
            self.failed(done, outcome.name.lower(), self.store.last_error)
        return causes
