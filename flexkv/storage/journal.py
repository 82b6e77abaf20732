"""The journal of one disk: a thread that makes published pages durable, many at a time.

A group commit first calls fdatasync for the slabs that were written, then commits one transaction of the index. After
that the pages count as durable. Because of this order, the index never lists a page that is not on the disk, even after
a crash.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.observe import NamedThread, unix_now_ms
from flexkv.storage.epoch import EPOCH_NAME, write_epoch
from flexkv.storage.group_commit import await_group
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_trouble import FullDiskError, disk_error
from flexkv.storage.spare import take_spare, with_spare
from flexkv.storage.striping import Slots, striped_slots

logger = logging.getLogger(__name__)

USE_FLUSH_S = 5.0
"""Number of seconds that an idle journal waits before it writes which pages were used. A crash may lose the order of
uses that are not written yet.
"""

USE_FLUSH_CHUNKS = 512
"""Maximum number of chunks per slab (2 MiB together) in a commit in which only the times of use have changed. The limit
keeps the disk's work for records of uses small.
"""

RETRIES = 5
RETRY_S = 0.2
"""The pause in seconds before a failed commit is retried for the first time. Each further pause is twice as long. There
are RETRIES retries, which take 6 s in all.
"""

FULL_PAUSE_S = 2.0
"""While the disk is full, a commit is retried after every pause of this many seconds. The commit's pages are served
meanwhile, but a crash would lose them.
"""


@dataclass(slots=True)
class Publish:
    """Records that these pages were written.

    Attributes:
        slab: number of the slab.
        group: number of the pages' KV group.
        slots: slot of each page.
        since: when the record was made, in seconds of the monotonic clock.
    """

    slab: int
    group: int
    slots: Slots
    keys: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    expiries: NDArray[np.uint64]
    tokens: NDArray[np.int32]
    since: float

    @property
    def rows(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Evict:
    slab: int
    slots: Slots
    generations: NDArray[np.uint64]

    @property
    def rows(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Use:
    """Records that the pages at `places`, on any disk, were used. Every fetch and load makes such records. To save the
    caller's time, all places are passed to the journal of every disk, and the journal's thread selects the places on
    its own disk.

    Attributes:
        slab: number of the slab.
        disk: number of the journal's disk.
        disks: number of disks that places are striped over.
    """

    slab: int
    places: NDArray[np.int32]
    disk: int
    disks: int

    @property
    def rows(self) -> int:
        """Estimated number of the places that lie on this disk: an equal share, rounded up."""
        return -(-len(self.places) // self.disks)

    def slots(self, most: int) -> Slots:
        """The slots of those places that lie on this disk. Skips places whose slot is not below `most`, because a use
        is only a hint.
        """
        on_disk, slots = striped_slots(self.places, self.disks)
        here: Slots = slots[(on_disk == self.disk) & (slots >= 0) & (slots < most)]
        return here


@dataclass(slots=True)
class Reset:
    epoch: int
    done: threading.Event

    @property
    def rows(self) -> int:
        return 0


Record = Publish | Evict | Use | Reset
Durable = Callable[[int, Slots, NDArray[np.uint64]], None]
"""A function that is called when pages have become durable, with the number of their KV group, their slots on this
disk, and their generations.
"""


def _oldest_publish(records: Iterable[Record]) -> float:
    """Returns the time at which the first `Publish` among the records was made, in seconds of the monotonic clock; 0 if
    there is none.
    """
    return next((record.since for record in records if isinstance(record, Publish)), 0.0)


class Journal:
    """Makes records durable in a thread of its own, which owns `index` until it ends. Every method but `close` returns
    at once.

    Args:
        slabs: the slab of each group; groups that share a slab have the same one.
        on_durable: called in the journal's thread with pages that have become durable.
        most_rows: maximum number of rows in the queue and in the commit in flight.
    """

    def __init__(
        self, index: SlotIndex, slabs: Sequence[c_ext.SlabFile], on_durable: Durable, most_rows: int
    ) -> None:
        self._index = index
        self._slabs = list(slabs)
        self._on_durable = on_durable
        self._most_rows = most_rows
        self._lock = threading.Condition()
        self._queue: deque[Record] = deque()
        self._waiting_rows = 0
        self._records = 0
        self._reset_waits = False
        self._oldest = 0.0
        self._stopping = False
        self.failure = ""
        self._thread = NamedThread("flexkv-journal", self._run)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system cannot start another thread
            # The slabs hold the folder's lock. The journal and its thread refer to each other, so Python does not free
            # them soon. Until then, the journal's slabs would keep the folder locked.
            self._slabs.clear()
            raise DiskError(f"{index.path}: no thread for its journal: {error}") from error

    def put(self, record: Record) -> bool:
        """Queues a record. Returns False if too many rows wait, or if the journal has failed or was stopped."""
        with self._lock:
            is_use = isinstance(record, Use)
            # Records of uses may fill only half of the queue, because other records must not be lost.
            room = self._most_rows // 2 if is_use else self._most_rows
            full = self._waiting_rows + record.rows > room and not isinstance(record, Reset)
            if full:
                self._lock.notify()
            if self.failure or self._stopping or full:
                return False
            self._queue.append(record)
            self._waiting_rows += record.rows
            self._records += 1
            self._reset_waits |= isinstance(record, Reset)
            # A record of a use does not wake the thread, because waking it would cost the caller time. The thread takes
            # the record together with the next record of another kind, or when it wakes by itself.
            if not is_use:
                self._lock.notify()
        return True

    @property
    def room(self) -> int:
        """Number of further rows that the journal would accept now."""
        with self._lock:
            return self._most_rows - self._waiting_rows

    @property
    def lag_s(self) -> float:
        """Age of the oldest record of a published page that is not durable yet, in seconds; 0 if there is none."""
        with self._lock:
            oldest = self._oldest or _oldest_publish(self._queue)
        return time.monotonic() - oldest if oldest else 0.0

    @property
    def ended(self) -> bool:
        """Whether the thread has ended. If so, the journal no longer uses slabs and index."""
        return not self._thread.is_alive()

    def fail(self, reason: str) -> None:
        """Ends the journal: from now on it accepts and writes nothing."""
        with self._lock:
            self.failure = self.failure or reason
            self._let_go_of_queue()
            self._lock.notify()

    def stop(self) -> None:
        """Does the part of `close` that does not wait."""
        with self._lock:
            self._stopping = True
            self._lock.notify()

    def close(self, deadline_s: float) -> bool:
        """Writes the queued records and closes the index. Returns whether both were done within `deadline_s`
        seconds.
        """
        self.stop()
        self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive() and not self.failure

    def _let_go_of_queue(self) -> None:
        for record in self._queue:
            if isinstance(record, Reset):
                record.done.set()
        self._queue.clear()
        self._waiting_rows = 0
        self._oldest = 0.0  # a failed commit will never be durable

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # after any error, no later page may count as durable
            if not isinstance(error, DiskError):
                logger.exception("journal of %s", self._index.path)
            self.fail(str(error) or type(error).__name__)
        try:
            self._index.close()
        except DiskError as error:
            self.fail(str(error))
        self._slabs.clear()  # the slabs hold the folder's lock

    def _turn(self) -> bool:
        """Carries out one group commit. Returns False if it was the last one."""
        with self._lock:
            if not self._queue and not self._stopping and not self.failure:
                self._lock.wait(USE_FLUSH_S)
            if self._queue and not self._in_a_hurry():
                await_group(time.monotonic, self._wait_for_more)
            batch, self._queue = self._queue, deque()
            # Set before the lock is released, so that `lag_s` sees every `Publish`, whether in the queue or in the
            # batch.
            self._oldest = _oldest_publish(batch)
            self._reset_waits = False
            stopping, failed = self._stopping, bool(self.failure)
        if failed:
            return False
        self._write(batch)
        with self._lock:
            self._oldest = 0.0
            self._waiting_rows -= sum(record.rows for record in batch)
            return not (stopping and not self._queue)

    def _wait_for_more(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds for another record. Returns whether one has come and the commit is not
        urgent. The caller holds the lock.
        """
        known = self._records
        self._lock.wait_for(lambda: self._in_a_hurry() or self._records > known, timeout_s)
        return self._records > known and not self._in_a_hurry()

    def _in_a_hurry(self) -> bool:
        return self._ends() or self._reset_waits

    def _ends(self) -> bool:
        return self._stopping or bool(self.failure)

    def _write(self, batch: Sequence[Record]) -> None:
        published = [record for record in batch if isinstance(record, Publish)]
        resets = [record for record in batch if isinstance(record, Reset)]
        try:
            self._check_files()
            self._sync_data({record.slab for record in published})
            now_ms = unix_now_ms()
            for record in batch:
                self._apply(record, now_ms)
            if resets:
                self._retry(partial(self._write_epoch, resets[-1].epoch))
            if (self._index.flush_uses(USE_FLUSH_CHUNKS) or resets) and not self._commit(resets):
                return self._put_back(batch)
            for record in published:
                held = self._index.rows[record.slab]["generation"][record.slots] == record.generations
                if held.any():
                    self._on_durable(record.group, record.slots[held], record.generations[held])
        except BaseException as error:
            # The failure must be set before `reset.done`, because a caller that waits for the reset then checks whether
            # it failed.
            self.failure = self.failure or str(error)
            raise
        finally:
            for reset in resets:
                reset.done.set()

    def _put_back(self, batch: Sequence[Record]) -> None:
        """Puts a batch back at the front of the queue. Applying its records a second time changes nothing."""
        with self._lock:
            self._queue.extendleft(reversed(batch))
            self._waiting_rows += sum(record.rows for record in batch)

    def _check_files(self) -> None:
        for slab in set(self._slabs):
            if not slab.in_place:
                raise DiskError("a slab was deleted or replaced while in use")
        if not self._index.in_place:
            raise DiskError(f"{self._index.path} or its log was deleted or replaced while in use")

    def _sync_data(self, slabs: set[int]) -> None:
        for number in slabs:
            error = self._slabs[number].sync()
            if error:
                # The kernel has dropped from its cache the data that it could not write. A retry would not write that
                # data either.
                raise DiskError(f"fdatasync of the slab of group {number}: {os.strerror(-error)}")

    def _apply(self, record: Record, now_ms: int) -> None:
        if isinstance(record, Publish):
            self._index.publish(
                record.slab,
                record.slots,
                record.keys,
                record.generations,
                record.expiries,
                record.tokens,
                now_ms,
                record.group,
            )
        elif isinstance(record, Evict):
            self._index.evict(record.slab, record.slots, record.generations)
        elif isinstance(record, Use):
            slots = record.slots(len(self._index.rows[record.slab]))
            self._index.use(record.slab, slots, now_ms)
        else:
            self._index.clear()
            self._index.epoch = record.epoch

    def _write_epoch(self, epoch: int) -> None:
        folder = self._index.path.parent
        try:
            with_spare(folder, partial(write_epoch, folder, epoch))
        except OSError as error:
            raise disk_error(folder / EPOCH_NAME, error) from error

    def _commit(self, resets: Sequence[Reset]) -> bool:
        """Commits the index. While the disk is full, retries until a reset is queued; then returns False, because the
        reset must be written first.
        """

        def epoch_is_enough() -> bool:
            # When an index is opened, its rows are dropped if its epoch is lower than that in the epoch's file. So the
            # resets in this batch, whose epoch is already in the file, need no commit.
            for reset in resets:
                reset.done.set()
            return self._reset_waits

        if not self._retry(self._index.commit, epoch_is_enough):
            return False
        if resets:
            take_spare(self._index.path.parent)
        return True

    def _retry(self, step: Callable[[], None], give_way: Callable[[], bool] = lambda: False) -> bool:
        """Tries a step until it succeeds.

        Args:
            give_way: called while the disk is full. If it returns True, the step is abandoned.

        Returns:
            Whether the step succeeded.

        Raises:
            DiskError: the step failed too often, or it failed while the journal is ending.
        """
        pause, attempts, full = RETRY_S, 0, ""
        while True:
            try:
                step()
            except FullDiskError as error:
                if self._ends():
                    raise
                if not full:
                    logger.warning("journal: %s; it is tried again while the disk is full", error)
                full = str(error)
                with self._lock:
                    self._lock.wait_for(lambda: self._ends() or give_way(), FULL_PAUSE_S)
                    if not self._ends() and give_way():
                        return False
            except DiskError as error:
                attempts += 1
                if attempts > RETRIES or self._stopping:
                    raise
                logger.warning("journal: %s; again in %.1f s", error, pause)
                time.sleep(pause)
                pause *= 2
            else:
                if full:
                    logger.warning("journal of %s: what waited is durable now", self._index.path)
                return True
