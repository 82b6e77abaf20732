"""Classifies errors of the index's database. If the file system is at fault, the error passes by itself, or a person
must fix it. If the database is damaged, it is set aside and rebuilt.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.private_files import open_private

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The errors that a database call may raise. SQLite's message may quote a damaged schema, which Python then fails to
decode.
"""

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_BYTES = 1 << 20
LEAST_ROOM_BYTES = 64 << 10
"""Number of bytes of disk space that a database needs for small writes."""


class UnusableIndexError(DiskError):
    """The database must be set aside and rebuilt. If a database may be undamaged but cannot be read, a plain DiskError
    is raised instead.

    Attributes:
        aside_name: the name that the database gets when it is set aside; it replaces an earlier file of this name.
    """

    aside_name: str


class DamagedIndexError(UnusableIndexError):
    """The database is damaged."""

    aside_name = "index.damaged"


class OtherVersionError(UnusableIndexError):
    """The database's format has a version that this code does not read."""

    aside_name = "index.other"


class FullDiskError(DiskError):
    """The file system has no space."""


def disk_error(path: Path, error: OSError) -> DiskError:
    """Returns a DiskError for an operating system's error about the file at `path`."""
    kind = FullDiskError if error.errno in FULL else DiskError
    return kind(f"{path}: {error.strerror}")


def index_trouble(
    path: Path, error: sqlite3.Error | UnicodeDecodeError, room_bytes: int = LEAST_ROOM_BYTES
) -> DiskError:
    """Returns an exception with the actual cause of SQLite's error about the database at `path`.

    SQLite reports a fault of the file system and a damaged database in the same words. For example, it says "attempt to
    write a readonly database" for a read-only file system and for a flipped bit. So this function tries the file system
    itself. If the database can be read from start to end and a file can be written beside it, the database counts as
    damaged.

    Args:
        room_bytes: number of bytes of disk space that the failed step may have needed.
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
    """Reads the database and writes a file beside it. Raises the file system's OSError if one of these fails."""
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
