"""Reads and writes of the disk tier that were planned and have not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import Keys
from flexkv.cache.disk_index import DiskIndex
from flexkv.cache.inflight import WHOLE_OP_STATUSES
from flexkv.cache.leases import EntryIds
from flexkv.cache.planner import Planner
from flexkv.errors import ContractError
from flexkv.transfer.graph import OpId, OpResult, OpStatus, SlotIds


@dataclass(slots=True)
class HostSide:
    """What the disk tier needs of the manager's host tier.

    Attributes:
        index: of the host slots.
        tokens: per group, valid tokens of the page in each host slot, int32 [slots].
        published: is told of entries that became visible in host memory.
        evicted: is told of blocks that left it.
    """

    index: BlockIndex
    planner: Planner
    tokens: list[NDArray[np.int32]]
    published: Callable[[int, EntryIds], None]
    evicted: Callable[[int, Keys], None]


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
    source: DiskIndex
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


def good_pages(result: OpResult, pages: int) -> NDArray[np.bool_]:
    """Which pages of an op of so many arrived.

    Raises:
        ContractError: the result lists pages that the op has not.
    """
    if result.status is OpStatus.OK:
        return np.ones(pages, np.bool_)
    good = np.zeros(pages, np.bool_)
    listed = np.asarray(result.failed)
    if listed.size and (listed.min() < 0 or listed.max() >= pages):
        raise ContractError(
            f"op {result.op_id} lists failed pages {listed.tolist()[:8]}; allowed are positions 0 to {pages - 1}"
        )
    # A failure that names no page is taken as a failure of all: never a page too few.
    if result.status not in WHOLE_OP_STATUSES and listed.size:
        good[:] = True
        good[listed] = False
    return good


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
