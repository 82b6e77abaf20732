"""Undoes calls that an exception has interrupted, because an allocation failed or an invariant was broken.

A plan pins entries, takes slots and adds ops to tables, and an exception may come between any two of these steps. So
the steps are not undone one by one. Instead, the call's ops that are not in the outbox are removed from the tables.
Then every pin that no table accounts for is ended. If a call that ends an op is interrupted, it is not repeated,
because parts of its work may have been done. All pages of the op then count as failed.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np

from flexkv.cache.base import HUB, NO_ENTRIES, EntryIds, OpRole
from flexkv.cache.ledger.ops import FetchOp, Op, RankOp, WriteOp
from flexkv.cache.tiers.tables import CacheTables
from flexkv.errors import ContractError
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId

logger = get_logger(__name__)


class BrokenPlans:
    """Context manager around each call that plans or ends ops of one manager. Undoes a call that raises. Not reentrant.

    Args:
        ranks: number of ranks that report each load and store.
    """

    def __init__(self, tables: CacheTables, ranks: int) -> None:
        self._tables = tables
        self._ranks = ranks
        self._last = tables.ops.last_id
        self._ending: Op | None = None
        self._rank = 0

    def ending(self, op: Op, rank: int = 0) -> BrokenPlans:
        """Prepares the context for a call that ends `op` or records the report of `rank` about `op`. Returns itself."""
        self._ending, self._rank = op, rank
        return self

    def __enter__(self) -> None:
        self._last = self._tables.ops.last_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._is_refusal(error):
            self.undo(self._last, error)
        self._ending = None

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether the call was refused with this error before it changed anything, because the reported result does not
        fit the op. The op then stays in flight.
        """
        op = self._ending
        if op is None or op.op_id not in self._tables.ops or not isinstance(error, ContractError):
            return False
        return not isinstance(op, RankOp) or self._rank not in op.reported

    def leased(self) -> list[list[EntryIds]]:
        """Returns, per tier, the entries that leases, waits, plugins and ops in the tables have pinned, each as often
        as it is pinned."""
        pinned: list[list[EntryIds]] = [[] for _ in self._tables.tiers]
        for lease in self._tables.requests.leases():
            for group in lease.groups:
                pinned[HUB].append(group.entries)
                if group.straight is not None:
                    pinned[group.straight.tier].append(group.straight.entries)
        pinned[HUB].extend(held.entries for held in self._tables.requests.held())
        pinned[HUB].extend(pages.entries for kept in self._tables.requests.kept.values() for pages in kept)
        for op in self._tables.ops:
            pinned[op.tier].append(op.entries)
            if isinstance(op, FetchOp | WriteOp):
                pinned[HUB].append(op.host)
        return pinned

    def undo(self, last: OpId, error: BaseException) -> None:
        """Undoes a call that raised `error`. `last` is the last op number that was assigned before the call. O(all
        entries).

        The call's ops that are already in the outbox stay, because their plans are complete.
        """
        ended_op = self._failed_op()
        self._tables.ops.drop_after(last, self._tables.outbox.op_ids, ended_op)
        self._tables.requests.recount({op.op_id for op in self._tables.ops})
        ended = 0
        for tier, entries in zip(self._tables.tiers, self.leased(), strict=True):
            ended += tier.presence.keep_leases(np.concatenate(entries) if entries else NO_ENTRIES)
        if isinstance(ended_op, FetchOp):
            self._tables.hub.give_up_coming(ended_op.host, ended_op.op_id)
        self._tables.reactions.undone()
        logger.warning(
            "a plan or the end of an op broke off with %s: %s; %d leases of it were ended",
            type(error).__name__,
            error,
            ended,
        )

    def _failed_op(self) -> Op | None:
        """If the interrupted call was recording a rank's report of a load or store, marks all pages of the op as
        failed; for a load, also revokes the request's stores in flight.

        Returns:
            The op if it has now ended: always for a tier's own op, for a load or store only if no other rank still has
            to report it. None if the op has not ended or the call was ending no op.
        """
        op = self._ending
        if not isinstance(op, RankOp):
            return op
        op.failed[:] = True
        op.reported.add(self._rank)
        if op.role is OpRole.LOAD:
            for store in self._tables.ops.of_request(op.request_id, OpRole.STORE):
                store.revoked[:] = True
        return op if len(op.reported) == self._ranks else None
