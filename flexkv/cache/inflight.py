"""Ops that were planned and have not ended on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import OpRole
from flexkv.cache.leases import EntryIds
from flexkv.errors import ContractError
from flexkv.transfer.graph import Blame, BlockIds, OpId, OpResult, OpStatus, RunDigests, SlotIds, TransferOp

WHOLE_OP_STATUSES = (OpStatus.CANCELLED, OpStatus.SKIPPED, OpStatus.LANE_DOWN)
"""Statuses under which no page of the op counts, whatever the result lists."""


@dataclass(slots=True)
class InflightOp:
    """One op between its plan and its last rank's report. All arrays have one element a page.

    Attributes:
        entries: its pages' index entries, each pinned once by the op.
        first_block, positions: page i is of block `first_block + positions[i]` of the request; any integers, ascending.
        epoch: the manager's epoch when it was planned.
        begun_s: the clock when it was planned; kept for loads in front of a disk tier.
        ahead: pages of its role that were in flight then.
        coming: of a load, pages that were on their way up from disk when it was planned; None when there were none.
        places: of a load straight from disk, or a store straight to it, where its pages lie; `entries` are then of
            the disk index.
        straight_store: the op of such a store.
        digests: of such a store, of each rank that has reported some, its run digests of every page.
        waits_for: loads of the same request that were in flight when this store was planned.
        failed: pages that failed on a rank that has reported.
        suspect: failed pages whose stored copy may be at fault (a cancelled load says nothing about it).
        astray: of a load straight from disk, the disk or the way from it failed pages, not what they hold.
        barred: pages that must not be published.
    """

    op_id: OpId
    request_id: str
    role: OpRole
    group: int
    blocks: BlockIds
    entries: EntryIds
    first_block: int
    positions: NDArray[np.integer]
    epoch: int
    waits_for: tuple[OpId, ...] = ()
    begun_s: float = 0.0
    ahead: int = 0
    coming: NDArray[np.bool_] | None = None
    places: SlotIds | None = None
    straight_store: TransferOp | None = None
    digests: dict[int, RunDigests] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    failed: NDArray[np.bool_] = field(init=False)
    suspect: NDArray[np.bool_] = field(init=False)
    barred: NDArray[np.bool_] = field(init=False)
    astray: bool = False
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failed, self.suspect, self.barred = np.zeros((3, len(self.entries)), np.bool_)

    @property
    def block_numbers(self) -> NDArray[np.int64]:
        """Number of each page's block in the request, int64. Made when asked for, which a plan never does."""
        return self.positions.astype(np.int64) + self.first_block

    def report(self, rank: int, result: OpResult) -> None:
        """Takes one rank's result.

        Raises:
            ContractError: a second report of this rank, or a list of failed pages or blames that does not fit.
        """
        if rank in self.reported:
            raise ContractError(f"op {self.op_id}: rank {rank} reported twice")
        listed = np.asarray(result.failed)
        if listed.size and (
            listed.ndim != 1
            or listed.dtype.kind not in "iu"
            or listed.min() < 0
            or listed.max() >= len(self.entries)
        ):
            raise ContractError(
                f"op {self.op_id}: rank {rank} lists failed pages {listed.tolist()[:8]}; allowed are positions 0 to "
                f"{len(self.entries) - 1}"
            )
        if result.status is OpStatus.OK and listed.size:
            raise ContractError(f"op {self.op_id}: rank {rank} says OK and lists {listed.size} failed pages")
        blamed = result.blamed(len(self.entries)) if result.status is not OpStatus.OK else None
        self.reported.add(rank)
        if result.digests.size:
            self.digests[rank] = result.digests
        if blamed is None:
            return
        # A failure that names no page is taken as a failure of all: never a page too few.
        whole = result.status in WHOLE_OP_STATUSES or not listed.size
        pages: slice | NDArray[np.int64] = slice(None) if whole else listed.astype(np.int64)
        self.failed[pages] = True
        if self.places is not None:
            self.suspect[pages] |= blamed[pages] <= Blame.PAGE
            self.astray |= bool(((blamed == Blame.DISK) | (blamed == Blame.WAY)).any())
        elif result.status is not OpStatus.CANCELLED:
            # Whoever is to blame, host memory has no other way to an engine: a page that stayed would fail again.
            self.suspect[pages] = True
        if result.reason:
            self.reasons.append(f"rank {rank}: {result.reason}")


class InflightTable:
    """In-flight ops by number and by request, with the pages that loads and stores hold."""

    def __init__(self) -> None:
        self._ops: dict[OpId, InflightOp] = {}
        self._by_request: dict[str, dict[OpId, InflightOp]] = {}
        self.pages = {OpRole.LOAD: 0, OpRole.STORE: 0}

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[InflightOp]:
        return iter(self._ops.values())

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._ops

    def get(self, op_id: OpId) -> InflightOp:
        """
        Raises:
            ContractError: no such op is in flight.
        """
        op = self._ops.get(op_id)
        if op is None:
            raise ContractError(f"op {op_id} is not in flight: never planned, or ended on every rank")
        return op

    def of_request(self, request_id: str, role: OpRole) -> list[InflightOp]:
        return [op for op in self._by_request.get(request_id, {}).values() if op.role is role]

    def add(self, op: InflightOp) -> None:
        self._ops[op.op_id] = op
        self._by_request.setdefault(op.request_id, {})[op.op_id] = op
        self.pages[op.role] += len(op.entries)

    def remove(self, op: InflightOp) -> None:
        del self._ops[op.op_id]
        of_request = self._by_request[op.request_id]
        del of_request[op.op_id]
        if not of_request:
            del self._by_request[op.request_id]
        self.pages[op.role] -= len(op.entries)

    def check_integrity(self) -> None:
        """
        Raises:
            ContractError: the tables or page counts disagree.
        """
        by_request = sorted(op_id for ops in self._by_request.values() for op_id in ops)
        if by_request != sorted(self._ops) or not all(self._by_request.values()):
            raise ContractError("in-flight ops by request disagree with those by number")
        for role, pages in self.pages.items():
            actual = sum(len(op.entries) for op in self if op.role is role)
            if actual != pages:
                raise ContractError(f"{pages} {role.value} pages are counted in flight, {actual} are")
