"""What a node knows of weights files: their digests, and the states that they had. A file that has not changed since is
not read again, by whichever process of the node asks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flexkv.observe import get_logger
from flexkv.storage.private_files import make_folders, open_private
from flexkv.weights.digest import DigestError, StoppedError
from flexkv.weights.files import FileState

logger = get_logger(__name__)

TABLE_NAME = "weights.json"
LOCK_NAME = "weights.lock"
VERSION = 1

MOST_FILES = 4096
"""Most rows of the table; what was entered longest ago goes first."""

MOST_TABLE_BYTES = 16 << 20

LOCK_RETRY_S = 0.1

YOUNG_NS = 2_000_000_000
"""A file that changed so shortly before it was read is not entered: a file system whose clock goes in large steps would
give the next change the same time."""

Known = Mapping[str, tuple[FileState, str]]
"""By a file's real path, the state that it had and its digest."""


class WeightsTable:
    """The table in one folder.

    Args:
        folder: made when something is entered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / TABLE_NAME

    def known(self, files: Mapping[Path, FileState]) -> dict[Path, str]:
        """Digests of those of the files that have the state in which they were read."""
        table = self._read()
        found = {path: table.get(os.path.realpath(path)) for path in files}
        return {path: row[1] for path, row in found.items() if row is not None and row[0] == files[path]}

    def __len__(self) -> int:
        """How many files it names."""
        return len(self._read())

    def enter(self, path: Path, state: FileState, digest: str) -> None:
        """Enters a file that was read just now. By whoever has the lock. A table that cannot be written costs the next
        start the reading."""
        if state.changed_ns > time.time_ns() - YOUNG_NS:
            return
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
        """What is there; nothing where it is damaged, which costs the reading alone."""
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
    def lock(self, wait_s: float, stop: threading.Event) -> Iterator[None]:
        """Keeps other processes from reading the same files meanwhile. The kernel ends it with the process. Where the
        folder cannot be written, there is nothing to wait for, and several may read.

        Raises:
            DigestError: another process has had it for `wait_s` seconds.
            StoppedError: `stop` was set.
        """
        try:
            make_folders(self.folder)
            descriptor = open_private(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            logger.warning("%s: %s; the weights are read without a lock", self.folder, error.strerror)
            yield
            return
        try:
            self._wait(descriptor, time.monotonic() + wait_s, wait_s, stop)
            yield
        finally:
            os.close(descriptor)

    def _wait(self, descriptor: int, ends_s: float, wait_s: float, stop: threading.Event) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    logger.warning("%s: %s; the weights are read without a lock", self.folder, error.strerror)
                    return
            if stop.wait(LOCK_RETRY_S):
                raise StoppedError("the engine ends")
            if time.monotonic() >= ends_s:
                raise DigestError(
                    f"another process has been reading weights for {wait_s:.0f} s ({self.folder / LOCK_NAME})"
                )


def _row(found: Any) -> tuple[FileState, str] | None:
    with suppress(TypeError, ValueError):
        state, digest = found
        numbers = [int(number) for number in state]
        if len(bytes.fromhex(digest)) == 32:
            return FileState(*numbers), digest
    return None
