"""Ops that were planned and have not ended on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import Completion, OpRole
from flexkv.cache.checks import good_pages
from flexkv.cache.leases import EntryIds
from flexkv.errors import ContractError
from flexkv.transfer.graph import (
    WITHOUT_SLOTS,
    Blame,
    BlockIds,
    OpId,
    OpKind,
    OpResult,
    OpStatus,
    RunDigests,
    TransferOp,
)


@dataclass(slots=True, kw_only=True)
class InflightOp:
    """One op between its plan and its last rank's report. All arrays have one element a page.

    Attributes:
        plan: the op as the ranks have it.
        entries: its pages' index entries, each pinned once by the op: of the disk index where `in_disk_index`.
        first_block, positions: page i is of block `first_block + positions[i]` of the request; any integers, ascending.
        epoch: the manager's epoch when it was planned.
        begun_s: the clock when it was planned; kept for loads in front of a disk tier.
        ahead: pages of its role that were in flight then.
        digests: of GDS_WRITE, of each rank that has reported some, its run digests of every page.
        waits_for: loads of the same request that were in flight when this store was planned.
        failed: pages that failed on a rank that has reported.
        suspect: failed pages whose stored copy may be at fault (a cancelled load says nothing about it).
        damaged: failed pages whose content may be at fault, as far as ranks say.
        withheld: of a load from disk, failed pages that a disk did not give; it is counted, and the page is kept.
        astray: of a load from disk, the disk or the way from it failed pages, not what they hold.
        barred: pages that must not be published.
        load: number of the load that it is a part of: that of the load's first op.
        abandoned: of a load, its request has ended, and nobody waits for it.
    """

    plan: TransferOp
    request_id: str
    role: OpRole
    entries: EntryIds
    first_block: int
    positions: NDArray[np.integer]
    epoch: int
    waits_for: tuple[OpId, ...] = ()
    begun_s: float = 0.0
    ahead: int = 0
    digests: dict[int, RunDigests] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    failed: NDArray[np.bool_] = field(init=False)
    suspect: NDArray[np.bool_] = field(init=False)
    barred: NDArray[np.bool_] = field(init=False)
    damaged: NDArray[np.bool_] = field(init=False)
    withheld: NDArray[np.bool_] = field(init=False)
    astray: bool = False
    load: OpId | None = None
    abandoned: bool = False
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        marks = np.zeros((5, len(self.entries)), np.bool_)
        self.failed, self.suspect, self.barred, self.damaged, self.withheld = marks

    @property
    def op_id(self) -> OpId:
        return self.plan.op_id

    @property
    def kind(self) -> OpKind:
        return self.plan.kind

    @property
    def group(self) -> int:
        return self.plan.group

    @property
    def blocks(self) -> BlockIds:
        """The engine blocks of its pages."""
        return self.plan.blocks

    @property
    def in_disk_index(self) -> bool:
        """Whether its pages have no host slot, only places on disk."""
        return self.plan.kind in WITHOUT_SLOTS

    @property
    def coming(self) -> NDArray[np.bool_] | None:
        """Pages that were on their way up from disk when it was planned; None when there were none."""
        return self.plan.reads != 0 if len(self.plan.reads) else None

    @property
    def block_numbers(self) -> NDArray[np.int64]:
        """Number of each page's block in the request, int64. Made when asked for, which a plan never does."""
        return self.positions.astype(np.int64) + self.first_block

    def completion(self, failed: NDArray[np.bool_], published: NDArray[np.int32]) -> Completion:
        """What is said of its end; `failed` marks the pages whose engine blocks are named."""
        return Completion(
            op_id=self.op_id,
            request_id=self.request_id,
            role=self.role,
            group=self.group,
            blocks=self.blocks,
            failed_blocks=self.blocks[failed],
            published=published,
            reason="; ".join(self.reasons),
        )

    def report(self, rank: int, result: OpResult) -> None:
        """Takes one rank's result.

        Raises:
            ContractError: a second report of this rank, or a list of failed pages or blames that does not fit.
        """
        if rank in self.reported:
            raise ContractError(f"op {self.op_id}: rank {rank} reported twice")
        good = good_pages(result, len(self.entries), f"rank {rank}")
        blamed = result.blamed(len(self.entries)) if result.status is not OpStatus.OK else None
        self.reported.add(rank)
        if result.digests.size:
            self.digests[rank] = result.digests
        if blamed is None:
            return
        bad = ~good
        self.failed |= bad
        self.damaged |= bad & (blamed <= Blame.PAGE)
        if self.in_disk_index:
            self.suspect |= bad & (blamed <= Blame.PAGE)
            self.withheld |= bad & (blamed == Blame.DISK)
            self.astray |= bool(((blamed == Blame.DISK) | (blamed == Blame.WAY)).any())
        elif result.status is not OpStatus.CANCELLED:
            # Whoever is to blame, host memory has no other way to an engine: a page that stayed would fail again.
            self.suspect |= bad
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

    def loads_of(self, request_id: str) -> tuple[OpId, ...]:
        """The request's loads: what it stores now may have been computed from their targets."""
        return tuple(op.op_id for op in self.of_request(request_id, OpRole.LOAD))

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
