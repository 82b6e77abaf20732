"""Decides how much of each folder of `disk.folders` a unit may fill, and finds folders that cannot be used with the
settings.
"""

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
from flexkv.storage.folder import held_bytes, is_read_only, unit_folder
from flexkv.storage.header import slot_bytes_of_all
from flexkv.storage.private_files import make_folders

logger = get_logger(__name__)

EVEN_ROOM = 0.9
"""All folders get slabs of the same size: the smallest share that any folder allows. If the smallest share is less than
this fraction of the largest share, a line is logged.
"""

BESIDE_PART = 64
"""An index takes at most one byte per this many bytes of its slabs. That allows 128 bytes for a slot of 8 KiB, whose
row takes 51 bytes in the database and 51 in the database's log.
"""

BESIDE_BYTES = 16 << 20
"""Bytes of disk space for the headers and their copies, the log of a small index, and the file `spare`."""

SMALL_PART = 2
"""On a small file system, such as a test's, BESIDE_BYTES is replaced by 1/SMALL_PART of the file system's bytes if that
is less.
"""

OwnBytes = Callable[[Path], int]
"""Takes a folder of `disk.folders`. Returns the number of bytes under it that belong to the unit's own slabs. The unit
may use these bytes again.
"""


WholeSlots = Callable[[int], int]
"""Takes the number of bytes that a unit may fill in a folder. Returns the number of bytes that the unit's slabs then
take, which may be smaller, because slabs consist of complete slots.
"""


def own_bytes(identity: DiskIdentity, *groups: DiskGroup) -> OwnBytes:
    """Returns a function that counts the bytes of the unit's slabs. It leaves out the files beside the slabs, whose
    space is not available for slabs.
    """
    return lambda root: held_bytes(unit_folder(root, identity, groups), "*.slab")


def whole_slots(*groups: DiskGroup) -> WholeSlots:
    """Returns a function that rounds a number of bytes down to complete slots of a unit with these KV groups."""
    slot = slot_bytes_of_all(groups)
    return lambda asked: asked // slot * slot


def bytes_per_folder(disk: DiskConfig, units: int, own: OwnBytes) -> int:
    """Returns the number of bytes that one of `units` units on this node may fill in each folder. The number is the
    same for all folders, because blocks are striped over them. It is `disk.bytes_per_folder` or, if that is not set, a
    share of the free space. Folders on the same file system divide the file system's share among them.

    Bytes that flexkv's units already hold in a folder count as free, so that the size does not shrink with every start;
    but a unit cannot get the bytes of other units. If `disk.bytes_per_folder` is not set, missing folders are created.
    A folder that cannot be used is ignored; the log names that folder when the tier is opened without it.

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
    """Returns the number of bytes of a file system that a unit may fill. The result is never more than the unit can
    get.

    Args:
        free: free bytes of the file system.
        own: bytes that the unit's slabs hold on the file system.
        others: bytes that other units hold on the file system.
        share: the part of the space that all units together may fill (`disk.space_share`).
        units: number of units on this node.
    """
    total = free + own + others
    fair = min(share * total, total - room_beside(total)) / units
    return int(min(fair, max(own, share * (free + own)), room_for_slabs(free, own)))


def room_for_slabs(free: int, own: int) -> int:
    """Returns the maximum size in bytes of all slabs together, so that headers and index fit beside them on the file
    system, which has `free` bytes left. The result is at least `own`, the bytes that the slabs already hold.
    """
    return max(own, free + own - room_beside(free + own))


def room_beside(total: int) -> int:
    """Returns the maximum number of bytes of headers and index if they and the slabs have `total` bytes together."""
    return total // BESIDE_PART + min(BESIDE_BYTES, total // SMALL_PART)


def device_of(root: Path) -> int:
    """The device number of the file system on which a folder lies or, if it does not exist yet, will lie.

    Raises:
        OSError: the folder or its file system cannot be examined.
    """
    return nearest_there(root).stat().st_dev


def by_file_system(devices: Mapping[Path, int]) -> list[list[Path]]:
    """Groups folders by file system. The groups are in the order of their first folders.

    Args:
        devices: device number of each folder, from `device_of`.
    """
    groups: dict[int, list[Path]] = {}
    for root, device in devices.items():
        groups.setdefault(device, []).append(root)
    return list(groups.values())


def folder_faults(
    config: FlexKVConfig, own: OwnBytes, whole: WholeSlots = lambda asked: asked
) -> dict[str, str]:
    """Returns the folders of `disk.folders` that cannot be used with the settings, and why. Creates nothing.

    The engine works without such a folder, just as it does without a disk that fails later. If no folder can be used,
    the engine does not start.

    Args:
        own: counts the bytes that the unit's slabs already hold under a folder.
        whole: rounds bytes down to complete slots. By default, it does not round, so slabs are taken to fill all of
            `disk.bytes_per_folder`.
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
        # An earlier run with the same setting has made slabs of complete slots, so they are up to one slot smaller than
        # `asked`. On a full disk the unit only gets the space of these slabs again, and this space is enough.
        for root in roots[room // (whole(asked) or asked) :]:
            together = f" of {len(roots)} on one file system" if len(roots) > 1 else ""
            faults[str(root)] = (
                f"disk.bytes_per_folder ({config.origin('disk.bytes_per_folder')}) asks for {format_size(asked)} in "
                f"each folder{together}, and {format_size(room)} can be had beside headers and index: set it to "
                f"{room // len(roots)} or less"
            )
    return faults


def _access_fault(root: Path, there: Path) -> str:
    """Returns the reason why the folder `root` cannot be created or written to; empty if it can. `there` is the nearest
    existing folder: `root` or a folder above it.

    Raises:
        OSError: the folder or its file system cannot be examined.
    """
    if fault := name_fault(root, there):
        return fault
    if not there.is_dir():
        return f"{there} is no folder"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    if is_read_only(there):
        return f"the file system of {there} is read-only"
    return f"no permission to write in {there}"


def same_folders(disk: DiskConfig) -> list[tuple[str, str]]:
    """Returns the pairs of entries of `disk.folders` that name the same folder: written in two ways, or through a
    link.
    """
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
    """Returns, for each file system with more than one folder of `disk.folders`, these folders. Striping over them
    gains nothing. Ignores a folder whose file system cannot be determined, because the later opening of that folder
    reports the problem.
    """
    devices: dict[Path, int] = {}
    for root in map(Path, disk.folders):
        with suppress(OSError):
            devices[root] = device_of(root)
    return [roots for roots in by_file_system(devices) if len(roots) > 1]


def nearest_there(path: Path) -> Path:
    """The path itself if it exists, else the nearest folder above it that exists."""
    return next(at for at in (path, *path.parents) if os.path.exists(at))


def name_fault(path: Path, there: Path) -> str:
    """Returns the reason why `path` cannot be created below `there`, the nearest existing folder; empty if it can."""
    missing = path.relative_to(there).parts
    if missing and os.path.lexists(there / missing[0]):
        return f"{there / missing[0]} is a symbolic link that leads nowhere"
    longest = os.pathconf(there, "PC_NAME_MAX")
    if too_long := [name for name in missing if len(os.fsencode(name)) > longest]:
        return f"{too_long[0]!r:.40} has {len(os.fsencode(too_long[0]))} bytes; a name here has {longest} at most"
    return ""
