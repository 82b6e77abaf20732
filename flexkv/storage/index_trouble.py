"""Classifies errors of the index's database: either the file system has trouble, which passes or which a person must
fix, or the database is damaged, and is then set aside and rebuilt.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.private_files import open_private

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The errors of a database. SQLite's message may quote a damaged schema, which Python then fails to decode."""

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_BYTES = 1 << 20
LEAST_ROOM_BYTES = 64 << 10
"""How many bytes of disk a database needs for small writes."""


class UnusableIndexError(DiskError):
    """The database must be set aside and rebuilt. Trouble in reading an undamaged one is a plain DiskError.

    Attributes:
        aside_name: the database's name once it is set aside; replaces an earlier file of this name.
    """

    aside_name: str


class DamagedIndexError(UnusableIndexError):
    """The database is damaged."""

    aside_name = "index.damaged"


class OtherVersionError(UnusableIndexError):
    """The database has another version of the format."""

    aside_name = "index.other"


class FullDiskError(DiskError):
    """The file system has no room."""


def disk_error(path: Path, error: OSError) -> DiskError:
    """Returns a DiskError for `error`, which the file at `path` has caused."""
    kind = FullDiskError if error.errno in FULL else DiskError
    return kind(f"{path}: {error.strerror}")


def index_trouble(
    path: Path, error: sqlite3.Error | UnicodeDecodeError, room_bytes: int = LEAST_ROOM_BYTES
) -> DiskError:
    """Returns the actual cause of SQLite's error about the database at `path`.

    SQLite reports trouble and damage in the same words: "attempt to write a readonly database" for a read-only file
    system and for a flipped bit. So this tries the file system itself: if the database can be read from start to end
    and a file can be written beside it, the database is damaged.

    Args:
        room_bytes: how many bytes the failed step may have needed to write.
    """
    if "locked" in str(error):
        return DiskError(f"{path}: {error}")
    try:
        _read_and_write(path, room_bytes)
    except OSError as cause:
        kind = FullDiskError if cause.errno in FULL else DiskError
        return kind(f"{path}: {error}: {cause.strerror}")
    return DamagedIndexError(f"{path}: {error}")


def _read_and_write(path: Path, room_bytes: int) -> None:
    """Reads the database and writes a file beside it. Raises the file system's own OSError."""
    if path.exists():
        with open(path, "r+b", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    probe = path.with_name("index.probe.new")  # the next start removes files with this ending
    fd = open_private(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(fd, 0, max(LEAST_ROOM_BYTES, room_bytes))
        os.fsync(fd)
    finally:
        os.close(fd)
        probe.unlink()
