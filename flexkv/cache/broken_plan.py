"""What becomes of a plan that breaks off: an allocation failed, or a rule of the manager's own was broken.

A plan leases entries, gives slots and enters ops in tables, one after the other, and an error may come between any two.
So nothing is undone step by step: the tables are the truth, ops that nobody was given leave them, and every lease that
no table names is ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np

from flexkv.cache.ids import HUB, NO_ENTRIES, EntryIds
from flexkv.cache.ops import FetchOp, OpTable, WriteOp
from flexkv.cache.outbox import Outbox
from flexkv.cache.requests import RequestTable
from flexkv.cache.tier import Tier
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId

logger = get_logger(__name__)


class BrokenPlans:
    """Of one manager: what is planned `with` it is undone where it raises. Not to be entered twice at a time.

    Args:
        tiers: by number.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        ops: OpTable,
        outbox: Outbox,
        requests: RequestTable,
    ) -> None:
        self._tiers = tiers
        self._ops = ops
        self._outbox = outbox
        self._requests = requests
        self._last = ops.last_id

    def __enter__(self) -> None:
        self._last = self._ops.last_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.undo(self._last, error)

    def leased(self) -> list[list[EntryIds]]:
        """Of each tier, the entries that leases, waits and ops in the tables name, each once a lease."""
        pinned: list[list[EntryIds]] = [[] for _ in self._tiers]
        for lease in self._requests.leases():
            for group in lease.groups:
                pinned[HUB].append(group.entries)
                if group.straight is not None:
                    pinned[group.straight.tier].append(group.straight.entries)
        pinned[HUB].extend(entries for _, entries in self._requests.held())
        for op in self._ops:
            pinned[op.tier].append(op.entries)
            if isinstance(op, FetchOp | WriteOp):
                pinned[HUB].append(op.host)
        return pinned

    def undo(self, last: OpId, error: BaseException) -> None:
        """Forgets what a plan made that began after op `last` and ended with `error`. O(all entries).

        Fetches that wait to be handed out stay: they are whole, and what they bring is worth having.
        """
        self._ops.drop_after(last, self._outbox.op_ids)
        self._requests.recount({op.op_id for op in self._ops})
        ended = 0
        for tier, entries in zip(self._tiers, self.leased(), strict=True):
            ended += tier.presence.keep_leases(np.concatenate(entries) if entries else NO_ENTRIES)
        logger.warning(
            "a plan broke off with %s: %s; %d leases of it were ended", type(error).__name__, error, ended
        )
