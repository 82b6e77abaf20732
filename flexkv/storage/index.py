"""The index of one disk: which slot holds which block, in an SQLite database beside the slabs.

The rows of a group lie in chunks of fixed size, one to a database page, and whole in memory: an update is a few array
writes and the chunks it touched, opening is one scan, and no Python object stands for a row.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import DiskError
from flexkv.storage.folder import MOST_EPOCH, write_epoch
from flexkv.storage.generations import MOST_OPENS

logger = logging.getLogger(__name__)

ROW = np.dtype(
    [
        ("key", "u1", 16),
        ("generation", "<u8"),
        ("expiry", "<u8"),
        ("used", "<u8"),
        ("tokens", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""One slot. generation: 0 for an empty slot. used: unix milliseconds of the last use, roughly."""

Rows = NDArray[np.void]
"""dtype ROW, shape [slots of the group]."""

CHUNK_SLOTS = 80
"""Rows of a chunk: 3,840 bytes, which with SQLite's own fit one 4 KiB page."""

SCHEMA_VERSION = 1

BUSY_S = 5.0
"""How long SQLite waits for a lock before it says so."""


class DamagedIndexError(DiskError):
    """The database is no database any more. Trouble in reading a good one is a plain DiskError."""


def _trouble(path: Path, error: sqlite3.Error) -> DiskError:
    # A lock, a full disk, an I/O error: the database may be as good as ever.
    if isinstance(error, sqlite3.OperationalError):
        return DiskError(f"{path}: {error}")
    return DamagedIndexError(f"{path}: {error}")


class SlotIndex:
    """The open database of one disk. Not thread-safe: one thread at a time.

    Attributes:
        rows: of each group; what the database holds after `commit`.
        epoch: of the weights.
        opens: how often the tier was opened on this disk.
        is_new: there was none.

    Args:
        slots: of each group.

    Raises:
        DamagedIndexError: the file is no database, or holds what no version of ours wrote.
        DiskError: it cannot be opened or read now; nothing was changed.
    """

    def __init__(self, path: Path, slots: Sequence[int]) -> None:
        self.path = path
        self.rows: list[Rows] = [np.zeros(_padded(count), ROW) for count in slots]
        self.slots = list(slots)
        self._dirty: list[set[int]] = [set() for _ in slots]
        self._used: list[set[int]] = [set() for _ in slots]
        self.epoch = 0
        self.opens = 0
        self.is_new = False
        self._slab_ids: list[int | None] = []
        self._written: list[tuple[int, int]] = []
        try:
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise _trouble(path, error) from error
        try:
            self._start()
            self._load()
        except sqlite3.Error as error:
            self._db.close()
            raise _trouble(path, error) from error
        except BaseException:
            self._db.close()
            raise

    def _start(self) -> None:
        # Exclusive: no shared-memory file, no lock at each commit; the folder's lock keeps others out.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID"
        )
        for group in range(len(self.slots)):
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS rows{group} (chunk INTEGER PRIMARY KEY, content BLOB NOT NULL)"
            )

    def _load(self) -> None:
        meta = dict(self._db.execute("SELECT name, value FROM meta"))
        self.is_new = not meta
        version = meta.get("version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise DiskError(f"{self.path}: index format {version}; this version reads {SCHEMA_VERSION}")
        self.epoch = self._number(meta, "epoch", MOST_EPOCH)
        self.opens = self._number(meta, "opens", MOST_OPENS - 1)
        self._slab_ids = [meta.get(f"slab{group}") for group in range(len(self.slots))]
        for group, rows in enumerate(self.rows):
            chunks = len(rows) // CHUNK_SLOTS
            self._db.execute(f"DELETE FROM rows{group} WHERE chunk < 0 OR chunk >= ?", (chunks,))
            for chunk, content in self._db.execute(f"SELECT chunk, content FROM rows{group}"):
                # SQLite keeps any type in any column.
                if not isinstance(content, bytes):
                    raise DamagedIndexError(f"{self.path}: chunk {chunk} of group {group} is {content!r:.40}")
                if len(content) != CHUNK_SLOTS * ROW.itemsize:
                    raise DamagedIndexError(
                        f"{self.path}: chunk {chunk} of group {group} has {len(content)} bytes"
                    )
                rows[chunk * CHUNK_SLOTS : (chunk + 1) * CHUNK_SLOTS] = np.frombuffer(content, ROW)
            if rows["generation"][self.slots[group] :].any():  # the slab was larger
                rows[self.slots[group] :] = np.zeros((), ROW)
                self._dirty[group].add(self.slots[group] // CHUNK_SLOTS)

    def _number(self, meta: dict[str, object], name: str, most: int) -> int:
        """
        Raises:
            DamagedIndexError: it is none in [0, most].
        """
        value = meta.get(name, 0)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise DamagedIndexError(f"{self.path}: {name} is {value!r:.40}; allowed is [0, {most}]")
        return value

    def adopt(self, slab_ids: Sequence[int]) -> None:
        """Forgets the rows of groups whose slab is another one than they were written for."""
        for group, slab_id in enumerate(slab_ids):
            known = self._slab_ids[group]
            if known is not None and known != _signed(slab_id):
                logger.warning(
                    "%s: the slab of group %d is another one: its rows are forgotten", self.path, group
                )
                self._clear_group(group)
            self._slab_ids[group] = _signed(slab_id)

    def begin_use(self, opens: int, epoch: int) -> None:
        """Writes down, durably, that the tier was opened once more; rows of an older epoch are forgotten.

        Raises:
            DiskError: it cannot be written.
        """
        if epoch != self.epoch:
            self.clear()
            try:
                write_epoch(self.path.parent, epoch)
            except OSError as error:
                raise DiskError(
                    f"{self.path.parent}: the epoch could not be written: {error.strerror}"
                ) from error
        self.opens, self.epoch = opens, epoch
        self.commit()

    def publish(
        self,
        group: int,
        slots: NDArray[np.int64],
        keys: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        expiries: NDArray[np.uint64],
        tokens: NDArray[np.int32],
        used_ms: int,
    ) -> None:
        """Slots that hold these pages from the next `commit` on; a slot named twice holds the last."""
        rows = self.rows[group]
        rows["key"][slots] = keys
        rows["generation"][slots] = generations
        rows["expiry"][slots] = expiries
        rows["tokens"][slots] = tokens
        rows["used"][slots] = used_ms
        self._dirty[group].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def restore(self, group: int, slots: NDArray[np.int64], rows: Rows) -> None:
        """Slots that hold these rows from the next `commit` on."""
        self.rows[group][slots] = rows
        self._dirty[group].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def evict(self, group: int, slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> None:
        """Empties slots, where they still hold these generations."""
        slots = slots[self.rows[group]["generation"][slots] == generations]
        self.rows[group][slots] = np.zeros((), ROW)
        self._dirty[group].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def use(self, group: int, slots: NDArray[np.int64], used_ms: int) -> None:
        """Notes a use; written by a later `flush_uses`."""
        self.rows[group]["used"][slots] = used_ms
        self._used[group].update(np.unique(slots // CHUNK_SLOTS).tolist())

    def flush_uses(self, most_chunks: int) -> bool:
        """Puts up to that many chunks that only saw uses into the next `commit`; whether there are any."""
        for group, used in enumerate(self._used):
            for chunk in list(used)[:most_chunks]:
                used.discard(chunk)
                self._dirty[group].add(chunk)
        return any(self._dirty)

    def clear(self) -> None:
        """Empties every slot."""
        for group in range(len(self.rows)):
            self._clear_group(group)

    def _clear_group(self, group: int) -> None:
        rows = self.rows[group]
        self._dirty[group].update(np.unique(np.flatnonzero(rows["generation"]) // CHUNK_SLOTS).tolist())
        rows[:] = np.zeros((), ROW)

    def commit(self) -> None:
        """Makes everything since the last one durable, all or nothing. On an error nothing is lost: call again.

        Raises:
            DiskError: the database could not be written.
        """
        meta: list[tuple[str, int | None]] = [
            ("version", SCHEMA_VERSION),
            ("epoch", self.epoch),
            ("opens", self.opens),
        ]
        meta += [(f"slab{group}", slab_id) for group, slab_id in enumerate(self._slab_ids)]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)
            for group, dirty in enumerate(self._dirty):
                rows = self.rows[group]
                self._db.executemany(
                    f"INSERT OR REPLACE INTO rows{group} VALUES (?, ?)",
                    [(c, rows[c * CHUNK_SLOTS : (c + 1) * CHUNK_SLOTS].tobytes()) for c in sorted(dirty)],
                )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _trouble(self.path, error) from error
        for group, dirty in enumerate(self._dirty):
            self._used[group] -= dirty
            dirty.clear()
        if not self._written:
            self._written = self._named()

    @property
    def in_place(self) -> bool:
        """Whether database and log are still the files that the first commit was written to: what goes to others, or to
        none that has a name, nobody will find again."""
        return not self._written or self._named() == self._written

    def _named(self) -> list[tuple[int, int]]:
        """Device and inode of database and log; empty if one of them is gone."""
        try:
            found = [path.stat() for path in (self.path, self.path.with_name(f"{self.path.name}-wal"))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DiskError(f"{self.path}: {error.strerror}") from error
        return [(file.st_dev, file.st_ino) for file in found]

    def close(self) -> None:
        """Folds the log into the database and lets it go.

        Raises:
            DiskError: it could not be written; what was committed is safe.
        """
        try:
            self._db.close()
        except sqlite3.Error as error:
            raise _trouble(self.path, error) from error


def _padded(slots: int) -> int:
    return -(-slots // CHUNK_SLOTS) * CHUNK_SLOTS


def _signed(number: int) -> int:
    """SQLite's integers are signed."""
    return number - (1 << 64) if number >= 1 << 63 else number
