"""Loads from host slots to engine blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import NO_BLOCK, OpRole
from flexkv.cache.disk.flow import DiskFlow
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import GroupLease, Lease
from flexkv.cache.planner import Planner
from flexkv.cache.routes import LoadRoute
from flexkv.cache.stats import ManagerStats
from flexkv.transfer.graph import NO_READS, BlockIds, ReadIds, TransferOp


class HostLoads(LoadRoute):
    """H2D: what host memory has, or what is on its way up to it.

    Args:
        counts: of the manager; what failed loads make forgotten is counted there.
        disk: the traffic with the disks behind the host tier; None where there are none.
        clock: seconds, never running backwards; loads in front of a disk tier are measured with it.
    """

    def __init__(
        self,
        host: HostTier,
        planner: Planner,
        inflight: InflightTable,
        counts: ManagerStats,
        disk: DiskFlow | None,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._planner = planner
        self._inflight = inflight
        self._counts = counts
        self._disk = disk
        self._clock = clock

    def begin(
        self, request_id: str, lease: Lease, targets: Sequence[BlockIds], epoch: int
    ) -> list[TransferOp]:
        begun_s = self._clock() if self._disk is not None else 0.0
        plans = []
        for number, (group, target) in enumerate(zip(lease.groups, targets, strict=True)):
            target = target[: len(group.entries)]
            kept = np.flatnonzero(target != NO_BLOCK)
            if len(kept) < len(group.entries):
                self._host.index.unpin(np.delete(group.entries, kept))
            if not len(kept):
                continue
            plan = self._planner.load(number, target[kept], group.slots[kept], _reads_of(group, kept))
            self._inflight.add(
                InflightOp(
                    plan=plan,
                    request_id=request_id,
                    role=OpRole.LOAD,
                    entries=group.entries[kept],
                    first_block=group.first_block,
                    positions=kept,
                    epoch=epoch,
                    begun_s=begun_s,
                    ahead=self._inflight.pages[OpRole.LOAD],
                )
            )
            if self._disk is not None:
                self._disk.counts.streamed += int(np.count_nonzero(plan.reads))
            plans.append(plan)
        return plans

    def release(self, group: GroupLease) -> None:
        self._host.index.unpin(group.entries)

    def astray(self, reason: str) -> None:
        """Nothing to decide: there is no other way from host memory."""

    def end(self, op: InflightOp, current: bool) -> None:
        index = self._host.index
        if not current:
            # A reset forgot what it loaded; under the same keys there may be other pages by now.
            index.unpin(op.entries)
            return
        if self._disk is not None:
            coming = op.coming
            if coming is not None:
                # What never came up is judged by its read, which may not have been heard of yet.
                op.suspect &= ~coming | index.ready(op.entries).view(np.bool_)
            keys = index.keys_of(op.entries)
            # Also on disk: what is wrong with the page may have been written there too.
            self._disk.forget(op.group, keys[op.suspect & op.damaged])
            self._disk.index.used(op.group, keys[~op.suspect])
            if not op.failed.any() and coming is None:
                now_s = self._clock()
                self._disk.rates.load.see(op.ahead + len(op.entries), now_s - op.begun_s, now_s)
        if op.suspect.any():
            self._counts.forgotten_blocks += self._host.remove(op.group, op.entries[op.suspect])
        index.unpin(op.entries)


def _reads_of(group: GroupLease, kept: NDArray[np.intp]) -> ReadIds:
    """The reads that bring the pages of a load; empty when all of them are there."""
    if group.reads is None:
        return NO_READS
    reads = group.reads[kept]
    return reads if reads.any() else NO_READS
