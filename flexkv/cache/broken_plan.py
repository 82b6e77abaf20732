"""What becomes of a plan that breaks off: an allocation failed, or a rule of the manager's own was broken.

A plan leases entries, gives slots and enters ops in tables, one after the other, and an error may come between any two.
So nothing is undone step by step: the tables are the truth, ops that nobody was given leave them, and every lease that
no table names is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexkv.cache.ids import NO_ENTRIES, EntryIds
from flexkv.cache.ops import OpTable
from flexkv.cache.outbox import Outbox
from flexkv.cache.requests import RequestTable
from flexkv.cache.tier import Tier
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId

logger = get_logger(__name__)


class BrokenPlans:
    """Of one manager.

    Args:
        tiers: by number.
        leased: of each tier, the entries that leases, waits and ops in the tables name, each once a lease.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        ops: OpTable,
        outbox: Outbox,
        requests: RequestTable,
        leased: Callable[[], list[list[EntryIds]]],
    ) -> None:
        self._tiers = tiers
        self._ops = ops
        self._outbox = outbox
        self._requests = requests
        self._leased = leased

    def undo(self, last: OpId, error: BaseException) -> None:
        """Forgets what a plan made that began after op `last` and ended with `error`. O(all entries).

        Fetches that wait to be handed out stay: they are whole, and what they bring is worth having.
        """
        self._ops.drop_after(last, self._outbox.op_ids)
        self._requests.recount({op.op_id for op in self._ops})
        ended = 0
        for tier, entries in zip(self._tiers, self._leased(), strict=True):
            ended += tier.presence.keep_leases(np.concatenate(entries) if entries else NO_ENTRIES)
        logger.warning(
            "a plan broke off with %s: %s; %d leases of it were ended", type(error).__name__, error, ended
        )
