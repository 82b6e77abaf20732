"""Reserves disk space for a folder's index in a file. So a unit can open the folder and serve its pages even if other
programs have filled the disk.

Opening a folder takes a little space, for the count of openings and a few pages of the index's log, until the unit
closes. So the reserved space is freed before an opening and reserved again after it. If the disk is full, a reset uses
the space to write its epoch.
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
"""If the disk has less free space than SPARE_BYTES, the reserved size is reduced in steps of this many bytes."""


def free_spare(folder: Path) -> None:
    """Frees the reserved space. Raises OSError if the file system returns an error."""
    (folder / SPARE_NAME).unlink(missing_ok=True)


def with_spare(folder: Path, write: Callable[[], None]) -> None:
    """Calls `write`. If the disk is full, frees the reserved space and calls `write` a second time.

    Raises:
        OSError: raised by `write`.
    """
    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        free_spare(folder)
        write()


def take_spare(folder: Path) -> None:
    """Reserves SPARE_BYTES, or as much of that as is free on the disk. If nothing is free, reserves nothing."""
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
