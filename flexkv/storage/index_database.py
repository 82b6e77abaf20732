"""Opens, checks, renames and deletes the SQLite database in which an index is stored."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from flexkv.storage.index_trouble import SQLITE_ERRORS, disk_error, index_trouble
from flexkv.storage.private_files import open_private

INDEX_NAME = "index.sqlite"
LOG_SUFFIX = "-wal"

BUSY_S = 5.0
"""Number of seconds that SQLite waits for another process's lock before it raises an error."""


def open_database(path: Path, groups: int) -> sqlite3.Connection:
    """Opens or creates the database, with a table of chunks for each group. Precondition: the caller holds the folder's
    lock.

    Raises:
        DamagedIndexError: the file is damaged, or not a database.
        DiskError: the file system returns an error, or another process has a lock; nothing was changed.
    """
    try:
        # SQLite would take the file's mode from the umask. It gives the log the same mode as the database.
        if not path.exists():
            os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    except OSError as error:
        raise disk_error(path, error) from error
    try:
        database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except SQLITE_ERRORS as error:
        raise index_trouble(path, error) from error
    try:
        # Exclusive mode needs no shared-memory file and no lock at each commit. The folder's lock keeps other processes
        # away.
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        # If the database cannot be written, this write fails now, instead of the first commit later.
        database.execute("BEGIN IMMEDIATE")
        database.execute(
            "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID"
        )
        for group in range(groups):
            database.execute(
                f"CREATE TABLE IF NOT EXISTS rows{group} (chunk INTEGER PRIMARY KEY, content BLOB NOT NULL)"
            )
        database.execute("COMMIT")
    except SQLITE_ERRORS as error:
        database.close()
        raise index_trouble(path, error) from error
    return database


def odd_file(path: Path) -> str:
    """Returns a text that names the database or the log if one of them exists and is not a regular file; otherwise an
    empty text. A pipe in the file's place must not be opened, because opening it would wait.

    Raises:
        OSError: the folder cannot be read.
    """
    for name in (path.name, path.name + LOG_SUFFIX):
        place = path.with_name(name)
        if place.exists() and not place.is_file():
            return f"{name} is no file"
    return ""


def database_faults(database: sqlite3.Connection) -> list[str]:
    """The first few faults that SQLite finds in the database; empty if there are none. Reads the whole database and
    changes nothing.
    """
    try:
        found = [line for (text,) in database.execute("PRAGMA quick_check(5)") for line in text.splitlines()]
        # A database that refuses writes would pass this check, so this function also writes to the database.
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE meta SET value = value")
        database.execute("ROLLBACK")
    except SQLITE_ERRORS as error:
        found = [str(error)]
    return [] if found == ["ok"] else found


def set_aside_index(path: Path, aside_name: str) -> None:
    """Renames an index and its log, so that a person can inspect them and a new index can have their names.

    Raises:
        DiskError: the file system returns an error.
    """
    aside = path.with_name(aside_name)
    try:
        for suffix in ("", LOG_SUFFIX):
            old, new = (file.with_name(file.name + suffix) for file in (path, aside))
            new.unlink(missing_ok=True)
            if old.exists():
                old.replace(new)
    except OSError as error:
        raise disk_error(path, error) from error


def remove_index(path: Path) -> None:
    """Deletes an index and its log. Raises DiskError if the file system returns an error."""
    try:
        for suffix in ("", LOG_SUFFIX):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from error
