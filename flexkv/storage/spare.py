"""Room that a folder keeps for its index: a disk that others have filled is opened all the same, and serves its pages.

An opening writes little (the count of opens, a few pages of the index's log), and gives it back when it closes. So the
room is freed before an opening and taken again after it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flexkv.storage.index_trouble import LEAST_ROOM_BYTES
from flexkv.storage.private_files import open_private

logger = logging.getLogger(__name__)

SPARE_NAME = "spare"
SPARE_BYTES = 2 * LEAST_ROOM_BYTES


def free_spare(folder: Path) -> None:
    """Raises: OSError: the file system refuses."""
    (folder / SPARE_NAME).unlink(missing_ok=True)


def take_spare(folder: Path) -> None:
    """A disk that has no room for it now goes without until the next time."""
    path = folder / SPARE_NAME
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, SPARE_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        logger.debug("%s: %s", path, error.strerror)
