"""Loads from the unit's own disks to engine blocks, with no page of host memory between (docs/gds.md).

Contract with the disk index: from the promise to the end of the load on every rank its entries are leased, so that
nobody writes their places. Each rank verifies what it brings against the tags; a page that fails is named to the
engine, which computes it, and is forgotten on disk where its place held something else (`Blame`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexkv.cache.base import NO_BLOCK, Keys, OpRole
from flexkv.cache.disk.base import GdsUse, WantedBlocks
from flexkv.cache.disk.index import DiskIndex
from flexkv.cache.disk.rates import DiskRates
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import DiskLease, GroupLease, Lease
from flexkv.cache.planner import Planner
from flexkv.cache.routes import LoadRoute
from flexkv.observe import get_logger
from flexkv.transfer.graph import BlockIds, TransferOp

logger = get_logger(__name__)

REST_S = 60.0
"""After a rank's lane or a disk failed pages, no page is loaded this way for so long: what hangs may end, the manager's
own lane judges the disk, and each try costs a request its hit."""


class GdsLoads(LoadRoute):
    """GDS_READ: leases pages for promises, plans their loads and takes the ends.

    Args:
        use: not NEVER.
        forgotten: as of `DiskReads`.
        rates: of loads by this way and of those through host memory; the former are measured here.

    Attributes:
        pages: being loaded.
    """

    def __init__(
        self,
        disk: DiskIndex,
        planner: Planner,
        inflight: InflightTable,
        use: GdsUse,
        rates: DiskRates,
        clock: Callable[[], float],
        forgotten: Callable[[int, Keys], object],
    ) -> None:
        self._forgotten = forgotten
        self._disk = disk
        self._planner = planner
        self._inflight = inflight
        self._use = use
        self._rates = rates
        self._clock = clock
        self._rests_until_s = -np.inf
        self.pages = 0

    # --- promises ---

    def wants(self, pages: int, queued_reads: int, now_s: float) -> bool:
        """Whether `pages` are to go this way rather than behind `queued_reads` others through host memory."""
        if now_s < self._rests_until_s:
            return False
        if self._use is GdsUse.ALWAYS:
            return True
        return self._rates.gds_is_faster(pages, self.pages, queued_reads, now_s)

    def lease(self, parts: Sequence[WantedBlocks]) -> list[DiskLease] | None:
        """The pages of all groups, if every one is on the unit's own disks; else None, and nothing is leased.

        What is also in host memory is read from disk all the same: a promise has one change from host to disk at most.
        """
        found = []
        for part in parts:
            entries = part.entries
            if entries is None:
                entries = self._disk.leading(part.group, part.keys)
            if len(entries) < len(part):
                return None
            found.append(entries)
        return [
            DiskLease(entries, *self._disk.begin_read(part.group, part.keys, entries))
            for part, entries in zip(parts, found, strict=True)
        ]

    def let_go(self, pages: DiskLease) -> None:
        """Ends the lease of pages that are not loaded."""
        self._disk.entries.unpin(pages.entries)

    def release(self, group: GroupLease) -> None:
        if group.on_disk is not None:
            self.let_go(group.on_disk)

    # --- loads ---

    def begin(
        self, request_id: str, lease: Lease, targets: Sequence[BlockIds], epoch: int
    ) -> list[TransferOp]:
        begun_s = self._clock()
        plans = []
        for number, (group, target) in enumerate(zip(lease.groups, targets, strict=True)):
            pages = group.on_disk
            if pages is None:
                continue
            in_host = len(group.entries)
            target = target[in_host:]
            kept = np.flatnonzero(target != NO_BLOCK)
            used = pages.at(kept)
            if len(used) < len(pages):
                self.let_go(pages.at(np.setdiff1d(np.arange(len(pages)), kept)))
            if not len(used):
                continue
            plan = self._planner.gds_load(number, target[kept], used.places, used.tags)
            self._inflight.add(
                InflightOp(
                    plan=plan,
                    request_id=request_id,
                    role=OpRole.LOAD,
                    entries=used.entries,
                    first_block=group.first_block,
                    positions=kept + in_host,
                    epoch=epoch,
                    begun_s=begun_s,
                    ahead=self.pages,
                )
            )
            self.pages += len(used)
            plans.append(plan)
        return plans

    def astray(self, reason: str) -> None:
        self._rest(reason)

    def end(self, op: InflightOp, current: bool) -> None:
        if not current:
            # What the places held was forgotten by the reset; a failure says nothing about what is there now.
            op.suspect[:] = op.withheld[:] = False
        elif op.suspect.all():
            # Perhaps not the disk's fault but the way's: then the next ones would go as these did.
            self._rest("; ".join(op.reasons) or "all of a load failed")
        self.pages -= len(op.entries)
        now_s = self._clock()
        if not op.failed.any():
            self._rates.gds.see(op.ahead + len(op.entries), now_s - op.begun_s, now_s)
        counts = self._disk.counts
        counts.gds_read += int(np.count_nonzero(~op.failed))
        # What a disk does not give is kept: the manager's own lane judges the disk. The operator hears of it at once.
        of_disk = op.suspect | op.withheld
        counts.failed_reads += int(np.count_nonzero(of_disk))
        counts.unread += int(np.count_nonzero(op.failed & ~of_disk))
        lost = self._disk.entries.keys_of(op.entries[op.suspect])
        self._disk.end_read(op.group, op.entries, op.plan.places, op.suspect)
        if len(lost):
            self._forgotten(op.group, lost)

    def _rest(self, reason: str) -> None:
        """A rank's lane or a disk failed, or nothing was brought: for a while pages come up through host memory."""
        now_s = self._clock()
        if now_s >= self._rests_until_s:
            logger.warning("pages on disk go through host memory for the next %.0f s: %s", REST_S, reason)
        self._rests_until_s = max(self._rests_until_s, now_s + REST_S)

    def stop(self, reason: str) -> None:
        """A rank has no lane to the disks: pages come up through host memory from now on."""
        if self._rests_until_s < np.inf:
            logger.warning("disk.gds=auto: blocks on disk are loaded through host memory: %s", reason)
        self._rests_until_s = np.inf
