"""How pages are loaded straight from the unit's own disks to engine blocks, bypassing host memory (docs/gds.md).

Contract with the tier: entries are pinned from the promise to the end of the load on every rank, so that their slots
are not rewritten. Each rank verifies the pages that it reads against their tags. Pages that fail are reported to the
engine. The tier forgets a failed page if the failure puts its content in doubt (`STRAIGHT_MARKS` in `ledger/ops.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from flexkv.cache.base import NO_BLOCK, EntryIds, OpRole
from flexkv.cache.ledger.leases import GroupLease, Lease, StraightPages
from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.tiers.disk.pages import DiskPages
from flexkv.cache.tiers.routes import StraightLoads
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import NO_PLACES, BlockIds, OpKind, Priority, SlotIds, TransferOp

logger = get_logger(__name__)

REST_S = 60.0
"""Seconds for which this route is not used after pages failed because of a rank's lane or a disk. Meanwhile a hang may
end, and the manager's own reads from the disk show whether it is bad. Each further failure would cost a request its
hit."""


class GdsUse(Enum):
    """When pages on disk are loaded straight to engine blocks, without passing through host memory."""

    NEVER = "never"
    WHERE_FASTER = "where_faster"
    """Pages are loaded straight if that is faster than through host memory, according to recent measurements."""
    ALWAYS = "always"


class GdsLoads(StraightLoads):
    """Plans straight loads (GDS_READ ops) of the part of a promise that is on the disks, records their results, and
    measures their times.

    Args:
        use: WHERE_FASTER or ALWAYS.
    """

    def __init__(self, disk: DiskPages, context: TierContext, use: GdsUse) -> None:
        self._disk = disk
        self._context = context
        self._use = use
        self._rests_until_s = -np.inf

    @property
    def pages(self) -> int:
        return self._context.tables.ops.pages(OpRole.LOAD, self._context.tier)

    # --- promises ---

    def _is_resting(self, now_s: float) -> bool:
        """Whether the route is out of use for now because of a failure."""
        return now_s < self._rests_until_s

    def wants(self, pages: int, queued_fetches: int) -> bool:
        now_s = self._context.tables.clock()
        if self._is_resting(now_s):
            return False
        if self._use is GdsUse.ALWAYS:
            return True
        return self._context.tables.cost.straight_is_faster(
            self._context.tier, pages, self.pages, queued_fetches, now_s
        )

    def lease(self, group: int, entries: EntryIds, places: SlotIds) -> StraightPages:
        return StraightPages(self._context.tier, entries, places, self._disk.tags_of(group, places))

    def keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        if self._is_resting(self._context.tables.clock()):
            return False
        return self._disk.presence.count_ready(group, keys, pages.entries) == len(pages)

    def release_share(self, group: GroupLease) -> None:
        if group.straight is not None:
            self._disk.presence.unpin(group.straight.entries)

    # --- loads ---

    def begin_load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> list[TransferOp]:
        ops = self._context.tables.ops
        plans = []
        for number, (group, target) in enumerate(zip(lease.groups, targets, strict=True)):
            pages = group.straight
            if pages is None:
                continue
            in_host = len(group.entries)
            target = target[in_host:]
            kept = np.flatnonzero(target != NO_BLOCK)
            used = pages.at(kept)
            if len(used) < len(pages):
                self._disk.presence.unpin(pages.at(np.setdiff1d(np.arange(len(pages)), kept)).entries)
            if not len(used):
                continue
            plan = TransferOp(
                ops.next_id(),
                OpKind.GDS_READ,
                number,
                Priority.LOAD,
                target[kept],
                NO_PLACES,
                places=used.places,
                tags=used.tags,
            )
            ops.add(
                RankOp(
                    plan=plan,
                    tier=self._context.tier,
                    request_id=request_id,
                    role=OpRole.LOAD,
                    entries=used.entries,
                    first_block=group.first_block,
                    positions=kept + in_host,
                    epoch=self._context.tables.epoch,
                    ahead=self.pages,
                )
            )
            plans.append(plan)
        return plans

    def source_failed(self, reason: str) -> None:
        self._rest(reason)

    def end_load(self, op: RankOp, current: bool) -> None:
        if not current:
            # The reset removed the pages in these slots, so a failure says nothing about the pages that are in them
            # now.
            op.suspect[:] = op.withheld[:] = False
        elif op.suspect.all():
            # If every page is suspect, the cause may be the route rather than the pages, and the next loads may fail
            # too.
            self._rest("; ".join(op.reasons) or "all of a load failed")
        now_s = self._context.tables.clock()
        if not op.failed.any():
            self._context.tables.cost.straight(op.tier).see(op.ahead + op.pages, now_s - op.begun_s, now_s)
        counts = self._disk.counts
        counts.gds_read += int(np.count_nonzero(~op.failed))
        # Suspect and withheld pages count as failed reads, but only suspect ones are removed. A withheld page, which
        # the disk did not deliver, stays: if the disk is bad, the manager's own reads find that out.
        of_disk = op.suspect | op.withheld
        counts.failed_reads += int(np.count_nonzero(of_disk))
        counts.unread += int(np.count_nonzero(op.failed & ~of_disk))
        lost = self._disk.presence.keys_of(op.entries[op.suspect])
        self._disk.end_use(op.group, op.entries, op.plan.places, op.suspect)
        if len(lost):
            self._context.tables.reactions.forgotten(op.tier, op.group, lost)

    def _rest(self, reason: str) -> None:
        """Takes this route out of use for REST_S seconds, because a rank's lane or a disk failed or a load brought no
        page. Until then pages are loaded through host memory.
        """
        now_s = self._context.tables.clock()
        if now_s >= self._rests_until_s:
            logger.warning("pages on disk go through host memory for the next %.0f s: %s", REST_S, reason)
        self._rests_until_s = max(self._rests_until_s, now_s + REST_S)

    def stop(self, reason: str) -> None:
        if self._rests_until_s < np.inf:
            logger.warning("disk.gds=auto: blocks on disk are loaded through host memory: %s", reason)
        self._rests_until_s = np.inf
