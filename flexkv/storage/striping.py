"""Finds the disk and the slot of a place: consecutive places lie on consecutive disks.

This is the rule of csrc/storage/striping.h, for code that does not move the bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import BlockRangeError

Slots = NDArray[np.int64]
"""Slots of one disk's slab, int64 [pages]."""


def striped_slot(place: int, disks: int) -> tuple[int, int]:
    """Disk and slot of one place."""
    slot, disk = divmod(place, disks)
    return disk, slot


def striped_slots(places: NDArray[np.int32], disks: int) -> tuple[NDArray[np.int64], Slots]:
    """Disk and slot of each place, int64 [places] both."""
    slots, on_disk = np.divmod(places.astype(np.int64), disks)
    return on_disk, slots


def parts_by_disk(
    places: NDArray[np.int32], disks: int, slots: int
) -> list[tuple[int, slice | NDArray[np.int64], Slots]]:
    """Splits places by disk: the disk, positions in `places` (an index of arrays beside it), and the slots.

    Args:
        slots: slots of each disk.

    Raises:
        BlockRangeError: no disk has one of the places.
    """
    wide = places.astype(np.int64)
    if len(wide) and (wide.min() < 0 or wide.max() >= slots * disks):
        raise BlockRangeError(f"places {wide.min()}..{wide.max()}: allowed are [0, {slots * disks})")
    if disks == 1:
        return [(0, slice(None), wide)] if len(wide) else []
    on_disk, slots_there = striped_slots(places, disks)
    parts: list[tuple[int, slice | NDArray[np.int64], Slots]] = []
    for disk in np.unique(on_disk).tolist():
        positions = np.flatnonzero(on_disk == disk)
        parts.append((disk, positions, slots_there[positions]))
    return parts


def places_of(slots: NDArray[np.int64], disk: int, disks: int) -> NDArray[np.int64]:
    """The places of these slots of a disk, int64 [slots]."""
    return slots * disks + disk
