"""What an error of the index's database means: trouble of the file system, which passes or which a person must mend, or
damage, after which the index is set aside and made anew."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.private_files import open_private

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The errors of a database. Its message may quote a damaged schema, whose bytes Python then fails to decode."""

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_BYTES = 1 << 20
LEAST_ROOM_BYTES = 64 << 10
"""Bytes of disk that a database needs for little work."""


class UnusableIndexError(DiskError):
    """The database must be set aside and made anew. Trouble in reading a good one is a plain DiskError.

    Attributes:
        aside_name: the database's name once it is set aside; an earlier one of this name is deleted.
    """

    aside_name: str


class DamagedIndexError(UnusableIndexError):
    """The database is not as it was written."""

    aside_name = "index.damaged"


class OtherVersionError(UnusableIndexError):
    """The database has another version of the format."""

    aside_name = "index.other"


class FullDiskError(DiskError):
    """The file system has no room."""


def disk_error(path: Path, error: OSError) -> DiskError:
    """The error of a disk for `error`, which the file at `path` has caused."""
    kind = FullDiskError if error.errno in FULL else DiskError
    return kind(f"{path}: {error.strerror}")


def index_trouble(
    path: Path, error: sqlite3.Error | UnicodeDecodeError, room_bytes: int = LEAST_ROOM_BYTES
) -> DiskError:
    """The error that stands behind SQLite's error of the database at `path`.

    SQLite has the same words for trouble and damage: "attempt to write a readonly database" for a read-only file system
    and for a flipped bit. So this tries the file system itself: if the database can be read from start to end and a
    file can be written beside it, the database is damaged.

    Args:
        room_bytes: bytes that the step which failed may have wanted to write.
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
    probe = path.with_name("index.probe.new")  # the next start removes files of this ending
    fd = open_private(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(fd, 0, max(LEAST_ROOM_BYTES, room_bytes))
        os.fsync(fd)
    finally:
        os.close(fd)
        probe.unlink()
