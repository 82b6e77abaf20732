"""Undoes calls that are interrupted, because an allocation failed or the manager broke one of its own rules.

A plan leases entries, hands out slots and adds ops to tables, one after the other, and an error may come between any
two. So nothing is undone step by step. The tables decide: ops that were not submitted are removed from them, and every
lease that no table names is ended. If the end of an op is interrupted, it is not repeated, because parts of it may have
been done: all pages of the op count as failed.
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
    """Context manager around each call of one manager that plans or ends ops: if the call raises, the context manager
    undoes what the call had done. Not reentrant.

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
        """Prepares this context for the end of an op, or for one rank's report of it, and returns it."""
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
        """Whether the error refuses a result that does not fit its op. The op then continues as if nothing had been
        reported.
        """
        op = self._ending
        if op is None or op.op_id not in self._tables.ops or not isinstance(error, ContractError):
            return False
        return not isinstance(op, RankOp) or self._rank not in op.reported

    def leased(self) -> list[list[EntryIds]]:
        """Per tier, the entries that leases, waits and ops in the tables name, each once per lease."""
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
        """Removes all traces of a call that began after op `last` and raised `error`. O(all entries).

        Ops that wait in the outbox stay, because they are complete and useful.
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
        """Marks as failed all pages of the load or store whose end or report was interrupted; after a load, also
        revokes the request's stores. Returns the op if it has ended, as an op of no rank always has; None if other
        ranks still have to report it, or if no op was ending."""
        op = self._ending
        if not isinstance(op, RankOp):
            return op
        op.failed[:] = True
        op.reported.add(self._rank)
        if op.role is OpRole.LOAD:
            for store in self._tables.ops.of_request(op.request_id, OpRole.STORE):
                store.revoked[:] = True
        return op if len(op.reported) == self._ranks else None
