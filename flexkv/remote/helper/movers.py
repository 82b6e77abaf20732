"""Carries out gets and puts: moves pages between the store and the unit's host pool, makes their trailers, and verifies
them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import StoreError
from flexkv.observe import name_this_thread, unix_now_s
from flexkv.remote.base import ALIVE_S, Outcome, Part, Presence, Store
from flexkv.remote.messages import Done, FromHelper, Get, Pages, Progress, Put, Remove, Setup
from flexkv.remote.values import ValueFormat
from flexkv.transfer.graph import FailureCause
from flexkv.transfer.host_pool import HostPool

ASKED_AT_ONCE = 256
"""The maximum number of names in one `exists` call before a put. The time that a call takes on Mooncake's master grows
with the number of names.
"""

REMOVE_S = 1.0
"""Deadline of one removal, in seconds. A helper that reads a wrong value removes it. If the removal takes longer, the
next helper that reads the value tries again.
"""

PAUSE_S = 0.5
"""The maximum number of seconds that a put waits for bandwidth before it sends the next `Progress` message."""


@dataclass(slots=True)
class Work:
    """State that the helper's threads share.

    Attributes:
        setup: the helper's configuration.
        formats: format of the values, indexed by number of the KV group.
        open: opens a new client of the store; each thread has its own.
        tell: sends a message to the unit.
        cancelled: messages with numbers up to this one end early; 0 if none does.
    """

    setup: Setup
    formats: tuple[ValueFormat, ...]
    pool: HostPool
    open: Callable[[], Store]
    tell: Callable[[FromHelper], None]
    cancelled: int = 0


def why_lost(store: Store) -> str:
    """Returns why the store cannot be reached; empty if it can. Called after a failed call."""
    return store.alive(ALIVE_S)


@dataclass(frozen=True, slots=True)
class Batch:
    """The pages of one get or put call of the store.

    Attributes:
        pages: the pages' indices in the message.
        names: the pages' names in the store.
        values: the pages' values in memory, each as a list of parts.
        slots: the bytes of the pages' slots in the host pool.
    """

    message: Pages
    pages: Sequence[int]
    names: list[str]
    values: list[list[Part]]
    slots: list[NDArray[np.uint8]]


Causes = Sequence[FailureCause | None]
"""For each page of a batch, why it failed; None if the page did not fail. SOURCE stands for the store or the network.
"""

Take = Callable[[Sequence[int], Causes], None]
"""A function that records the outcomes of pages. It gets the pages' indices in the message, and why each page failed.
"""


class Mover(ABC):
    """Carries out messages of one direction (reads, or writes and removals), with its own client of the store and its
    own memory for trailers.

    Pages move batch by batch. While the store moves a batch, a second thread works on another one: it verifies the
    batch that was read before, or makes the trailers of the batch that is written next.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.store = work.open()
        batch = work.setup.batch_pages
        self._trailers = [np.zeros((2, batch, form.trailer_bytes), np.uint8) for form in work.formats]
        self._registered_slots = 0
        self.beside = ThreadPoolExecutor(1, initializer=name_this_thread, initargs=("flexkv-digest",))
        for trailers in self._trailers:
            self._register(trailers.reshape(-1))

    def _register(self, memory: Part) -> None:
        if why := self.store.register(memory):
            raise StoreError(f"the store's transport does not take the host pool's memory: {why}")

    def _register_slots(self) -> None:
        """Registers the host slots that have become usable since the last call."""
        pool = self.work.pool
        ready = pool.ready_slots
        while self._registered_slots < ready:
            memory = pool.extent_of(self._registered_slots)
            self._register(memory)
            self._registered_slots += len(memory) // pool.slot_bytes

    def move(self, message: Pages) -> None:
        """Carries out one message, and reports its end with `Done`."""
        self._register_slots()
        done = Done(message.number, np.empty(0, np.int32), np.empty(0, np.uint8))
        causes = np.full(len(message.slots), FailureCause.NOT_EXECUTED, np.uint8)
        arrived = np.zeros(len(message.slots), np.bool_)

        def take(pages: Sequence[int], of_pages: Causes) -> None:
            for page, cause in zip(pages, of_pages, strict=True):
                arrived[page], causes[page] = cause is None, cause or 0

        self.carry(message, done, take)
        done.failed = np.flatnonzero(~arrived).astype(np.int32)
        done.causes = causes[~arrived]
        done.bytes = self.work.formats[message.group].value_bytes * done.outcomes["ok"]
        self.work.tell(done)

    def batches(self, message: Pages, pages: Sequence[int], done: Done) -> Iterator[Batch]:
        """Yields batches of the message's pages with the indices `pages`, until the message is cancelled or the store
        is lost.
        """
        form, size = self.work.formats[message.group], self.work.setup.batch_pages
        for number, first in enumerate(range(0, len(pages), size)):
            if message.number <= self.work.cancelled or done.lost:
                done.reason = done.reason or done.lost or "cancelled"
                return
            part = pages[first : first + size]
            slots = [self.work.pool.slot(int(message.slots[page])) for page in part]
            trailers = self._trailers[message.group][number % 2]
            values = [form.parts(slot, trailer) for slot, trailer in zip(slots, trailers, strict=False)]
            yield Batch(message, part, form.names(message.keys[part]), values, slots)

    def called(self, message: Pages, begun_s: float, failed: bool, done: Done) -> None:
        """Reports progress after a call to the store. If the call has failed, finds out whether the store is lost."""
        self.work.tell(Progress(message.number))
        if failed:
            took_s = time.monotonic() - begun_s
            done.lost = why_lost(self.store)
            if not done.lost and took_s > self.work.setup.get_s + ALIVE_S:
                done.lost = f"a call took {took_s:.1f} s"

    def failed(self, done: Done, outcome: str, reason: str) -> None:
        """Counts a page that did not arrive. Keeps `reason` only if it is the first one for this message."""
        done.outcomes[outcome] += 1
        done.reason = done.reason or reason or outcome

    @abstractmethod
    def carry(self, message: Pages, done: Done, take: Take) -> None:
        """Moves the message's pages, and passes their outcomes to `take`. A page without an outcome counts as
        NOT_EXECUTED.
        """


class Getter(Mover):
    """Reads values into host slots, and verifies them. If a value is not the requested page, removes the value from the
    store.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._bad: list[str] = []
        """Names of wrong values that are still to be removed."""

    def carry_out(self, message: Get) -> None:
        self.move(message)

    def carry(self, message: Pages, done: Done, take: Take) -> None:
        under_check: tuple[Batch, Future[Causes]] | None = None
        for batch in self.batches(message, range(len(message.slots)), done):
            begun_s = time.monotonic()
            outcomes = self.store.get(batch.names, batch.values, self.work.setup.get_s)
            why, failed = self.store.last_error, Outcome.FAILED in outcomes
            if under_check is not None:
                take(under_check[0].pages, under_check[1].result())
            under_check = batch, self.beside.submit(self._check, batch, outcomes, why, done)
            self.called(message, begun_s, failed, done)
        if under_check is not None:
            take(under_check[0].pages, under_check[1].result())
        if self._bad:
            bad, self._bad = self._bad, []
            self.store.remove(bad, REMOVE_S)

    def _check(self, batch: Batch, outcomes: Sequence[Outcome], why: str, done: Done) -> Causes:
        message, now = batch.message, unix_now_s()
        form = self.work.formats[message.group]
        causes: list[FailureCause | None] = []
        for i, (page, outcome) in enumerate(zip(batch.pages, outcomes, strict=True)):
            cause, miss, reason = FailureCause.CONTENT, outcome.name.lower(), why
            if outcome is Outcome.OK:
                trailer, tokens = batch.values[i][-1], int(message.tokens[page])
                miss, reason = form.check(batch.slots[i], trailer, message.keys[page], tokens, now)
            elif outcome in (Outcome.FAILED, Outcome.AWAY):
                cause = FailureCause.SOURCE
            if miss == "none":
                done.outcomes["ok"] += 1
                causes.append(None)
                continue
            if outcome in (Outcome.OK, Outcome.OTHER_SIZE):
                self._bad.append(batch.names[i])
            self.failed(done, miss, reason)
            causes.append(cause)
        return causes


class Putter(Mover):
    """Makes the trailers of pages in host slots, and writes the pages to the store. Does not send pages that the store
    already has.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._allowance = 0.0
        """The number of bytes that may be sent now under the limit `put_bytes_per_s`; negative if more bytes than
        allowed were sent so far.
        """
        self._since_s = time.monotonic()

    def carry_out(self, message: Put | Remove) -> None:
        if isinstance(message, Remove):
            form = self.work.formats[message.group]
            self.store.remove(form.names(message.keys), REMOVE_S)
        else:
            self.move(message)

    def carry(self, message: Pages, done: Done, take: Take) -> None:
        batches = self.batches(message, self._unknown(message, done, take), done)
        batch = next(batches, None)
        sealed = None if batch is None else self.beside.submit(self._seal, batch)
        while batch is not None and sealed is not None:
            sealed.result()
            current, batch = batch, next(batches, None)
            # The next batch gets its trailers while the current one is sent. There is no next batch if an earlier call
            # has found the store lost.
            sealed = None if batch is None else self.beside.submit(self._seal, batch)
            take(current.pages, self._put(current, done))
            if done.lost:
                if sealed is not None:
                    sealed.result()
                done.reason = done.reason or done.lost
                return

    def _unknown(self, message: Pages, done: Done, take: Take) -> list[int]:
        """Asks the store which of the message's pages it has. Reports those pages as done, and returns the indices of
        all other pages.
        """
        form, get_s, unknown = self.work.formats[message.group], self.work.setup.get_s, []
        for first in range(0, len(message.slots), ASKED_AT_ONCE):
            if message.number <= self.work.cancelled or done.lost:
                done.reason = done.reason or done.lost or "cancelled"
                break
            begun_s, pages = time.monotonic(), range(len(message.slots))[first : first + ASKED_AT_ONCE]
            there = self.store.exists(form.names(message.keys[first : first + ASKED_AT_ONCE]), get_s)
            known = [page for page, presence in zip(pages, there, strict=True) if presence is Presence.YES]
            done.outcomes["known"] += len(known)
            take(known, [None] * len(known))
            unknown += [
                page for page, presence in zip(pages, there, strict=True) if presence is not Presence.YES
            ]
            # A call with an UNKNOWN among its answers counts as failed, although other servers of the store may have
            # answered.
            self.called(message, begun_s, Presence.UNKNOWN in there, done)
        return unknown

    def _seal(self, batch: Batch) -> None:
        message, setup, now = batch.message, self.work.setup, unix_now_s()
        form, expiry = self.work.formats[message.group], 0 if setup.ttl_s is None else now + setup.ttl_s
        for i, page in enumerate(batch.pages):
            trailer, tokens = batch.values[i][-1], int(message.tokens[page])
            form.seal(batch.slots[i], trailer, message.keys[page], tokens, expiry, now)

    def _put(self, batch: Batch, done: Done) -> Causes:
        get_s = self.work.setup.get_s
        self._pause(batch)
        if batch.message.number <= self.work.cancelled:
            done.reason = done.reason or "cancelled"
            return [FailureCause.NOT_EXECUTED] * len(batch.names)
        begun_s = time.monotonic()
        causes: list[FailureCause | None] = [None] * len(batch.names)
        outcomes = self.store.put(batch.names, batch.values, get_s)
        why = self.store.last_error
        for i, outcome in enumerate(outcomes):
            if outcome is Outcome.OK:
                done.outcomes["ok"] += 1
                continue
            tried = outcome not in (Outcome.FULL, Outcome.AWAY)
            causes[i] = FailureCause.SOURCE if tried else FailureCause.NOT_EXECUTED
            self.failed(done, outcome.name.lower(), why)
        self.called(batch.message, begun_s, FailureCause.SOURCE in causes, done)
        return causes

    def _pause(self, batch: Batch) -> None:
        """Waits until `put_bytes_per_s` allows the batch to be sent, or the batch is cancelled."""
        rate = self.work.setup.put_bytes_per_s
        if rate is None:
            return
        while True:
            now_s = time.monotonic()
            # After an idle time, at most the bytes of one second may be sent at once.
            self._allowance = min(float(rate), self._allowance + rate * (now_s - self._since_s))
            self._since_s = now_s
            if self._allowance >= 0 or batch.message.number <= self.work.cancelled:
                self._allowance -= len(batch.pages) * self.work.formats[batch.message.group].value_bytes
                return
            time.sleep(min(PAUSE_S, -self._allowance / rate))
            self.work.tell(Progress(batch.message.number))
