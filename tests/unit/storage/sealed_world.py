"""A disk tier whose pages go straight to disk: a rank writes its stripe, then the manager's lane the trailer."""

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
    """One rank, in plain memory: block n of its pool has the bytes of host slot n when they are stored."""

    def __init__(self, folders: Sequence[Path], group: DiskGroup, slots: int, **options: object) -> None:
        super().__init__(folders, group, slots, sealed_apart=True, **options)  # type: ignore[arg-type]
        (stripe,), (runs,) = group.stripe_bytes, group.runs
        blocks = self.pool.slots
        raw = np.zeros(blocks * stripe + 4096, np.uint8)
        base = raw.ctypes.data + -raw.ctypes.data % 4096
        first = base - raw.ctypes.data
        self.blocks = raw[first : first + blocks * stripe].reshape(blocks, stripe)
        segments = np.array([[base + at, stripe, size, at, layer] for at, size, layer in runs.tolist()])
        lane = make_gds_lane(self.unit.slab_map(), 0, None, GdsConfig())
        self.rank = TransferEngine(lanes=[lane])
        self.rank.attach_view(0, c_ext.KvView(segments, blocks, stripe), self.pool, owners=[raw])

    def store(self, slots: Sequence[int], places: Sequence[int], tags: NDArray[np.uint8]) -> OpResult:
        for slot in slots:
            self.blocks[slot] = self.pool.slot(slot)[: self.blocks.shape[1]]
        stripes = run_op(
            self.rank,
            TransferOp(
                OpId(next(self.op_ids)),
                OpKind.GDS_WRITE,
                0,
                Priority.STORE,
                ids(slots),
                ids([]),
                places=ids(places),
                tags=tags,
            ),
        )
        if stripes.status is not OpStatus.OK:
            return stripes
        return self.run(OpKind.DISK_SEAL, [], places, tags, digests=stripes.digests)

    def close(self) -> bool:
        assert self.rank.close(GENEROUS_S)
        return super().close()
