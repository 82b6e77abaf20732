"""Computes the disk and the slot of a place. Places number the slots of all disks; consecutive places lie on
consecutive disks.

`csrc/storage/striping.h` has the same rule for the lanes that move pages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import BlockRangeError

Slots = NDArray[np.int64]
"""Slots of one disk's slab, int64 [pages]."""


def striped_slot(place: int, disks: int) -> tuple[int, int]:
    """The disk and the slot of one place."""
    slot, disk = divmod(place, disks)
    return disk, slot


def striped_slots(places: NDArray[np.int32], disks: int) -> tuple[NDArray[np.int64], Slots]:
    """The disk of each place and its slot there, both int64 [places]."""
    slots, on_disk = np.divmod(places.astype(np.int64), disks)
    return on_disk, slots


def parts_by_disk(
    places: NDArray[np.int32], disks: int, slots: int
) -> list[tuple[int, slice | NDArray[np.int64], Slots]]:
    """Splits places by disk. Returns for each disk: its number, the indices in `places` of the places on this disk, and
    their slots there.

    Args:
        slots: number of slots of each disk.

    Raises:
        BlockRangeError: a place does not exist on these disks.
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
    """The places of these slots on disk number `disk`, int64 [slots]."""
    return slots * disks + disk
