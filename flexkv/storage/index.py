"""The index of one disk: the page in each slot. The index is stored in an SQLite database beside the slabs.

All rows of a slab are in memory. The database has them in chunks of fixed size, one per database page. An update
changes a few array elements, and the next commit writes the chunks that contain them. Opening the index is one scan,
which makes no Python object per row. The scan detects any damage: each chunk has a digest, and so do the meta values,
which include the number of chunks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import DiskError
from flexkv.storage.epoch import MOST_EPOCH, write_epoch
from flexkv.storage.generations import MOST_OPENS, write_opens
from flexkv.storage.index_database import (
    LOG_SUFFIX,
    database_faults,
    odd_file,
    open_database,
    remove_index,
    set_aside_index,
)
from flexkv.storage.index_log import log_damage
from flexkv.storage.index_trouble import (
    LEAST_ROOM_BYTES,
    SQLITE_ERRORS,
    DamagedIndexError,
    OtherVersionError,
    disk_error,
    index_trouble,
)
from flexkv.storage.slot_rows import (
    CHUNK_SLOTS,
    ROW,
    MetaValue,
    Rows,
    meta_digest,
    pack_chunk,
    padded,
    signed,
    unpack_chunk,
)

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2

CHUNK_ROOM_BYTES = 2 * 4096
"""The disk space that a chunk may need, in bytes: one page in the database's log and one in the database."""


class SlotIndex:
    """The open index of one disk: its rows in memory and its database. Only one thread at a time may use it.

    Attributes:
        rows: each slab's rows, indexed by the number of its first group. `commit` writes changed rows to the database.
        epoch: epoch of the weights to which the rows belong.
        opens: count of the tier's openings.
        is_new: whether no commit had been written before this opening.
        beyond: for each slab, the slots beyond its end that had rows in the database at the opening, because the slab
            was larger before or its file was cut. The next commit removes these rows.

    Args:
        slots: number of slots of each slab, indexed by the number of its first group; 0 for a group that uses another
            group's slab.

    Raises:
        DamagedIndexError: the database or its log is damaged.
        OtherVersionError: the database has another version of the format.
        DiskError: the file system returns an error, or another process has a lock; nothing was changed.
    """

    def __init__(self, path: Path, slots: Sequence[int]) -> None:
        self.path = path
        self.rows: list[Rows] = [np.zeros(padded(count), ROW) for count in slots]
        self.slots = list(slots)
        self._dirty: list[set[int]] = [set() for _ in slots]
        self._used: list[set[int]] = [set() for _ in slots]
        self.epoch = 0
        self.opens = 0
        self.is_new = False
        self.beyond: list[list[int]] = [[] for _ in slots]
        self._slab_ids: list[int | None] = [None] * len(slots)
        self._meta: dict[str, MetaValue] = {}
        """The meta values in the database, without their digest."""
        self._stored: list[set[int]] = [set() for _ in slots]
        """For each slab, the chunks that the database has."""
        self._gone: list[set[int]] = [set() for _ in slots]
        """For each slab, chunks in the database that lie beyond the slab's end, because the slab was larger before. The
        next commit deletes them.
        """
        self._remaking = False
        self._written: list[tuple[int, int]] = []
        try:
            damage = odd_file(path) or log_damage(path.with_name(path.name + LOG_SUFFIX))
        except OSError as error:
            raise disk_error(path, error) from error
        if damage:
            raise DamagedIndexError(f"{path}: {damage}")
        self._db = open_database(path, len(slots))
        try:
            self._load()
        except SQLITE_ERRORS as error:
            self._db.close()
            raise index_trouble(path, error) from error
        except BaseException:
            self._db.close()
            raise

    def _load(self) -> None:
        meta: dict[str, MetaValue] = {}
        for name, value in self._db.execute("SELECT name, value FROM meta"):
            if not isinstance(name, str) or not isinstance(value, int | None):
                raise DamagedIndexError(f"{self.path}: {name!r:.40} is {value!r:.40}")
            meta[name] = value
        self.is_new = not meta
        if meta:
            self._take_meta(meta)
        for group in range(len(self.rows)):
            self._load_rows(group)

    def _take_meta(self, meta: dict[str, MetaValue]) -> None:
        """Checks the meta values of the database, and takes over the epoch, the count of openings and the slab ids.

        Raises:
            DamagedIndexError: `meta` is damaged.
            OtherVersionError: the format has another version. The digest of `meta` is not checked then, because another
                version may compute it differently.
        """
        version = meta.get("version")
        if version is not None and version != SCHEMA_VERSION:
            raise OtherVersionError(
                f"{self.path}: index format {version}; this version reads {SCHEMA_VERSION}"
            )
        if meta.pop("digest", None) != meta_digest(meta):
            raise DamagedIndexError(f"{self.path}: what lies beside its rows is damaged")
        self._meta = meta
        self.epoch = self._number("epoch", MOST_EPOCH)
        self.opens = self._number("opens", MOST_OPENS)
        self._slab_ids = [meta.get(f"slab{group}") for group in range(len(self.slots))]

    def _number(self, name: str, most: int) -> int:
        """Returns the meta value with this name.

        Raises:
            DamagedIndexError: the value is not a number in [0, most].
        """
        value = self._meta.get(name)
        if value is None or not 0 <= value <= most:
            raise DamagedIndexError(f"{self.path}: {name} is {value}; allowed is [0, {most}]")
        return value

    def _load_rows(self, group: int) -> None:
        """Reads the rows of one slab from the database.

        Raises:
            DamagedIndexError: chunks are missing or damaged.
        """
        rows, stored = self.rows[group], self._stored[group]
        chunks = len(rows) // CHUNK_SLOTS
        for chunk, content in self._db.execute(f"SELECT chunk, content FROM rows{group}"):
            try:
                found = unpack_chunk(content, group, chunk)
            except ValueError as error:
                raise DamagedIndexError(f"{self.path}: {error}") from error
            stored.add(chunk)
            if 0 <= chunk < chunks:
                rows[chunk * CHUNK_SLOTS : (chunk + 1) * CHUNK_SLOTS] = found
            else:
                self._gone[group].add(chunk)
                self._note_beyond(group, chunk * CHUNK_SLOTS, found)
        written = self._meta.get(f"chunks{group}", 0)
        if len(stored) != written:
            raise DamagedIndexError(
                f"{self.path}: {len(stored)} of {written} chunks of group {group} are there"
            )
        if rows["generation"][self.slots[group] :].any():  # the slab was larger before
            self._note_beyond(group, self.slots[group], rows[self.slots[group] :])
            rows[self.slots[group] :] = np.zeros((), ROW)
            self._dirty[group].add(self.slots[group] // CHUNK_SLOTS)

    def _note_beyond(self, group: int, first: int, rows: Rows) -> None:
        self.beyond[group] += (np.flatnonzero(rows["generation"]) + first).tolist()

    def adopt(self, slab_ids: Sequence[int]) -> list[int]:
        """Drops the rows of slabs that have been replaced by other slabs since the last commit. Returns the numbers of
        the first groups of these slabs.

        Args:
            slab_ids: the current id of each slab, indexed by the number of its first group.
        """
        replaced = []
        for group, slab_id in enumerate(slab_ids):
            known = self._slab_ids[group]
            if known is not None and known != signed(slab_id):
                logger.warning(
                    "%s: the slab of group %d was replaced: its rows are forgotten", self.path, group
                )
                self._clear_group(group)
                self.beyond[group].clear()
                replaced.append(group)
            self._slab_ids[group] = signed(slab_id)
        return replaced

    def begin_use(self, opens: int, epoch: int) -> None:
        """Durably records the count of openings and the epoch. Drops all rows if they belong to another epoch.

        Raises:
            DiskError: a file or the database cannot be written.
        """
        folder = self.path.parent
        what = "the epoch"
        try:
            if epoch != self.epoch:
                self.clear()
                write_epoch(folder, epoch)
            what = "the count of opens"
            write_opens(folder, opens)
        except OSError as error:
            raise DiskError(f"{folder}: {what} could not be written: {error.strerror}") from error
        self.opens, self.epoch = opens, epoch
        self.commit()

    def publish(
        self,
        slab: int,
        slots: NDArray[np.int64],
        keys: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        expiries: NDArray[np.uint64],
        tokens: NDArray[np.int32],
        used_ms: int,
        group: int = 0,
    ) -> None:
        """Enters pages of a KV group in the rows of their slots. The next `commit` makes them durable. If a slot occurs
        more than once, its last page counts."""
        rows = self.rows[slab]
        rows["key"][slots] = keys
        rows["generation"][slots] = generations
        rows["expiry"][slots] = expiries
        rows["tokens"][slots] = tokens
        rows["used"][slots] = used_ms
        rows["group"][slots] = group
        self._dirty[slab].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def restore(self, slab: int, slots: NDArray[np.int64], rows: Rows) -> None:
        """Sets the rows of these slots; the next `commit` makes them durable."""
        self.rows[slab][slots] = rows
        self._dirty[slab].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def evict(self, slab: int, slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> None:
        """Empties each of the slots whose row still has the generation given for the slot. The next `commit` makes the
        change durable.
        """
        slots = slots[self.rows[slab]["generation"][slots] == generations]
        self.rows[slab][slots] = np.zeros((), ROW)
        self._dirty[slab].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def use(self, slab: int, slots: NDArray[np.int64], used_ms: int) -> None:
        """Records when these slots were last used. A commit after `flush_uses` makes that durable."""
        self.rows[slab]["used"][slots] = used_ms
        self._used[slab].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def flush_uses(self, most_chunks: int) -> bool:
        """Makes the next `commit` also write chunks in which only the times of use have changed, at most `most_chunks`
        per slab. Returns whether that commit has any chunk to write.
        """
        for slab, used in enumerate(self._used):
            for chunk in list(used)[:most_chunks]:
                used.discard(chunk)
                self._dirty[slab].add(chunk)
        return any(self._dirty)

    def clear(self) -> None:
        """Empties every slot; the next `commit` makes that durable."""
        for group in range(len(self.rows)):
            self._clear_group(group)

    def _clear_group(self, group: int) -> None:
        rows = self.rows[group]
        self._dirty[group].update(np.unique(np.flatnonzero(rows["generation"]) // CHUNK_SLOTS).tolist())
        rows[:] = np.zeros((), ROW)

    def commit(self) -> None:
        """Makes all changes since the last commit durable, or none of them. After an error nothing is lost, and the
        call can be repeated.

        If the database turns out to be damaged, sets it aside and writes a new one from the rows in memory.

        Raises:
            FullDiskError: the file system has no space.
            DiskError: the database could not be written.
        """
        try:
            self._commit()
        except DamagedIndexError as error:
            logger.error("%s: it is set aside and made anew", error)
            self.remake()
            return
        if not self._written:
            self._written = self._named()

    def remake(self) -> None:
        """Sets the database aside and durably writes a new one from the rows in memory.

        Raises:
            FullDiskError, DiskError: see `commit`.
        """
        # Closing may fail just as the commit did. That does not matter, because everything is written again.
        with contextlib.suppress(*SQLITE_ERRORS):
            self._db.close()
        if not self._remaking:
            set_aside_index(self.path, DamagedIndexError.aside_name)
        self._remaking = True
        remove_index(self.path)  # an earlier attempt may have left a part of the new database
        for group, rows in enumerate(self.rows):
            self._stored[group].clear()
            self._gone[group].clear()
            held = np.flatnonzero(rows["generation"]) // CHUNK_SLOTS
            self._dirty[group].update(np.unique(held).tolist())
        self._written = []
        self._db = open_database(self.path, len(self.slots))
        self._commit()
        self._remaking = False
        self._written = self._named()

    def _commit(self) -> None:
        """Writes the changed chunks and the meta values in one transaction.

        Raises:
            DamagedIndexError, FullDiskError, DiskError: see `index_trouble`; nothing was committed.
        """
        counts = [
            len(stored) - len(gone) + len(dirty - stored)
            for stored, gone, dirty in zip(self._stored, self._gone, self._dirty, strict=True)
        ]
        meta: dict[str, MetaValue] = {
            **self._meta,
            "version": SCHEMA_VERSION,
            "epoch": self.epoch,
            "opens": self.opens,
            **{f"slab{group}": slab_id for group, slab_id in enumerate(self._slab_ids)},
            **{f"chunks{group}": count for group, count in enumerate(counts)},
        }
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [*meta.items(), ("digest", meta_digest(meta))]
            )
            for group, dirty in enumerate(self._dirty):
                rows = self.rows[group]
                self._db.executemany(
                    f"DELETE FROM rows{group} WHERE chunk = ?", [(chunk,) for chunk in self._gone[group]]
                )
                self._db.executemany(
                    f"INSERT OR REPLACE INTO rows{group} VALUES (?, ?)",
                    [(chunk, pack_chunk(rows, group, chunk)) for chunk in sorted(dirty)],
                )
            self._db.execute("COMMIT")
        except SQLITE_ERRORS as error:
            # The rollback may fail just as the commit did. Even then, nothing was committed.
            with contextlib.suppress(*SQLITE_ERRORS):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            room = LEAST_ROOM_BYTES + CHUNK_ROOM_BYTES * sum(len(dirty) for dirty in self._dirty)
            raise index_trouble(self.path, error, room) from error
        self._meta = meta
        for group, dirty in enumerate(self._dirty):
            self._stored[group] |= dirty
            self._stored[group] -= self._gone[group]
            self._gone[group].clear()
            self._used[group] -= dirty
            dirty.clear()

    def faults(self) -> list[str]:
        """The first few faults that SQLite finds in the database. Reads the whole database and changes nothing."""
        return database_faults(self._db)

    @property
    def in_place(self) -> bool:
        """Whether database and log are still the files to which the first commit was written. If they were deleted or
        replaced, the next opening would not find the rows that a commit writes.
        """
        return not self._written or self._named() == self._written

    def _named(self) -> list[tuple[int, int]]:
        """Device and inode of the files that have the names of database and log now; empty if one of them is
        missing.
        """
        try:
            found = [path.stat() for path in (self.path, self.path.with_name(f"{self.path.name}-wal"))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DiskError(f"{self.path}: {error.strerror}") from error
        return [(file.st_dev, file.st_ino) for file in found]

    def close(self) -> None:
        """Moves the log's content to the database, and closes the database.

        Raises:
            DiskError: the database could not be written; all commits stay durable.
        """
        try:
            self._db.close()
        except SQLITE_ERRORS as error:
            raise index_trouble(self.path, error) from error
