"""Handles the files in a folder of results. It writes files atomically, names the file in an error about an unreadable
one, and lets only one process use the folder at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


class RefusedError(Exception):
    """Raised when a stage was not started; the message says why, and what to do."""


class UnreadableError(Exception):
    """Raised for a file without a usable result; the message names the file and the reason."""


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically: even after a loss of power, either the complete old file or the complete new one is
    there.
    """
    beside = path.with_name(f".{path.name}.part")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors about the content of `path` into an UnreadableError that names it.

    Such errors come from half-written files, and from files of a different version, in which a value is missing or has
    another type.
    """
    try:
        yield
    except (OSError, ValueError, SyntaxError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Locks the folder against other processes. The lock ends with this process, even if it is killed.

    Raises:
        RefusedError: another process has the lock.
    """
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusedError(
                f"another call measures with {folder}: wait for its end, or name another --out"
            ) from error
        yield
