"""Room that a folder keeps for its index: a disk that others have filled is opened all the same, and serves its pages.

An opening writes little (the count of opens, a few pages of the index's log), and gives it back when it closes. So the
room is freed before an opening and taken again after it. A reset writes its epoch in it where there is no other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from flexkv.storage.index_trouble import FULL, LEAST_ROOM_BYTES
from flexkv.storage.private_files import open_private

logger = logging.getLogger(__name__)

SPARE_NAME = "spare"
SPARE_BYTES = 2 * LEAST_ROOM_BYTES
SPARE_STEP_BYTES = SPARE_BYTES // 8
"""By so much less the room is asked for where a disk does not have all of it any more."""


def free_spare(folder: Path) -> None:
    """Raises: OSError: the file system refuses."""
    (folder / SPARE_NAME).unlink(missing_ok=True)


def with_spare(folder: Path, write: Callable[[], None]) -> None:
    """Calls `write`, and where the disk is full once more in the room that was kept.

    Raises:
        OSError: as `write`.
    """
    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        free_spare(folder)
        write()


def take_spare(folder: Path) -> None:
    """Takes as much of the room as there is; a disk that has none now goes without until the next time."""
    path = folder / SPARE_NAME
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT)
        try:
            _allocate(fd)
        finally:
            os.close(fd)
    except OSError as error:
        logger.debug("%s: %s", path, error.strerror)


def _allocate(fd: int) -> None:
    for size in range(SPARE_BYTES, 0, -SPARE_STEP_BYTES):
        try:
            return os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in FULL or size == SPARE_STEP_BYTES:
                raise
