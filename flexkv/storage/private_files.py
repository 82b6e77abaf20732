"""Opens files and creates folders. Only the owner may read new files and enter new folders, because KV reveals the text
from which it was computed. Files are opened for reading without waiting, even if a pipe is in a file's place.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
FOLDER_MODE = 0o700
OTHERS = 0o077
"""The permission bits of a file's group and of everybody else."""


def open_private(path: Path, flags: int) -> int:
    """Opens a file. If `flags` allow creating it, only this user may access the new file, whatever the umask.

    Raises:
        OSError: see `os.open`.
    """
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def open_at_once(path: str, flags: int) -> int:
    """An `opener` for `open`, for files to be read. If a pipe is in the file's place, opening it does not wait for a
    writer. Reading the pipe then gives no bytes, or None while it has a writer.

    Raises:
        OSError: see `os.open`.
    """
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def make_folders(folder: Path) -> None:
    """Creates a folder, and missing folders above it, so that only this user may access them. Does not change existing
    folders.

    Raises:
        OSError: see `os.mkdir`.
    """
    missing = []
    at = folder
    while not os.path.lexists(at) and at != at.parent:
        missing.append(at)
        at = at.parent
    for path in reversed(missing):
        path.mkdir(FOLDER_MODE, exist_ok=True)
    if not folder.is_dir():
        folder.mkdir(FOLDER_MODE)  # raises the system's error, because this path or one above is a file


def keep_private(folder: Path) -> None:
    """Removes other users' permissions on a folder and on the files in it. Files of another user are only logged,
    because that user shares the folder on purpose.

    Raises:
        OSError: the file system returns an error.
    """
    foreign = []
    for path in (folder, *folder.iterdir()):
        try:
            found = path.lstat()
        except FileNotFoundError:  # SQLite creates and deletes files beside the index
            continue
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & OTHERS:
            continue
        if found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
        else:
            foreign.append(path.name)
    if foreign:
        logger.warning(
            "%s: %s can be read by other users and belong to another one, who can change that",
            folder,
            ", ".join(foreign),
        )
