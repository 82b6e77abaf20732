"""Reads the index of a folder that no unit uses. Copies it first, because SQLite writes to a database when it opens
it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flexkv.errors import DiskError
from flexkv.storage.epoch import read_epoch
from flexkv.storage.folder import folder_at_rest
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_database import INDEX_NAME, LOG_SUFFIX
from flexkv.storage.number_file import number_if_whole

logger = logging.getLogger(__name__)


def copy_index(folder: Path, to: Path) -> int | None:
    """Copies a unit's index to the folder `to`, with the database's log, which may contain later commits. Locks the
    unit's folder only while copying.

    Returns:
        The epoch in the file `epoch` beside the index; None if the file is missing or damaged.

    Raises:
        FolderLockedError: the folder is in use.
        DiskError: there is no index, or it cannot be read.
    """
    if not (folder / INDEX_NAME).exists():
        raise DiskError("it has no index; its own unit makes one when it starts")
    with folder_at_rest(folder):
        copy_files(folder, to)
        return number_if_whole(
            read_epoch, folder, lambda fault: logger.warning("%s: the index decides", fault)
        )


def copy_files(folder: Path, to: Path) -> None:
    """Copies the index and its log, if they are files, into the folder `to`. Precondition: no unit uses the folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name in (INDEX_NAME, INDEX_NAME + LOG_SUFFIX):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


def pages_by_group(folder: Path, slots: Mapping[int, int]) -> dict[int, int]:
    """Returns the number of pages of each KV group that the folder's index lists, by the group's number. Leaves out
    groups without pages.

    Args:
        slots: number of slots of each slab, by the slab's number.

    Raises:
        DiskError: the folder is in use, or its index cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="flexkv-index-") as made:
        epoch = copy_index(folder, Path(made))
        try:
            index = SlotIndex(Path(made) / INDEX_NAME, [slots.get(slab, 0) for slab in range(1 + max(slots))])
        except DiskError as error:
            raise DiskError(str(error).replace(made, str(folder))) from error
        try:
            counts: dict[int, int] = {}
            for rows in index.rows if index.epoch >= (epoch or 0) else []:
                numbers, pages = np.unique(rows["group"][rows["generation"] != 0], return_counts=True)
                for number, count in zip(numbers.tolist(), pages.tolist(), strict=True):
                    counts[number] = counts.get(number, 0) + count
            return counts
        finally:
            index.close()
