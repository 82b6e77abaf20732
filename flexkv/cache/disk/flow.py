"""The disk tier behind a manager's host tier: brings up what a lookup finds there, and writes what is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexkv.cache.base import GroupSpec, Keys
from flexkv.cache.checks import good_pages
from flexkv.cache.disk.base import DiskCounts, DiskLimits, GdsUse
from flexkv.cache.disk.gds_loads import GdsLoads
from flexkv.cache.disk.gds_stores import GdsStores
from flexkv.cache.disk.index import DiskIndex
from flexkv.cache.disk.lookup import DiskLookup
from flexkv.cache.disk.rates import DiskRates
from flexkv.cache.disk.reads import DiskReads
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.disk.writes import DiskWrites
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightTable
from flexkv.cache.leases import NO_ENTRIES, NO_ENTRY, EntryIds
from flexkv.cache.op_log import OpLog
from flexkv.cache.planner import Planner
from flexkv.transfer.graph import OpKind, OpResult, OpStatus, TransferGraph


class DiskFlow:
    """One unit's traffic with its disks. Driven by its manager; never blocks but in `reset`.

    Args:
        inflight: the ranks' ops, to which the loads and stores that need no page of host memory are added.
        clock: seconds, never running backwards; the waits of requests are measured with it.
        log: is told of reads and writes that failed.
        siblings: pages of other units' folders; None where there are none.

    Attributes:
        gds_loads: loads without a page of host memory; None where there are none.
        gds_stores: stores without a page of host memory; None where stores go to host memory.
        down: why the disks cannot be used any more; empty while they can.

    Raises:
        ConfigError: a limit is out of range; names it.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        host: HostTier,
        planner: Planner,
        inflight: InflightTable,
        disk: DiskIndex,
        limits: DiskLimits,
        clock: Callable[[], float],
        log: OpLog,
        siblings: StoredIndex | None = None,
    ) -> None:
        limits.check()
        self._log = log
        self._groups = len(specs)
        self._host = host
        self._orders: list[TransferGraph] = []
        self.index = disk
        self.siblings = siblings
        self._indexes = (disk,) if siblings is None else (disk, siblings)
        self.rates = DiskRates()
        self.reads = DiskReads(
            host, planner, self._indexes, limits, self._orders, self.rates, clock, self._write_again
        )
        self.writes = DiskWrites(host, planner, disk, limits, self._orders)
        self.gds_loads: GdsLoads | None = None
        if limits.gds_loads is not GdsUse.NEVER:
            self.gds_loads = GdsLoads(
                disk, planner, inflight, limits.gds_loads, self.rates, clock, self._write_again
            )
        self.gds_stores: GdsStores | None = None
        if limits.gds_stores:
            self.gds_stores = GdsStores(host, disk, planner, inflight, self._orders, limits.write_pages)
        self.lookup = DiskLookup(
            specs, host, self._indexes, limits, self.rates, self.reads, self.gds_loads, clock
        )
        self.down = ""
        host.on_evicted = self.evicted

    @property
    def counts(self) -> DiskCounts:
        return self.index.counts

    @property
    def moving(self) -> bool:
        """Whether a read or write is in flight."""
        seals = 0 if self.gds_stores is None else len(self.gds_stores)
        return bool(len(self.reads.ops) or len(self.writes.ops) or seals)

    @property
    def busy(self) -> bool:
        """Whether something is in flight, or waits to be written and can be."""
        return self.moving or bool(self._orders or self.reads.sibling_orders) or self._may_write()

    def _may_write(self) -> bool:
        return not self.down and self.writes.waiting_pages > 0

    def take_orders(self) -> list[TransferGraph]:
        """The graphs planned since the last call, to be submitted in this order."""
        orders = self._orders[:]
        self._orders.clear()
        return orders

    def take_sibling_orders(self) -> list[TransferGraph]:
        """The same for reads of siblings' pages."""
        orders = self.reads.sibling_orders[:]
        self.reads.sibling_orders.clear()
        return orders

    # --- what happens in host memory ---

    def stored(self, group: int, keys: Keys) -> None:
        """These pages became visible in host memory by a store."""
        if not self.down:
            self.writes.offer(group, keys)

    def _write_again(self, group: int, keys: Keys) -> None:
        """These pages are not on disk after all: what host memory has of them was taken for written."""
        there = self._host.index.find(group, keys) != NO_ENTRY
        if there.any():
            self.stored(group, keys[there])

    def evicted(self, group: int, keys: Keys) -> None:
        """These pages left host memory to make room."""
        known = np.zeros(len(keys), np.bool_)
        for index in self._indexes:
            known |= index.known(group, keys)
        self.counts.lost += int(np.count_nonzero(~known))

    def forget(self, group: int, keys: Keys) -> int:
        """These pages hold something else than they should; returns how many were on disk."""
        return sum(index.forget(group, keys) for index in self._indexes)

    # --- ends ---

    def pump(self) -> None:
        """Plans the writes that may be planned now."""
        if not self.down:
            self.writes.pump(self._groups, idle=not len(self.reads.ops))

    def offer_all(self) -> None:
        """What is in host memory, not leased and not on disk is to be written, whatever the mode."""
        if not self.down:
            self.writes.offer_all(self._groups)

    def unwritten(self) -> int:
        """Pages in host memory that are not on disk, leased ones among them."""
        return self.writes.unwritten(self._groups)

    def complete(self, result: OpResult) -> None:
        """Takes the terminal result of a read or write.

        Raises:
            KeyError: no such op is in flight.
        """
        if result.status is OpStatus.LANE_DOWN:
            self.go_down(result.reason or "the disk lane is down")
        if result.status is not OpStatus.OK:
            self._say_failed(result)
        if self.gds_stores is not None and result.op_id in self.gds_stores:
            self.gds_stores.complete(result)
        else:
            (self.reads if result.op_id in self.reads.ops else self.writes).complete(result)

    def _say_failed(self, result: OpResult) -> None:
        waiters: set[str] = set()
        if self.gds_stores is not None and result.op_id in self.gds_stores:
            kind, pages = OpKind.DISK_SEAL, self.gds_stores.sealed_pages(result.op_id)
        elif result.op_id in self.reads.ops:
            read = self.reads.ops.get(result.op_id)
            kind, pages, waiters = OpKind.DISK_READ, len(read.host), read.waiters
        else:
            kind, pages = OpKind.DISK_WRITE, len(self.writes.ops.get(result.op_id).host)
        failed = pages - int(np.count_nonzero(good_pages(result, pages)))
        self._log.disk_op_failed(result.op_id, kind, failed, pages, result.reason, waiters)

    def go_down(self, reason: str) -> None:
        """The disks cannot be used any more: what they hold is a miss, and nothing is written."""
        self.down = self.down or reason
        self.writes.reset()

    def reset(self) -> None:
        """Everything on disk becomes a miss, durably; what is in flight ends without becoming visible."""
        self.reads.reset()
        self.writes.reset()
        for index in self._indexes:
            index.reset()

    # --- integrity ---

    def pinned_in_host(self) -> list[EntryIds]:
        """What ops and waiting requests pin in the host index."""
        return [*self.reads.pinned_in_host(), *(op.host for op in self.writes.ops)]

    def check_integrity(self, leased: Sequence[EntryIds] = ()) -> None:
        """
        Args:
            leased: entries of the unit's own disks that promises and the ranks' ops lease, each once.

        Raises:
            ContractError: an invariant of the disk index is broken.
        """
        for index in self._indexes:
            pinned = [
                op.disk for ops in (self.reads.ops, self.writes.ops) for op in ops if op.source is index
            ]
            if index is self.index:
                pinned += [*leased, *(self.gds_stores.pinned() if self.gds_stores is not None else ())]
            index.entries.check_integrity(np.concatenate(pinned) if pinned else NO_ENTRIES)
