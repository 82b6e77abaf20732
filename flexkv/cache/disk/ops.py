"""Reads and writes of the disk tier that were planned and have not ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.checks import good_pages
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.leases import EntryIds
from flexkv.transfer.graph import OpId, OpResult, SlotIds


@dataclass(slots=True)
class DiskOp:
    """A read or a write between plan and end. All arrays have one element a page.

    Attributes:
        host: entries of the host index, each pinned once by the op.
        disk: entries of the disk index, each pinned once by the op.
        slots: of the host entries.
        places: of the disk entries.
        tokens: valid tokens of the pages of a read, unsigned; a view of their tags.
        epoch: of the disk index when it was planned.
        begun_s: the clock when it was planned.
        ahead: pages of its kind that were in flight then.
        source: the index that `disk` is of: the unit's own, or its siblings'.
        leaving: a write after which the pages leave host memory.
        waiters: requests that wait for a read.
    """

    op_id: OpId
    group: int
    host: EntryIds
    disk: EntryIds
    slots: SlotIds
    places: SlotIds
    epoch: int
    source: StoredIndex
    begun_s: float = 0.0
    ahead: int = 0
    leaving: bool = False
    tokens: NDArray[np.uint32] | None = None
    waiters: set[str] = field(default_factory=set)

    def good(self, result: OpResult) -> NDArray[np.bool_]:
        """Which pages arrived.

        Raises:
            ContractError: the result lists pages that the op has not.
        """
        return good_pages(result, len(self.host))


class DiskOps:
    """Ops of one direction in flight, with the pages they hold."""

    def __init__(self) -> None:
        self._ops: dict[OpId, DiskOp] = {}
        self.pages = 0

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[DiskOp]:
        return iter(self._ops.values())

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._ops

    def get(self, op_id: OpId) -> DiskOp:
        return self._ops[op_id]

    def add(self, op: DiskOp) -> None:
        self._ops[op.op_id] = op
        self.pages += len(op.host)

    def pop(self, op_id: OpId) -> DiskOp:
        op = self._ops.pop(op_id)
        self.pages -= len(op.host)
        return op
