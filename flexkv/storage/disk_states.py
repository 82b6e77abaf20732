"""Keeps the state of each disk of a unit (lost, full, or without the requested I/O backend), and logs each change
once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flexkv.storage.base import LostDisk

logger = logging.getLogger(__name__)


class DiskStates:
    """The states of a unit's disks. Logs each change once.

    Attributes:
        lost: maps the number of each lost disk to the reason why it was taken out of service.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self.lost: dict[int, str] = {}
        self._not_taken: list[LostDisk] = []
        """Lost disks that `take_lost` has not returned yet."""
        self._notes: dict[int, str] = {}
        self._full: set[int] = set()

    def __len__(self) -> int:
        return len(self._folders)

    @property
    def alive(self) -> tuple[bool, ...]:
        """Whether each disk is in use."""
        return tuple(disk not in self.lost for disk in range(len(self)))

    @property
    def has_news(self) -> bool:
        """Whether `take_lost` would return a disk."""
        return bool(self._not_taken)

    def take_lost(self) -> tuple[LostDisk, ...]:
        """The disks that were lost since the last call."""
        lost, self._not_taken = tuple(self._not_taken), []
        return lost

    def lose(self, disk: int, reason: str) -> bool:
        """Records that a disk is taken out of service. Returns False if it was already lost."""
        if disk in self.lost:
            return False
        self.lost[disk] = reason
        folder = self._folders[disk]
        self._not_taken.append(LostDisk(disk, folder, reason))
        logger.error("disk %d (%s) was taken out, its pages are misses: %s", disk, folder, reason)
        return True

    def note_backend(self, disk: int, backend: str, note: str) -> None:
        """Records that a disk uses `backend` instead of the requested one, and why (`note`). An empty `note` means that
        the disk uses the requested one.
        """
        if note != self._notes.get(disk, ""):
            self._notes[disk] = note
            logger.warning("disk %d (%s) goes by %s: %s", disk, self._folders[disk], backend, note)

    def note_full(self, disk: int, reason: str) -> None:
        """Records why a disk accepts no new pages now; an empty `reason` means that it accepts them."""
        if disk in self.lost or bool(reason) == (disk in self._full):
            return
        if reason:
            self._full.add(disk)
            logger.warning(
                "disk %d (%s) takes no new pages: %s; what lies on it is served, and space is asked for again",
                disk,
                self._folders[disk],
                reason,
            )
        else:
            self._full.remove(disk)
            logger.warning("disk %d (%s) takes new pages again", disk, self._folders[disk])
