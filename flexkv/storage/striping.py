"""Which disk, and which slot of it, a place is: places go round the disks, one each.

The rule of csrc/storage/striping.h, for whoever does not move the bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def places_of(slots: NDArray[np.int64], disk: int, disks: int) -> NDArray[np.int64]:
    """The places that these slots of a disk are, int64 [slots]."""
    return slots * disks + disk
