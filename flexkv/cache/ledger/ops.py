"""Ops that were planned and have not ended yet. The ranks run loads and stores. All other ops are run by the plane of
their tier, the code that moves its pages (`Tier.plane`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import HUB, NO_ENTRIES, Completion, EntryIds, OpRole, TierId
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import RequestSettings
from flexkv.observe import PageLoss
from flexkv.transfer.graph import (
    NO_BLOCKS,
    BlockIds,
    FailureCause,
    OpId,
    OpKind,
    OpResult,
    OpStatus,
    RunDigests,
    TransferOp,
)

WHOLE_OP_STATUSES = (OpStatus.CANCELLED, OpStatus.SKIPPED, OpStatus.LANE_DOWN)
"""Statuses under which every page of the op counts as failed, even if the result lists only some pages as failed."""


def good_pages(result: OpResult, pages: int, who: str = "the lane") -> NDArray[np.bool_]:
    """Returns which of the `pages` pages of an op succeeded, bool [pages].

    Args:
        who: the sender of the result, for error messages.

    Raises:
        ContractError: the result lists pages that the op does not have, or its status is OK but it lists failed pages.
    """
    listed = np.asarray(result.failed)
    if listed.size and (
        listed.ndim != 1 or listed.dtype.kind not in "iu" or listed.min() < 0 or listed.max() >= pages
    ):
        raise ContractError(
            f"op {result.op_id}: {who} lists failed pages {listed.tolist()[:8]}; allowed are positions 0 to {pages - 1}"
        )
    if result.status is OpStatus.OK:
        if listed.size:
            raise ContractError(f"op {result.op_id}: {who} says OK and lists {listed.size} failed pages")
        return np.ones(pages, np.bool_)
    good = np.zeros(pages, np.bool_)
    # If a failed result lists no page, all pages count as failed, so that no failed page is mistaken for a good one.
    if result.status not in WHOLE_OP_STATUSES and listed.size:
        good[:] = True
        good[listed] = False
    return good


@dataclass(slots=True, kw_only=True)
class Op:
    """One op between its plan and its end. All arrays have one element per page.

    Attributes:
        plan: the op as it was planned.
        role: purpose of the op.
        tier: number of the tier whose index contains `entries`.
        entries: entries of the op's pages in the index of `tier`, each pinned once by the op.
        epoch: the manager's epoch when the op was planned.
        op_id, group: copied from the plan.
        pages: number of pages that the op moves.
        begun_s: clock time at which the op was added to the table.
        ahead: number of pages that were in flight on the same route when the op was planned.
    """

    plan: TransferOp
    role: OpRole
    tier: TierId = HUB
    entries: EntryIds
    epoch: int
    op_id: OpId = field(init=False)
    group: int = field(init=False)
    pages: int = field(init=False)
    begun_s: float = field(default=0.0, init=False)
    ahead: int = 0

    def __post_init__(self) -> None:
        self.op_id, self.group, self.pages = self.plan.op_id, self.plan.group, len(self.entries)

    @property
    def kind(self) -> OpKind:
        return self.plan.kind


@dataclass(slots=True, kw_only=True)
class AwaitedOp(Op):
    """An op for which requests may wait.

    Attributes:
        waiters: ids of the requests that wait for the op.
    """

    waiters: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class FetchOp(AwaitedOp):
    """Moves pages of a tier to host slots.

    Attributes:
        host: the pages' entries in the index of host memory, not visible yet, each pinned once by the op.
        prefetched: whether the fetch was begun before a lookup asked for its pages.
    """

    host: EntryIds
    prefetched: bool = False


@dataclass(slots=True, kw_only=True)
class ProbeOp(AwaitedOp):
    """Asks a tier which pages of a request it has. Moves no pages.

    Attributes:
        keys: per group, the keys of all whole blocks that may be promised to the request; for a tail, its candidates.
        start_tokens: number of tokens that the engine has itself; for a tail, number of tokens before the tail.
        settings: the caller's settings for the request.
    """

    keys: Sequence[Keys]
    start_tokens: int
    settings: RequestSettings


@dataclass(slots=True, kw_only=True)
class WriteOp(Op):
    """Writes pages of host memory to a tier.

    Attributes:
        host: the pages' entries in the index of host memory, each pinned once by the op.
        leaving: whether the pages are evicted from host memory when the op has ended.
    """

    host: EntryIds
    leaving: bool = False


class Mark(IntFlag):
    """Consequences of a page's failure on a rank. `RankOp` has a field for each flag, with the same name."""

    NONE = 0
    SUSPECT = 1
    DAMAGED = 2
    WITHHELD = 4
    SOURCE_FAILED = 8


def _marks(of_cause: dict[FailureCause, Mark]) -> NDArray[np.uint8]:
    return np.array([of_cause[cause] for cause in FailureCause], np.uint8)


HOST_MARKS = _marks(
    {
        FailureCause.UNKNOWN: Mark.SUSPECT | Mark.DAMAGED,
        FailureCause.CONTENT: Mark.SUSPECT | Mark.DAMAGED,
        FailureCause.SOURCE: Mark.SUSPECT,
        FailureCause.TRANSPORT: Mark.SUSPECT,
        FailureCause.NOT_EXECUTED: Mark.SUSPECT,
    }
)
"""Marks by failure cause, for pages in host memory. Every cause makes the page suspect, so that it is forgotten: a load
from host memory has no other route, and would fail again."""

STRAIGHT_MARKS = _marks(
    {
        FailureCause.UNKNOWN: Mark.SUSPECT | Mark.DAMAGED,
        FailureCause.CONTENT: Mark.SUSPECT | Mark.DAMAGED,
        FailureCause.SOURCE: Mark.WITHHELD | Mark.SOURCE_FAILED,
        FailureCause.TRANSPORT: Mark.SOURCE_FAILED,
        FailureCause.NOT_EXECUTED: Mark.NONE,
    }
)
"""Marks by failure cause, for pages that are loaded straight from another tier. Unless the page's content is bad, the
next load can move the page through host memory."""


@dataclass(slots=True, kw_only=True)
class RankOp(Op):
    """A load or a store: moves pages between engine blocks and a tier, and ends when every rank has reported it.

    Attributes:
        request_id: id of the request to which the pages belong.
        first_block: index in the request of the block at position 0.
        positions: page i is block `first_block + positions[i]` of the request; integers of any dtype, ascending.
        waits_for: op numbers of the request's loads that were in flight when this store was planned. If one of them is
            still in flight when the store ends, the store is not published.
        digests: for a store straight to a tier, by rank, the run digests that the rank has reported for every page;
            empty for other ops.
        reported: numbers of the ranks that have reported. A rank that died never reports. The op's pages then stay
            pinned until the unit ends, because the rank's last copy may still run.
        failed: which pages failed on a rank that has reported, bool [pages].
        suspect: which pages failed and must be forgotten, bool [pages]. A cancelled load makes no page suspect.
        damaged: which pages failed, perhaps because their content is bad, bool [pages].
        withheld: for a load straight from a tier, which pages failed because the tier did not deliver them, bool
            [pages]. The tier keeps these pages, and the failures are counted.
        source_failed: for a load straight from a tier, whether pages failed because of the tier or the route from it,
            not because of their content.
        revoked: which pages of a store must not be published, bool [pages].
        load: op number of the first op of the load that this op is part of; None until the whole load is planned.
        abandoned: for a load, whether its request has ended or the engine has withdrawn the load.
        reasons: the ranks' reports about failures, one text per rank that gave a reason.
        loss: why a rank did not begin this store; None if no rank gave such a reason.
    """

    request_id: str
    first_block: int
    positions: NDArray[np.integer]
    waits_for: tuple[OpId, ...] = ()
    digests: dict[int, RunDigests] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    failed: NDArray[np.bool_] = field(init=False)
    suspect: NDArray[np.bool_] = field(init=False)
    revoked: NDArray[np.bool_] = field(init=False)
    damaged: NDArray[np.bool_] = field(init=False)
    withheld: NDArray[np.bool_] = field(init=False)
    source_failed: bool = False
    load: OpId | None = None
    abandoned: bool = False
    reasons: list[str] = field(default_factory=list)
    loss: PageLoss | None = None

    def __post_init__(self) -> None:
        Op.__post_init__(self)  # `super()` fails here: dataclass recreates a class with slots
        marks = np.zeros((5, len(self.entries)), np.bool_)
        self.failed, self.suspect, self.revoked, self.damaged, self.withheld = marks

    @property
    def blocks(self) -> BlockIds:
        """The engine block of each page."""
        return self.plan.blocks

    @property
    def straight(self) -> bool:
        """Whether the op moves pages straight between a tier and engine blocks, so that they have no host slot."""
        return self.tier != HUB

    @property
    def coming(self) -> NDArray[np.bool_] | None:
        """Which pages were still being fetched to host memory when the op was planned, bool [pages]; None if there were
        no such pages."""
        return self.plan.reads != 0 if len(self.plan.reads) else None

    @property
    def block_numbers(self) -> NDArray[np.int64]:
        """The number of each page's block within the request, int64 [pages]. Computed on each call."""
        return self.positions.astype(np.int64) + self.first_block

    def completion(self, failed: NDArray[np.bool_], published: NDArray[np.int32]) -> Completion:
        """Returns the op's `Completion`, which lists the engine blocks of the pages that `failed` marks as failed."""
        blocks = self.plan.blocks
        return Completion(
            op_id=self.op_id,
            request_id=self.request_id,
            role=self.role,
            group=self.group,
            blocks=blocks,
            failed_blocks=blocks[failed],
            published=published,
            reason="; ".join(self.reasons),
            loss=self.loss,
        )

    def report(self, rank: int, result: OpResult) -> None:
        """Records one rank's result.

        Raises:
            ContractError: the result's failed pages or causes do not fit the op. The op is then unchanged.
        """
        if result.status is not OpStatus.OK or len(result.failed):
            good = good_pages(result, self.pages, f"rank {rank}")
            self._take_failures(rank, result, ~good, result.page_causes(self.pages))
        if result.digests.size:
            self.digests[rank] = result.digests
        # This line comes last, so that an interrupted report does not count as a report without failures.
        self.reported.add(rank)

    def _take_failures(
        self, rank: int, result: OpResult, bad: NDArray[np.bool_], causes: NDArray[np.uint8]
    ) -> None:
        marks = np.where(bad, (STRAIGHT_MARKS if self.straight else HOST_MARKS)[causes], 0)
        self.failed |= bad
        if result.status is not OpStatus.CANCELLED:
            self.suspect |= (marks & Mark.SUSPECT) != 0
        self.damaged |= (marks & Mark.DAMAGED) != 0
        self.withheld |= (marks & Mark.WITHHELD) != 0
        self.source_failed |= bool((marks & Mark.SOURCE_FAILED).any())
        self.loss = self.loss or result.loss
        if result.reason:
            self.reasons.append(f"rank {rank}: {result.reason}")


class OpTable:
    """The ops in flight, found by op number or by request. Also counts these ops and their pages by role and tier.

    Args:
        clock: returns seconds and never runs backwards.

    Attributes:
        last_id: the op number that was assigned last; 0 before the first.
        of_ranks: number of loads and stores in flight, which the ranks have to report.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_id = OpId(0)
        self._ops: dict[OpId, Op] = {}
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._by_request: dict[str, dict[OpId, RankOp]] = {}
        self._pages: dict[tuple[OpRole, TierId], int] = {}
        self._counts: dict[tuple[OpRole, TierId], int] = {}
        self._all_pages = dict.fromkeys(OpRole, 0)
        self.of_ranks = 0

    def next_id(self) -> OpId:
        """Assigns and returns the number of a new op. No two ops of one manager have the same number."""
        self.last_id = OpId(self.last_id + 1)
        return self.last_id

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._ops

    def pages(self, role: OpRole, tier: TierId | None = None) -> int:
        """Returns how many pages the ops of this role and tier have in flight; if `tier` is None, the ops of all
        tiers."""
        return self._all_pages[role] if tier is None else self._pages.get((role, tier), 0)

    def count(self, role: OpRole, tier: TierId) -> int:
        """Returns how many ops of this role and tier are in flight."""
        return self._counts.get((role, tier), 0)

    def any_of(self, role: OpRole) -> bool:
        """Whether ops of this role have pages in flight."""
        return self._all_pages[role] > 0

    def get(self, op_id: OpId) -> Op:
        """Returns the op with this number.

        Raises:
            ContractError: no such op is in flight.
        """
        op = self._ops.get(op_id)
        if op is None:
            raise ContractError(f"op {op_id} is not in flight: never planned, or ended on every rank")
        return op

    def find(self, op_id: OpId) -> Op | None:
        """Returns the op with this number; None if it is not in flight."""
        return self._ops.get(op_id)

    def fetch(self, op_id: OpId) -> FetchOp | None:
        """Returns the fetch with this number; None if it is not in flight or the op is not a fetch."""
        op = self._ops.get(op_id)
        return op if isinstance(op, FetchOp) else None

    def awaited(self, op_id: OpId) -> AwaitedOp | None:
        """Returns the fetch or question with this number; None if it is not in flight or the op is neither."""
        op = self._ops.get(op_id)
        return op if isinstance(op, AwaitedOp) else None

    def unawaited_prefetches(self) -> int:
        """Number of pages in flight in prefetches for which no request waits any more."""
        fetches = (op for op in self if isinstance(op, FetchOp))
        return sum(op.pages for op in fetches if op.prefetched and not op.waiters)

    def of_request(self, request_id: str, role: OpRole) -> list[RankOp]:
        return [op for op in self._by_request.get(request_id, {}).values() if op.role is role]

    def targets_of_loads(self, group: int) -> BlockIds:
        """Returns the engine blocks of a group to which loads in flight write."""
        targets = [op.plan.blocks for op in self if op.role is OpRole.LOAD and op.group == group]
        return np.concatenate(targets) if targets else NO_BLOCKS

    def entries_read(self, tier: TierId, group: int) -> EntryIds:
        """Returns the group's entries in the tier's index whose pages are being read by loads or fetches."""
        reads = [
            op.entries
            for op in self
            if op.role in (OpRole.LOAD, OpRole.FETCH) and (op.tier, op.group) == (tier, group)
        ]
        return np.concatenate(reads) if reads else NO_ENTRIES

    def add(self, op: Op) -> None:
        op.begun_s = self._clock()
        self._count(op)

    def _count(self, op: Op) -> None:
        self._ops[op.op_id] = op
        kind = (op.role, op.tier)
        self._pages[kind] = self._pages.get(kind, 0) + op.pages
        self._all_pages[op.role] += op.pages
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if isinstance(op, RankOp):
            self._by_request.setdefault(op.request_id, {})[op.op_id] = op
            self.of_ranks += 1

    def drop_after(self, last: OpId, handed_out: set[OpId], ended: Op | None = None) -> None:
        """Undoes a call that was interrupted, perhaps within `add` or `remove`. Drops the ops with numbers above
        `last`, except those in `handed_out`. Also drops the op `ended`. Recounts the remaining ops."""
        kept = [op for op in self if (op.op_id <= last or op.op_id in handed_out) and op is not ended]
        self._ops = {}
        self._clear_counts()
        for op in kept:
            self._count(op)

    def remove(self, op: Op) -> None:
        del self._ops[op.op_id]
        kind = (op.role, op.tier)
        self._pages[kind] -= op.pages
        self._all_pages[op.role] -= op.pages
        self._counts[kind] -= 1
        if not isinstance(op, RankOp):
            return
        self.of_ranks -= 1
        of_request = self._by_request[op.request_id]
        del of_request[op.op_id]
        if not of_request:
            del self._by_request[op.request_id]

    def check_integrity(self) -> None:
        """Checks the tables against each other.

        Raises:
            ContractError: the tables or page counts disagree.
        """
        of_ranks = [op for op in self if isinstance(op, RankOp)]
        by_request = sorted(op_id for ops in self._by_request.values() for op_id in ops)
        if by_request != sorted(op.op_id for op in of_ranks) or not all(self._by_request.values()):
            raise ContractError("in-flight ops by request disagree with those by number")
        if len(of_ranks) != self.of_ranks:
            raise ContractError(f"{self.of_ranks} ops of ranks are counted in flight, {len(of_ranks)} are")
        for role, pages in self._all_pages.items():
            if pages != sum(count for (of, _), count in self._pages.items() if of is role):
                raise ContractError(f"{pages} pages of {role.value} ops are counted in flight over all tiers")
        for (role, tier), pages in self._pages.items():
            mine = [op for op in self if (op.role, op.tier) == (role, tier)]
            actual = sum(op.pages for op in mine)
            if (actual, len(mine)) != (pages, self._counts[role, tier]):
                raise ContractError(
                    f"{pages} pages of {self._counts[role, tier]} {role.value} ops of tier {tier} are counted in "
                    f"flight, {actual} of {len(mine)} are"
                )
