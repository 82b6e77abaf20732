"""Turns pages that have slots into transfer graphs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np

from flexkv.transfer.graph import (
    NO_PLACES,
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
    """Numbers ops and builds graphs over the host and disk tiers."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def load(self, pages: Iterable[tuple[int, BlockIds, SlotIds, ReadIds]]) -> TransferGraph:
        """One H2D op for each `(group, engine blocks, slots, reads)`; they do not wait for each other.

        `reads` as in `TransferOp.reads`: the pages wait for reads of the manager's own disks.
        """
        return TransferGraph(
            tuple(
                TransferOp(
                    OpId(next(self._numbers)), OpKind.H2D, group, Priority.LOAD, blocks, slots, reads=reads
                )
                for group, blocks, slots, reads in pages
            )
        )

    def straight(self, group: int, blocks: BlockIds, places: SlotIds, tags: PageTags) -> TransferOp:
        """One GDS_READ op."""
        number = OpId(next(self._numbers))
        return TransferOp(
            number, OpKind.GDS_READ, group, Priority.LOAD, blocks, NO_PLACES, places=places, tags=tags
        )

    def straight_store(self, group: int, blocks: BlockIds, places: SlotIds, tags: PageTags) -> TransferOp:
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

    def store(self, group: int, blocks: BlockIds, slots: SlotIds) -> TransferGraph:
        """One D2H op."""
        op = TransferOp(OpId(next(self._numbers)), OpKind.D2H, group, Priority.STORE, blocks, slots)
        return TransferGraph((op,))

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
