"""How much of each folder one unit may fill, and which folders cannot be used with the settings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from flexkv.config import DiskConfig, FlexKVConfig
from flexkv.config.sizes import format_size
from flexkv.errors import DiskError
from flexkv.observe import get_logger
from flexkv.storage.base import DiskGroup, DiskIdentity
from flexkv.storage.folder import held_bytes, unit_folder
from flexkv.storage.header import slot_bytes_of_all
from flexkv.storage.private_files import make_folders

logger = get_logger(__name__)

EVEN_ROOM = 0.9
"""Every folder gets the smallest share. If that is less than this part of the largest, the log says so.
"""

BESIDE_PART = 64
"""An index takes at most one byte per this many bytes of its slabs: for a slot of 8 KiB, 51 bytes each in database and
log.
"""

BESIDE_BYTES = 16 << 20
"""Headers and their copies, the log of an index while it is small, and the spare room beside it."""

SMALL_PART = 2
"""On a small file system (such as a test's), at most 1/SMALL_PART of the bytes is reserved for headers and index."""

OwnBytes = Callable[[Path], int]
"""Returns how many bytes under a folder of `disk.folders` a unit may overwrite, which are those that it holds itself.
"""


WholeSlots = Callable[[int], int]
"""Returns how many of the bytes that a unit may fill in a folder its slabs take: those of whole slots."""


def own_bytes(identity: DiskIdentity, *groups: DiskGroup) -> OwnBytes:
    """Counts the slabs of the unit with these KV groups, but not the files beside them, which stay."""
    return lambda root: held_bytes(unit_folder(root, identity, groups), "*.slab")


def whole_slots(*groups: DiskGroup) -> WholeSlots:
    """Rounds down to whole slots of a unit with these KV groups."""
    slot = slot_bytes_of_all(groups)
    return lambda asked: asked // slot * slot


def bytes_per_folder(disk: DiskConfig, units: int, own: OwnBytes) -> int:
    """How many bytes one of `units` units on this node may fill in each folder: the same in all, because blocks are
    striped over them. This is `disk.bytes_per_folder`, or else a share of the free space, divided among the folders of
    one file system.

    Bytes that flexkv already holds in a folder count as free, so that the size does not shrink with every start; but
    the unit cannot have those of other units. Creates missing folders. Ignores a folder that cannot be used: the
    opening names it and works without it.

    Raises:
        DiskError: no folder can be used.
    """
    if disk.bytes_per_folder is not None:
        return disk.bytes_per_folder
    devices: dict[Path, int] = {}
    ours: dict[Path, int] = {}
    held: dict[Path, int] = {}
    free: dict[Path, int] = {}
    reasons = []
    for root in map(Path, disk.folders):
        try:
            make_folders(root)
            ours[root], held[root] = own(root), held_bytes(root)
            free[root] = shutil.disk_usage(root).free
            devices[root] = device_of(root)
        except OSError as error:
            reasons.append(f"{root}: {error.strerror}")
    if not devices:
        allowed = "disk.folders takes folders that are there or can be made"
        raise DiskError(f"no disk can be used: {'; '.join(reasons)}; {allowed}")
    rooms: dict[Path, int] = {}
    for roots in by_file_system(devices):
        mine = sum(ours[root] for root in roots)
        others = sum(held[root] for root in roots) - mine
        room = share_bytes(free[roots[0]], mine, others, disk.space_share, units) // len(roots)
        rooms |= dict.fromkeys(roots, room)
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
    """How many bytes a unit may fill of a file system with `free` bytes left, in which its slabs hold `own` and other
    units hold `others`; never more than it can have."""
    total = free + own + others
    fair = min(share * total, total - room_beside(total)) / units
    return int(min(fair, max(own, share * (free + own)), room_for_slabs(free, own)))


def room_for_slabs(free: int, own: int) -> int:
    """How many bytes slabs that hold `own` bytes may have on a file system with `free` bytes left, if headers and index
    are to have their room, too; at least what the slabs already have.
    """
    return max(own, free + own - room_beside(free + own))


def room_beside(total: int) -> int:
    """The most bytes that headers and index need if they share `total` bytes with slabs."""
    return total // BESIDE_PART + min(BESIDE_BYTES, total // SMALL_PART)


def device_of(root: Path) -> int:
    """The number of the file system on which a folder lies or will lie.

    Raises:
        OSError: the file system cannot be asked.
    """
    return nearest_there(root).stat().st_dev


def by_file_system(devices: Mapping[Path, int]) -> list[list[Path]]:
    """Groups folders by their file system, in the order of each group's first folder.

    Args:
        devices: `device_of` each folder.
    """
    groups: dict[int, list[Path]] = {}
    for root, device in devices.items():
        groups.setdefault(device, []).append(root)
    return list(groups.values())


def folder_faults(
    config: FlexKVConfig, own: OwnBytes, whole: WholeSlots = lambda asked: asked
) -> dict[str, str]:
    """Returns which of `disk.folders` cannot be used with the settings, and why. Creates nothing.

    The engine works without such a disk, as it does without one that fails later; it does not start if none is left.

    Args:
        whole: without it, slabs are taken to fill all of `disk.bytes_per_folder`.
    """
    faults: dict[str, str] = {}
    devices: dict[Path, int] = {}
    ours: dict[Path, int] = {}
    free: dict[Path, int] = {}
    for folder in config.disk.folders:
        root = Path(folder)
        there = nearest_there(root)
        try:
            fault = _access_fault(root, there)
            if not fault:
                free[root], ours[root] = shutil.disk_usage(there).free, own(root)
                devices[root] = device_of(root)
                if not free[root] + ours[root]:
                    fault = f"no byte is free on the file system of {there}"
        except OSError as error:
            fault = f"{there}: {error.strerror}"
        if fault:
            faults[folder] = fault
            devices.pop(root, None)
    asked = config.disk.bytes_per_folder
    if asked is None:
        return faults
    for roots in by_file_system(devices):
        room = room_for_slabs(free[roots[0]], sum(ours[root] for root in roots))
        # Slabs that the unit made of `asked` bytes in an earlier run hold less, and on a full disk are all the room.
        for root in roots[room // (whole(asked) or asked) :]:
            together = f" of {len(roots)} on one file system" if len(roots) > 1 else ""
            faults[str(root)] = (
                f"disk.bytes_per_folder ({config.origin('disk.bytes_per_folder')}) asks for {format_size(asked)} in "
                f"each folder{together}, and {format_size(room)} can be had beside headers and index: set it to "
                f"{room // len(roots)} or less"
            )
    return faults


def _access_fault(root: Path, there: Path) -> str:
    """Why no folder of this name can be created below `there`, the nearest existing folder, or written to; empty if it
    can.

    Raises:
        OSError: the file system cannot be asked.
    """
    if fault := name_fault(root, there):
        return fault
    if not there.is_dir():
        return f"{there} is no folder"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"the file system of {there} is read-only"
    return f"no permission to write in {there}"


def same_folders(disk: DiskConfig) -> list[tuple[str, str]]:
    """Pairs of `disk.folders` that are the same folder, written in two ways or reached by a link."""
    first: dict[str, str] = {}
    pairs = []
    for folder in disk.folders:
        real = os.path.realpath(folder)
        if real in first:
            pairs.append((first[real], folder))
        else:
            first[real] = folder
    return pairs


def shared_file_systems(disk: DiskConfig) -> list[list[Path]]:
    """Folders of `disk.folders` that share a file system: striping over them gains nothing. Ignores a folder whose file
    system cannot be determined; its opening names it.
    """
    devices: dict[Path, int] = {}
    for root in map(Path, disk.folders):
        with suppress(OSError):
            devices[root] = device_of(root)
    return [roots for roots in by_file_system(devices) if len(roots) > 1]


def nearest_there(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(at for at in (path, *path.parents) if os.path.exists(at))


def name_fault(path: Path, there: Path) -> str:
    """Why no folder of this name can be created below `there`, the nearest existing folder; empty if it can."""
    missing = path.relative_to(there).parts
    if missing and os.path.lexists(there / missing[0]):
        return f"{there / missing[0]} is a symbolic link that leads nowhere"
    longest = os.pathconf(there, "PC_NAME_MAX")
    if too_long := [name for name in missing if len(os.fsencode(name)) > longest]:
        return f"{too_long[0]!r:.40} has {len(os.fsencode(too_long[0]))} bytes; a name here has {longest} at most"
    return ""
