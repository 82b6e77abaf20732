"""Describes to the ranks' processes where a unit's pages lie on its disks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SlabRow(NamedTuple):
    """Describes a slab file that the unit has opened, so that a rank's process can open the same file. Sizes are in
    bytes.
    """

    path: str
    header_bytes: int
    slot_bytes: int
    slots: int
    slab_id: int


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """The layout of one KV group's pages, with the values of `flexkv.storage.base.DiskGroup`.

    Attributes:
        stripe_bytes: for each rank, the size of its stripe in bytes.
        runs: for each rank, its runs, int64 [runs, 3]; the columns are offset in the stripe, bytes and layer.
    """

    stripe_bytes: tuple[int, ...]
    runs: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class SlabMap:
    """The location of a unit's pages on its disks. The unit sends this map to the ranks' processes.

    Attributes:
        groups: the page layout of each KV group.
        disks: for each disk, the slab of each KV group; groups that share a slab have equal rows. The entry of a lost
            disk is empty.
    """

    groups: tuple[SlabGroup, ...]
    disks: tuple[tuple[SlabRow, ...], ...]
