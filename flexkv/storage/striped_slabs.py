"""The disk tier of one ownership unit. Its pages are striped over the disks, and each disk has its own journal."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import BlockRangeError, ContractError, DiskError
from flexkv.observe import unix_now_s
from flexkv.storage.base import (
    DiskEvents,
    DiskGroup,
    DiskIdentity,
    DiskOptions,
    DiskStats,
    DurablePages,
    Generations,
    IndexRows,
    Keys,
    Places,
    Volumes,
)
from flexkv.storage.disk_states import DiskStates
from flexkv.storage.disk_volume import DiskVolume
from flexkv.storage.folder import FolderLockedError
from flexkv.storage.generations import GenerationCounter
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import slot_bytes
from flexkv.storage.journal import Durable, Evict, Journal, Publish, Record, Reset, Use
from flexkv.storage.pending_records import PendingRecords
from flexkv.storage.rows import index_rows
from flexkv.storage.sharing import groups_of_slab, slab_numbers
from flexkv.storage.slot_rows import Rows
from flexkv.storage.striping import parts_by_disk, places_of
from flexkv.storage.weights_name import NamedDisks
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabGroup, SlabMap, SlabRow

logger = logging.getLogger(__name__)

NO_EVENTS = DiskEvents()

FLUSH_POLL_S = 0.005
"""Seconds between two attempts of `close` to flush pending records to a full journal. A group commit takes about as
long.
"""


JOURNAL_END_S = 5.0
"""If an opening fails after it has started some journals, it waits at most this many seconds for each journal to end.
The journals end soon, because they have nothing to write yet.
"""


class StripedSlabs(Volumes):
    """The disk tier of one ownership unit; `open` makes it."""

    def __init__(
        self,
        folders: Sequence[Path],
        volumes: Sequence[DiskVolume | None],
        groups: Sequence[DiskGroup],
        options: DiskOptions,
        wrapper: c_ext.QueueWrapper | None,
    ) -> None:
        self._states = DiskStates(folders)
        self._volumes = list(volumes)
        self._options = options
        self._wrapper = wrapper
        self._groups = list(groups)
        self._codecs = [codec_of(group, number) for number, group in enumerate(groups)]
        self._slabs = slab_numbers(groups)
        self._durable: deque[DurablePages] = deque()
        self._pending: dict[int, PendingRecords] = {}
        """The pending records of each disk that is in use."""
        self._lane: c_ext.DiskLane | None = None
        self._weights = NamedDisks()
        self._resetting: list[tuple[int, Journal, threading.Event]] = []
        """The disks on which the last reset has begun and for which `finish_reset` has not waited yet. For each: its
        number, its journal, and the event that is set when the reset is durable or has failed.
        """
        self._closed = False
        self._start_use()

    @classmethod
    def open(
        cls,
        folders: Sequence[Path],
        identity: DiskIdentity,
        groups: Sequence[DiskGroup],
        options: DiskOptions,
        wrapper: c_ext.QueueWrapper | None = None,
    ) -> StripedSlabs:
        """Opens or creates the unit's slabs in each of `folders`, one per disk.

        A disk that cannot be opened counts as lost, and `poll` returns the reason. The other disks are used.

        Args:
            wrapper: wraps the I/O queues through which the lane reads and writes; None if they need no wrapper.

        Raises:
            FolderLockedError: another process, or another tier in this process, uses the unit's folder.
            ConfigError, GeometryError, CapacityError: `identity`, `groups` or `options.bytes_per_disk` is not allowed.
            DiskError: no disk can be used.
        """
        volumes: list[DiskVolume | None] = []
        reasons: dict[int, str] = {}
        try:
            for disk, folder in enumerate(folders):
                try:
                    volumes.append(DiskVolume(Path(folder), identity, groups, options))
                except FolderLockedError:
                    raise
                except DiskError as error:
                    volumes.append(None)
                    reasons[disk] = str(error)
            if not any(volumes):
                raise DiskError("no disk can be used: " + "; ".join(reasons.values()))
            unit = cls([Path(folder) for folder in folders], volumes, groups, options, wrapper)
        except BaseException:
            for volume in filter(None, volumes):
                volume.index.close()
                volume.release()
            raise
        for disk, reason in reasons.items():
            unit._lose(disk, reason)
        return unit

    def _start_use(self) -> None:
        alive = [volume for volume in self._volumes if volume is not None]
        self._slots = min(volume.slots for volume in alive)
        self._epoch = max(volume.index.epoch for volume in alive)
        opens = 1 + max(volume.index.opens for volume in alive)
        self._generations = GenerationCounter(opens)
        self._rows: list[list[Rows | None]] = []
        self._journals: list[Journal | None] = [None] * len(self._volumes)
        try:
            self._begin_journals(opens)
        except BaseException:
            # Each journal's thread holds its folder's lock, so all of them must end, even if only one disk has failed.
            for journal in filter(None, self._journals):
                journal.close(JOURNAL_END_S)
            raise
        if not any(self._journals):
            raise DiskError("no disk can be used: " + "; ".join(self._states.lost.values()))

    def _begin_journals(self, opens: int) -> None:
        for disk, volume in enumerate(self._volumes):
            if volume is None:
                self._rows.append([None] * len(self._codecs))
                continue
            has_pages = not volume.is_new and volume.index.epoch == self._epoch
            try:
                self._weights.begin(disk, volume.folder, has_pages)
                volume.begin_use(opens, self._epoch)
                rows = [rows[: self._slots].copy() for rows in volume.index.rows]
                journal = self._journals[disk] = Journal(
                    volume.index, volume.slabs, self._on_durable(disk), self._options.journal_rows
                )
            except DiskError as error:
                self._lose(disk, str(error))
                self._rows.append([None] * len(self._codecs))
                # This tier does not use the disk, so the next opening must not find its folder locked.
                self._volumes[disk] = None
                with contextlib.suppress(DiskError):
                    volume.index.close()
                volume.release()
                continue
            self._rows.append(list(rows))
            self._pending[disk] = PendingRecords(journal, [self._slots] * len(self._codecs))

    @property
    def disks(self) -> int:
        return len(self._volumes)

    @property
    def folder(self) -> Path | None:
        return next((volume.folder for volume in self._volumes if volume is not None), None)

    @property
    def alive(self) -> tuple[bool, ...]:
        return self._states.alive

    @property
    def epoch(self) -> int:
        return self._epoch

    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        return self._weights.strange(weights, self._epoch)

    def name_weights(self, weights: bytes) -> None:
        self._weights.name(weights, self._epoch)

    def _require_group(self, group: int) -> None:
        if not 0 <= group < len(self._codecs):
            raise BlockRangeError(f"group {group}: the disk tier has groups [0, {len(self._codecs)})")

    def slots(self, group: int) -> int:
        self._require_group(group)
        return self._slots * self.disks

    def image_bytes(self, group: int) -> int:
        self._require_group(group)
        return slot_bytes(groups_of_slab(self._groups, self._slabs[group]))

    def digest_offsets(self, group: int) -> tuple[int, ...]:
        self._require_group(group)
        codec = self._codecs[group]
        return tuple(codec.digest_offset(rank) for rank in range(codec.ranks))

    def rows(self, group: int) -> IndexRows:
        self._require_group(group)
        slab = self._slabs[group]
        found = [rows[slab] for rows in self._rows]
        for rows in self._rows:
            rows[slab] = None
        return index_rows(found, unix_now_s(), shared=self._slabs.count(slab) > 1)

    def lane(self, pools: Sequence[HostPool]) -> c_ext.DiskLane:
        if self._lane is not None:
            raise ContractError("the disk tier's lane was given away already")
        slabs = [
            volume.slabs if volume is not None and disk not in self._states.lost else []
            for disk, volume in enumerate(self._volumes)
        ]
        self._lane = c_ext.DiskLane(
            self._codecs,
            [pool.native for pool in pools],
            slabs,
            self._options.io,
            self._options.depth,
            self._options.stuck_s,
            self._wrapper,
            self._options.preallocate and not self._options.sealed_apart,
            self._options.register_buffers,
        )
        return self._lane

    def slab_map(self) -> SlabMap:
        groups = tuple(SlabGroup(group.stripe_bytes, group.runs) for group in self._groups)
        disks = tuple(
            tuple(SlabRow(*slab.row) for slab in volume.slabs)
            if volume is not None and disk not in self._states.lost
            else ()
            for disk, volume in enumerate(self._volumes)
        )
        return SlabMap(groups, disks)

    def next_generations(self, count: int) -> Generations:
        return self._generations.take(count)

    def _put(self, disk: int, record: Record) -> bool:
        journal = self._journals[disk]
        return journal is not None and journal.put(record)

    def record_publish(
        self,
        group: int,
        keys: Keys,
        places: Places,
        generations: Generations,
        tokens: NDArray[np.int32],
        expiries: NDArray[np.uint64] | None = None,
    ) -> bool:
        self._require_group(group)
        if expiries is None:
            expiries = np.zeros(len(places), np.uint64)
        if not len(keys) == len(places) == len(generations) == len(tokens) == len(expiries):
            raise ContractError(
                f"{len(keys)} keys, {len(places)} places, {len(generations)} generations, {len(tokens)} tokens, "
                f"{len(expiries)} expiries: must be as many"
            )
        taken = True
        now = time.monotonic()
        for disk, at, slots in parts_by_disk(places, self.disks, self._slots):
            records = self._pending.get(disk)
            record = Publish(
                self._slabs[group], group, slots, keys[at], generations[at], expiries[at], tokens[at], now
            )
            taken &= records is not None and records.publish(record)
        return taken

    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        self._require_group(group)
        for disk, at, slots in parts_by_disk(places, self.disks, self._slots):
            if disk in self._pending:
                self._pending[disk].evict(Evict(self._slabs[group], slots, generations[at]))

    def record_use(self, group: int, places: Places) -> None:
        self._require_group(group)
        for disk in range(self.disks):
            self._put(disk, Use(self._slabs[group], places, disk, self.disks))

    def _on_durable(self, disk: int) -> Durable:
        def tell(group: int, slots: NDArray[np.int64], generations: Generations) -> None:
            places = places_of(slots, disk, self.disks).astype(np.int32)
            self._durable.append(DurablePages(group, places, generations))

        return tell

    def _lose(self, disk: int, reason: str) -> None:
        """Takes a disk out of service, if that has not happened yet."""
        if not self._states.lose(disk, reason):
            return
        self._pending.pop(disk, None)
        journal = self._journals[disk]
        if journal is not None:
            journal.fail(reason)
        if self._lane is not None:
            self._lane.take_out(disk, reason)

    def _find_lost(self) -> None:
        if self._lane is not None:
            for disk, (lost, reason, backend, note) in enumerate(self._lane.states()):
                if lost:
                    self._lose(disk, reason)
                self._states.note_backend(disk, backend, note)
            for disk, reason in enumerate(self._lane.full_reasons()):
                self._states.note_full(disk, reason)
        for disk, journal in enumerate(self._journals):
            if journal is not None and journal.failure:
                self._lose(disk, journal.failure)

    @property
    def unflushed(self) -> bool:
        return any(records.waits for records in self._pending.values())

    def poll(self) -> DiskEvents:
        self._find_lost()
        for records in self._pending.values():
            records.flush()
        if not self._durable and not self._states.has_news:
            return NO_EVENTS
        durable = tuple(self._durable.popleft() for _ in range(len(self._durable)))
        return DiskEvents(durable, self._states.take_lost())

    def stats(self) -> DiskStats:
        lag_s = max(journal.lag_s for journal in self._journals if journal is not None)
        pending_pages = sum(records.pages for records in self._pending.values())
        if self._lane is None:
            return DiskStats(journal_lag_s=lag_s, pending_pages=pending_pages)
        counts = [self._lane.counts(disk) for disk in range(self.disks)]
        misses = {name: sum(c["misses"][name] for c in counts) for name in counts[0]["misses"]}
        return DiskStats(
            read_pages=sum(c["read_pages"] for c in counts),
            read_bytes=sum(c["read_bytes"] for c in counts),
            written_pages=sum(c["written_pages"] for c in counts),
            written_bytes=sum(c["written_bytes"] for c in counts),
            misses=misses,
            write_errors=sum(c["write_errors"] for c in counts),
            journal_lag_s=lag_s,
            pending_pages=pending_pages,
        )

    def begin_reset(self, epoch: int) -> None:
        if epoch <= self._epoch:
            raise ContractError(f"reset to epoch {epoch}: the current one is {self._epoch}")
        self._epoch = epoch
        self._weights.begin_epoch()
        self._resetting.clear()
        for disk, journal in enumerate(self._journals):
            done = threading.Event()
            if journal is not None and journal.put(Reset(epoch, done)):
                self._resetting.append((disk, journal, done))
        # Durable pages that `poll` has not returned yet, pending records and the rows found at start all belong to the
        # previous epoch, so they are dropped.
        self._durable.clear()
        for records in self._pending.values():
            records.clear()
        self._rows = [[None] * len(self._codecs) for _ in self._volumes]

    @property
    def resets(self) -> bool:
        return not all(done.is_set() for _, _, done in self._resetting)

    def finish_reset(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        for disk, journal, done in self._resetting:
            if not done.wait(max(0.0, deadline - time.monotonic())):
                self._lose(disk, "a reset was not durable in time")
            elif journal.failure:
                self._lose(disk, journal.failure)
        self._resetting.clear()

    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        self.begin_reset(epoch)
        self.finish_reset(deadline_s)

    def _stop_flushed_journals(self) -> None:
        """Stops each journal that has no pending records. A stopped journal writes its last commit at once, so that a
        disk that hangs does not delay the other disks.
        """
        for disk, journal in enumerate(self._journals):
            if journal is not None and not (disk in self._pending and self._pending[disk].waits):
                journal.stop()

    def close(self, deadline_s: float) -> bool:
        if self._closed:
            return True
        deadline = time.monotonic() + deadline_s
        self._find_lost()
        self._stop_flushed_journals()
        while self.unflushed and time.monotonic() < deadline:
            self._find_lost()
            for records in list(self._pending.values()):
                records.flush()
            self._stop_flushed_journals()
            time.sleep(FLUSH_POLL_S)
        self._weights.finish(max(0.0, deadline - time.monotonic()))
        all_done = not any(records.pages for records in self._pending.values())
        for disk, (volume, journal) in enumerate(zip(self._volumes, self._journals, strict=True)):
            if volume is None or journal is None:
                continue
            done = journal.close(max(0.0, deadline - time.monotonic()))
            all_done &= done or disk in self._states.lost
            if journal.ended:
                volume.release()
            else:
                all_done = False
        if self._lane is not None and not self._lane.files_closed:
            logger.error("disk tier: its engine was not closed, or an I/O hangs: the folders stay locked")
            all_done = False
        self._closed = all_done
        return all_done
