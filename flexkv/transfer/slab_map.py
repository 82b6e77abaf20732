"""Where a unit's pages lie on its disks, in the form that is sent to the ranks' processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SlabRow(NamedTuple):
    """An open slab, described for processes that did not open it; sizes in bytes."""

    path: str
    header_bytes: int
    slot_bytes: int
    slots: int
    slab_id: int


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """The page format of one KV group, as `flexkv.storage.base.DiskGroup` has it.

    Attributes:
        stripe_bytes: bytes of each rank's stripe.
        runs: each rank's runs, int64 [runs, 3]: offset in the stripe, bytes, layer.
    """

    stripe_bytes: tuple[int, ...]
    runs: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True)
class SlabMap:
    """Where a unit's pages lie on its disks; travels to the ranks' processes.

    Attributes:
        disks: each disk's slabs, one per group; groups that share a slab name the same one. Empty for a lost disk.
    """

    groups: tuple[SlabGroup, ...]
    disks: tuple[tuple[SlabRow, ...], ...]
