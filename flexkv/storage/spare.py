"""Disk space that a folder reserves for its index, so that a disk that others have filled can still be opened and serve
its pages.

An opening writes little (the count of opens, a few pages of the index's log), and frees that when it closes. So the
space is freed before an opening and reserved again after it. A reset uses it to write its epoch if there is no other
space.
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
"""If a disk no longer has all of the space, less is reserved, in steps of this size."""


def free_spare(folder: Path) -> None:
    """Frees the space. Raises OSError if the file system refuses."""
    (folder / SPARE_NAME).unlink(missing_ok=True)


def with_spare(folder: Path, write: Callable[[], None]) -> None:
    """Calls `write`; if the disk is full, frees the space and calls it once more.

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
    """Reserves as much of the space as the disk has; if it has none now, the folder has none until the next time."""
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
