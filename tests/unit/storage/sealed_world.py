"""Helper for pages that bypass host memory: the rank writes its stripe to the disk, and then the manager's lane writes
the trailer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config import GdsConfig
from flexkv.storage.base import DiskGroup
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, Priority, TransferOp
from tests.unit.storage.disk_world import GENEROUS_S, DiskWorld, ids, run_op


class SealedWorld(DiskWorld):
    """A DiskWorld with one rank, whose pool is in plain memory. To store host slot n, the world copies its bytes to
    block n of the rank's pool.
    """

    def __init__(self, folders: Sequence[Path], group: DiskGroup, slots: int, **options: object) -> None:
        super().__init__(folders, group, slots, sealed_apart=True, **options)  # type: ignore[arg-type]
        lane = make_gds_lane(self.unit.slab_map(), 0, None, GdsConfig())
        self.rank = TransferEngine(lanes=[lane])
        self.blocks = [self._attach(number) for number in range(len(self.groups))]

    def _attach(self, number: int) -> NDArray[np.uint8]:
        """Attaches memory for the group's blocks to the rank. Returns this memory as uint8 [blocks, stripe bytes]."""
        (stripe,), (runs,) = self.groups[number].stripe_bytes, self.groups[number].runs
        blocks = self.pool.slots
        raw = np.zeros(blocks * stripe + 4096, np.uint8)
        base = raw.ctypes.data + -raw.ctypes.data % 4096
        first = base - raw.ctypes.data
        segments = np.array([[base + at, stripe, size, at, layer] for at, size, layer in runs.tolist()])
        view = c_ext.KvView(segments, blocks, stripe)
        self.rank.attach_view(number, view, self.pools[number], owners=[raw])
        return raw[first : first + blocks * stripe].reshape(blocks, stripe)

    def store(
        self, slots: Sequence[int], places: Sequence[int], tags: NDArray[np.uint8], of: int = 0
    ) -> OpResult:
        blocks = self.blocks[of]
        for slot in slots:
            blocks[slot] = self.pools[of].slot(slot)[: blocks.shape[1]]
        stripes = run_op(
            self.rank,
            TransferOp(
                OpId(next(self.op_ids)),
                OpKind.GDS_WRITE,
                of,
                Priority.STORE,
                ids(slots),
                ids([]),
                places=ids(places),
                tags=tags,
            ),
        )
        if stripes.status is not OpStatus.OK:
            return stripes
        return self.run(OpKind.DISK_SEAL, [], places, tags, digests=stripes.digests, of=of)

    def close(self) -> bool:
        assert self.rank.close(GENEROUS_S)
        return super().close()
