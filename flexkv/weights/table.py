"""A node's table of weights files. It contains each file's digest, and the state in which the file was read. If another
process on the node has read a file and the file has not changed, a process takes its digest from the table.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flexkv.observe import get_logger
from flexkv.storage.private_files import make_folders, open_private
from flexkv.weights.digest import StoppedError
from flexkv.weights.files import FileState

logger = get_logger(__name__)

TABLE_NAME = "weights.json"
LOCK_NAME = "weights.lock"
"""Name of the lock file for changes of the table. The locks for reading weights have different names; see
`lock_name`."""

VERSION = 1

MOST_FILES = 4096
"""Maximum number of rows of the table; the oldest row is dropped first."""

MOST_TABLE_BYTES = 16 << 20

LOCK_RETRY_S = 0.1

TABLE_LOCK_WAIT_S = 10.0
"""Seconds that `enter` waits for the table's lock. Other processes hold it only for milliseconds."""

YOUNG_NS = 2_000_000_000
"""A file is entered in the table only if it has not changed for this many nanoseconds. On a file system with a coarse
clock, a further change could otherwise get the same time as the last one.
"""

Known = Mapping[str, tuple[FileState, str]]
"""Maps a file's real path to the state in which the file was read, and to the file's digest."""


class WeightsTable:
    """The table in one folder.

    Args:
        folder: path of the folder, which is created when the first lock in it is taken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / TABLE_NAME

    def known(self, files: Mapping[Path, FileState]) -> dict[Path, str]:
        """Returns the digests of those files that are in the table and still have the state in which they were read."""
        table = self._read()
        found = {path: table.get(os.path.realpath(path)) for path in files}
        return {
            path: row[1] for path, row in found.items() if row is not None and files[path].is_known_as(row[0])
        }

    def __len__(self) -> int:
        """Returns the number of files in the table."""
        return len(self._read())

    def enter(self, path: Path, state: FileState, digest: str) -> None:
        """Adds a file that was just read to the table. If the table cannot be written, logs a warning; the next start
        then reads the file again."""
        if state.changed_ns > time.time_ns() - YOUNG_NS:
            return
        with self._lock(LOCK_NAME, TABLE_LOCK_WAIT_S, threading.Event()) as locked:
            if locked:
                self._enter(path, state, digest)
            else:
                logger.warning("%s is in use; the next start reads %s again", self.path, path)

    def _enter(self, path: Path, state: FileState, digest: str) -> None:
        table = dict(self._read())
        name = os.path.realpath(path)
        table.pop(name, None)
        table[name] = (state, digest)
        rows = dict(list(table.items())[-MOST_FILES:])
        new = self.path.with_name(f"{TABLE_NAME}.new")
        try:
            descriptor = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(descriptor, "w") as file:
                json.dump({"version": VERSION, "files": rows}, file)
                file.flush()
                os.fsync(descriptor)
            os.replace(new, self.path)
        except OSError as error:
            logger.warning("%s: %s; the next start reads %s again", self.path, error.strerror, path)

    def _read(self) -> Known:
        """Returns the table's rows. Empty if there is no table or it is damaged; the weights are then read again."""
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(MOST_TABLE_BYTES))
        except (OSError, ValueError):
            return {}
        rows = (
            content.get("files") if isinstance(content, dict) and content.get("version") == VERSION else None
        )
        if not isinstance(rows, dict):
            return {}
        return {name: row for name, found in rows.items() if (row := _row(found)) is not None}

    @contextmanager
    def reading(self, files: Iterable[Path], wait_s: float, stop: threading.Event) -> Iterator[None]:
        """A context that holds the lock for reading these files. Other processes wait for the lock before they read the
        same files. Processes that read different files do not wait. The kernel frees the lock when the process exits.
        If the folder cannot be written, or another process still holds the lock after `wait_s` seconds, the context is
        entered without the lock.

        Raises:
            StoppedError: `stop` was set.
        """
        name = lock_name(files)
        with self._lock(name, wait_s, stop) as locked:
            if not locked:
                logger.warning(
                    "another process has been reading the same weights for %.0f s (%s); they are read here too",
                    wait_s,
                    self.folder / name,
                )
            yield

    @contextmanager
    def _lock(self, name: str, wait_s: float, stop: threading.Event) -> Iterator[bool]:
        """A context that waits up to `wait_s` seconds for a lock. Yields True if this process has the lock or locking
        is impossible in the folder; False if another process holds the lock.

        Raises:
            StoppedError: `stop` was set.
        """
        try:
            make_folders(self.folder)
            descriptor = open_private(self.folder / name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if name != LOCK_NAME:  # `_enter` logs that the table cannot be written
                logger.warning("%s: %s; there is no lock", self.folder / name, error.strerror)
            yield True
            return
        try:
            yield self._wait(descriptor, time.monotonic() + wait_s, stop)
        finally:
            os.close(descriptor)

    def _wait(self, descriptor: int, ends_s: float, stop: threading.Event) -> bool:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    logger.warning("%s: %s; there is no lock", self.folder, error.strerror)
                    return True
            else:
                return True
            if stop.wait(LOCK_RETRY_S):
                raise StoppedError("the engine ends")
            if time.monotonic() >= ends_s:
                return False


def lock_name(files: Iterable[Path]) -> str:
    """Returns the name of the lock file for reading these files; it is the same in every process that reads the same
    files.
    """
    names = sorted(os.fsencode(os.path.realpath(file)) for file in files)
    digest = hashlib.sha256(b"".join(len(name).to_bytes(8, "little") + name for name in names))
    return f"weights-{digest.hexdigest()[:16]}.lock"


def _row(found: Any) -> tuple[FileState, str] | None:
    with suppress(TypeError, ValueError):
        state, digest = found
        numbers = [int(number) for number in state]
        if len(bytes.fromhex(digest)) == 32:
            return FileState(*numbers), digest
    return None
