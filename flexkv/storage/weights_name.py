"""Records the weights with which a folder's pages were computed. A file beside the index contains the name of the
weights, which is a 32-byte digest of their whole content, and the epoch of these pages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.observe import NamedThread
from flexkv.storage.durable_line import line_digest, write_line
from flexkv.storage.folder import sync_folder
from flexkv.storage.private_files import open_at_once

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "weights"

LINE = re.compile(r"([0-9a-f]{64}) ([0-9]{1,10}) ([0-9a-f]{16})\n")
MOST_BYTES = 128


def write_weights(folder: Path, weights: bytes, epoch: int) -> None:
    """Durably records that the pages of this epoch were computed with these weights.

    Raises:
        OSError: the file could not be written.
    """
    write_line(folder / WEIGHTS_NAME, f"{weights.hex()} {epoch}")


def read_weights(folder: Path) -> tuple[bytes, int] | None:
    """The last recorded name of the weights, and the epoch. None if the file is missing, damaged or unreadable. The
    weights are then unknown, and the folder's pages count as computed with different weights.
    """
    try:
        with open(folder / WEIGHTS_NAME, "rb", opener=open_at_once) as file:
            text = (file.read(MOST_BYTES) or b"").decode("ascii", "replace")
    except OSError:
        return None
    line = LINE.fullmatch(text)
    if line is None or line_digest(f"{line[1]} {line[2]}") != line[3]:
        return None
    return bytes.fromhex(line[1]), int(line[2])


class NamedDisks:
    """Keeps track of the weights with which the pages on each disk of a unit were computed. Only the manager's thread
    calls it.
    """

    def __init__(self) -> None:
        self._folders: dict[int, Path] = {}
        self._named: dict[int, tuple[bytes, int] | None] = {}
        self._with_pages: set[int] = set()
        """The disks that held pages of the current epoch at start."""
        self._thread: NamedThread | None = None

    def begin(self, disk: int, folder: Path, has_pages: bool) -> None:
        """Begins to use a disk. If it has no pages, removes the recorded name first, so that the name does not apply to
        pages that are written before the next name is durable.

        Raises:
            DiskError: the name could not be removed, so the disk must not be used.
        """
        if not has_pages:
            _forget(folder)
        self._folders[disk] = folder
        self._named[disk] = read_weights(folder)
        if has_pages:
            self._with_pages.add(disk)

    def begin_epoch(self) -> None:
        """Begins a new epoch. Pages that were on disk at start are no longer served in it."""
        self._with_pages.clear()

    def strange(self, weights: bytes, epoch: int) -> tuple[int, ...]:
        """The disks with pages that may have been computed with different weights, or in another epoch."""
        return tuple(sorted(disk for disk in self._with_pages if self._named[disk] != (weights, epoch)))

    def name(self, weights: bytes, epoch: int) -> None:
        """Writes the name to the disks that lack it. A separate thread does this, because a disk may hang and must not
        delay the caller.
        """
        said = (weights, epoch)
        folders = [folder for disk, folder in self._folders.items() if self._named[disk] != said]
        self._named = dict.fromkeys(self._named, said)
        if folders:
            self._thread = NamedThread("flexkv-naming", _write_all, (folders, weights, epoch))
            self._thread.start()

    def finish(self, wait_s: float) -> None:
        """Waits up to `wait_s` seconds for the name to be written."""
        if self._thread is not None:
            self._thread.join(wait_s)


def _forget(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    try:
        path.unlink()
        sync_folder(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskError(f"{path} could not be removed: {error.strerror}") from error


def _write_all(folders: Sequence[Path], weights: bytes, epoch: int) -> None:
    for folder in folders:
        try:
            write_weights(folder, weights, epoch)
        except OSError as error:
            logger.warning(
                "%s: the name of the weights could not be written: %s; the next start computes its pages again",
                folder,
                error.strerror,
            )
