"""Where a unit's pages lie on its disks, as the ranks' processes are told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SlabRow(NamedTuple):
    """An open slab for those who did not open it: sizes in bytes."""

    path: str
    header_bytes: int
    slot_bytes: int
    slots: int
    slab_id: int


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """The page format of one KV group, as `flexkv.storage.base.DiskGroup` has it.

    Attributes:
        stripe_bytes: of each rank.
        runs: of each rank, int64 [runs, 3]: offset in the stripe, bytes, layer.
    """

    stripe_bytes: tuple[int, ...]
    runs: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class SlabMap:
    """Where a unit's pages lie on its disks; travels to the ranks' processes.

    Attributes:
        disks: of each disk its slabs, one a group, the same one for groups that share it; empty for a disk that is
            lost.
    """

    groups: tuple[SlabGroup, ...]
    disks: tuple[tuple[SlabRow, ...], ...]
