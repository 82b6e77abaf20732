"""Turns pages that have slots or places into numbered ops."""

from __future__ import annotations

from itertools import count

import numpy as np

from flexkv.transfer.graph import (
    NO_PLACES,
    NO_READS,
    BlockIds,
    OpId,
    OpKind,
    PageTags,
    Priority,
    ReadIds,
    RunDigests,
    SlotIds,
    TransferGraph,
    TransferOp,
)

NO_BLOCKS: BlockIds = np.empty(0, np.int32)


class Planner:
    """Numbers ops, and builds them: for the ranks as ops, for the manager's own disk lane as graphs of one op."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def load(self, group: int, blocks: BlockIds, slots: SlotIds, reads: ReadIds = NO_READS) -> TransferOp:
        """One H2D op; `reads` as in `TransferOp.reads`: pages wait for reads of the manager's own disks."""
        number = OpId(next(self._numbers))
        return TransferOp(number, OpKind.H2D, group, Priority.LOAD, blocks, slots, reads=reads)

    def store(self, group: int, blocks: BlockIds, slots: SlotIds) -> TransferOp:
        """One D2H op."""
        return TransferOp(OpId(next(self._numbers)), OpKind.D2H, group, Priority.STORE, blocks, slots)

    def gds_load(self, group: int, blocks: BlockIds, places: SlotIds, tags: PageTags) -> TransferOp:
        """One GDS_READ op."""
        number = OpId(next(self._numbers))
        return TransferOp(
            number, OpKind.GDS_READ, group, Priority.LOAD, blocks, NO_PLACES, places=places, tags=tags
        )

    def gds_store(self, group: int, blocks: BlockIds, places: SlotIds, tags: PageTags) -> TransferOp:
        """One GDS_WRITE op."""
        number = OpId(next(self._numbers))
        return TransferOp(
            number, OpKind.GDS_WRITE, group, Priority.STORE, blocks, NO_PLACES, places=places, tags=tags
        )

    def seal(self, group: int, places: SlotIds, tags: PageTags, digests: RunDigests) -> TransferOp:
        """One DISK_SEAL op."""
        return TransferOp(
            OpId(next(self._numbers)),
            OpKind.DISK_SEAL,
            group,
            Priority.STORE,
            NO_BLOCKS,
            NO_PLACES,
            places=places,
            tags=tags,
            digests=digests,
        )

    def read(
        self, group: int, slots: SlotIds, places: SlotIds, tags: PageTags, layerwise: bool = False
    ) -> TransferGraph:
        """One DISK_READ op: a request waits for it. With `layerwise` its pages come up by ranges of layers."""
        return self._disk(OpKind.DISK_READ, Priority.LOAD, group, slots, places, tags, layerwise)

    def write(self, group: int, slots: SlotIds, places: SlotIds, tags: PageTags) -> TransferGraph:
        """One DISK_WRITE op."""
        return self._disk(OpKind.DISK_WRITE, Priority.STORE, group, slots, places, tags)

    def _disk(
        self,
        kind: OpKind,
        priority: Priority,
        group: int,
        slots: SlotIds,
        places: SlotIds,
        tags: PageTags,
        layerwise: bool = False,
    ) -> TransferGraph:
        number = OpId(next(self._numbers))
        op = TransferOp(number, kind, group, priority, NO_BLOCKS, slots, layerwise, places, tags)
        return TransferGraph((op,))
