"""How much of each folder one unit may fill, where nobody says it in bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

from flexkv.config import DiskConfig
from flexkv.config.sizes import format_size
from flexkv.errors import DiskError
from flexkv.observe import get_logger
from flexkv.storage.base import DiskGroup, DiskIdentity
from flexkv.storage.folder import held_bytes, unit_folder

logger = get_logger(__name__)

EVEN_ROOM = 0.9
"""Folders whose rooms differ by less are of one kind of disk: what the least of them costs the others is small."""


def bytes_per_folder(disk: DiskConfig, units: int, identity: DiskIdentity, group: DiskGroup) -> int:
    """What one of `units` units on this node may fill in each folder: the same in all, because blocks are striped over
    them. `disk.bytes_per_folder`, or else a share of what is free.

    What lies in a folder already counts as free, so that the size does not shrink with every start; but what other
    units hold there cannot be had. Makes folders that are not there. A folder that cannot be used has no say: whoever
    opens them names it and does without.

    Raises:
        DiskError: none can be used.
    """
    if disk.bytes_per_folder is not None:
        return disk.bytes_per_folder
    rooms: dict[Path, int] = {}
    reasons = []
    for root in map(Path, disk.folders):
        try:
            root.mkdir(parents=True, exist_ok=True)
            free, own = shutil.disk_usage(root).free, held_bytes(unit_folder(root, identity, [group]))
            others = held_bytes(root) - own
        except OSError as error:
            reasons.append(f"{root}: {error.strerror}")
            continue
        rooms[root] = share_bytes(free, own, others, disk.space_share, units)
    if not rooms:
        allowed = "disk.folders takes folders that are there or can be made"
        raise DiskError(f"no disk can be used: {'; '.join(reasons)}; {allowed}")
    least, most = min(rooms, key=rooms.__getitem__), max(rooms.values())
    if rooms[least] < EVEN_ROOM * most:
        logger.info(
            "%s has room for %s by disk.space_share, others for up to %s: the least decides for all, as blocks are "
            "striped over them; disk.bytes_per_folder sets it",
            least,
            format_size(rooms[least]),
            format_size(most),
        )
    return rooms[least]


def share_bytes(free: int, own: int, others: int, share: float, units: int) -> int:
    """Of a folder with `free` bytes left, in which a unit holds `own` and other units hold `others`: what the unit may
    fill, never more than it can have."""
    fair = share * (free + own + others) / units
    return int(min(fair, max(own, share * (free + own))))
