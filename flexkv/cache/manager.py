"""The cache manager of one ownership unit: a host tier, and maybe a disk tier behind it.

Contracts: `flexkv.cache.base.CacheManager`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import (
    CacheListener,
    CacheManager,
    Completion,
    GroupSpec,
    Keys,
    ManagerLimits,
    MatchResult,
    OpRole,
    StorePlan,
    TailCandidates,
)
from flexkv.cache.checks import as_block_ids, check_groups, check_limits
from flexkv.cache.disk.base import DiskLimits
from flexkv.cache.disk.flow import DiskFlow
from flexkv.cache.disk.index import DiskIndex
from flexkv.cache.disk.stored_index import StoredIndex
from flexkv.cache.failed_loads import FailedLoads
from flexkv.cache.host_loads import HostLoads
from flexkv.cache.host_stores import HostStores
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import NO_ENTRIES, NO_ENTRY, LeaseTable
from flexkv.cache.lookup import Lookup
from flexkv.cache.op_log import OpLog
from flexkv.cache.planner import Planner
from flexkv.cache.reserve import REFILL_PAGES
from flexkv.cache.route_table import RouteTable
from flexkv.cache.routes import StoreOffer
from flexkv.cache.stats import ManagerStats
from flexkv.cache.trails import TrailTable
from flexkv.errors import BlockRangeError, ContractError
from flexkv.observe import unix_now_s
from flexkv.storage.base import DiskTier, StoredPages
from flexkv.transfer.graph import BlockIds, OpResult, TransferGraph


class LocalCacheManager(CacheManager):
    """Keys to host slots and places on disk, in one process. Deterministic: the only outside inputs are the clocks.

    Args:
        groups: the unit's KV groups; all must have the same `block_tokens`.
        policy: eviction policy of every group's slots; allowed is "lru".
        clock: seconds, never running backwards; ages of leases and waits, and what disks are measured by.
        listener: is told what becomes visible and what leaves.
        disk: the unit's disks; None for a host tier alone. Its ops are handed out by `disk.take_orders`, apart from the
            graphs for the workers, and their results come back by `disk.complete`.
        unix_s: wall clock for times to live on disk.
        siblings: with a disk, pages of other units' folders that are read too.

    Attributes:
        host: the pages in host memory.
        failed_loads: what is not promised again to the requests that it failed.

    Raises:
        ConfigError: a group or limit is out of range; names it.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        limits: ManagerLimits = ManagerLimits(),  # noqa: B008 - frozen
        *,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        listener: CacheListener | None = None,
        disk: DiskTier | None = None,
        disk_limits: DiskLimits = DiskLimits(),  # noqa: B008 - frozen
        unix_s: Callable[[], float] = unix_now_s,
        siblings: StoredPages | None = None,
    ) -> None:
        check_groups(groups)
        check_limits(limits)
        self._specs = tuple(groups)
        self._limits = limits
        self._clock = clock
        self._listener = listener
        self._counts = ManagerStats()
        self._leases = LeaseTable()
        self._inflight = InflightTable()
        self._trails = TrailTable(len(groups))
        self.failed_loads = FailedLoads(limits.rest_s, clock)
        self._log = OpLog(clock)
        self._epoch = 0
        self.host = HostTier(self._specs, policy, self._counts, listener)
        self._lookup = Lookup(self._specs, self.host.index)
        planner = Planner()
        self._disk: DiskFlow | None = None
        if disk is not None:
            own = DiskIndex(self._specs, disk, policy, unix_s, disk_limits.ttl_s)
            others = None if siblings is None else StoredIndex(self._specs, siblings, policy, unix_s)
            self._disk = DiskFlow(
                self._specs, self.host, planner, self._inflight, own, disk_limits, clock, self._log, others
            )
        loads = HostLoads(self.host, planner, self._inflight, self._counts, self._disk, clock)
        stores = HostStores(self._specs, self.host, planner, self._inflight, self._trails, self._disk)
        self._routes = RouteTable(loads, stores, self._disk)

    @property
    def epoch(self) -> int:
        """How often `reset` was called."""
        return self._epoch

    def stats(self) -> ManagerStats:
        """What was counted so far: a copy, which does not change any more."""
        return replace(self._counts)

    def cached_blocks(self) -> int:
        """Blocks of all groups that are visible or being stored."""
        return len(self.host.index)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are visible in host memory or on disk, bool [keys]. Leases and brings up nothing."""
        there: NDArray[np.bool_] = self.host.index.find(group, keys) != NO_ENTRY
        return there if self._disk is None else there | self._disk.index.present(group, keys)

    def free_slots(self, group: int) -> int:
        return self.host.index.free_slots(group)

    def leased_pages(self, request_id: str) -> int:
        """Pages that the request's lookup lease holds."""
        lease = self._leases.get(request_id)
        return 0 if lease is None else lease.pages

    @property
    def disk(self) -> DiskFlow:
        """The traffic with the disks, for what drives it.

        Raises:
            ContractError: there is no disk tier.
        """
        if self._disk is None:
            raise ContractError("this manager has no disk tier")
        return self._disk

    # --- lookups ------------------------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_block: int,
        tail: Sequence[TailCandidates | None] | None = None,
    ) -> MatchResult:
        self._lookup.check(keys, start_block, tail)
        promised = self._leases.get(request_id) is not None
        self._end_lease(request_id)
        asked = max(0, min(len(k) for k in keys) - start_block)
        failed = self.failed_loads.of(request_id)
        if failed is not None:
            keys, tail = failed.still_promised(keys, start_block), None
        elif self.failed_loads.rests and not promised:
            keys, tail = [group_keys[:start_block] for group_keys in keys], None
        room = self._room_for_loads()
        found = self._lookup.find(keys, start_block, tail, room)
        lease = self._lookup.lease(found, self._clock())
        reads = 0
        if self._disk is not None:
            # After the lease, which takes over what was read for this request.
            self._disk.reads.let_go(request_id)
            if not (found.cut or self._disk.down):
                looked = self._disk.lookup.look(
                    request_id,
                    keys,
                    start_block,
                    found.blocks,
                    tail,
                    found.tail_tokens,
                    room,
                    where_it_lies=failed is None or not failed.from_disk,
                )
                reads = looked.reads
                if looked.coming is not None:
                    found, lease = self._lookup.extend(found, lease, looked.coming)
                if looked.on_disk is not None:
                    found, lease = self._lookup.extend_on_disk(found, lease, looked.on_disk)
        if lease.pages:
            self._leases.add(request_id, lease)
        find = self.host.index.find
        before = [find(g, k[:start_block]) for g, k in enumerate(keys)] if start_block else ()
        self._trails.put_lookup(request_id, before, lease.groups if found.blocks else ())
        self._counts.add_lookup(asked, found.blocks, found.tail_tokens > 0, found.cut)
        result = self._lookup.result(request_id, found, lease, reads)
        self._log.looked_up(result, asked)
        return result

    def waits(self, request_id: str) -> bool:
        return self._disk is not None and self._disk.reads.holds_up(request_id)

    def release(self, request_id: str) -> None:
        self._end_lease(request_id)
        if self._disk is not None:
            self._disk.reads.drop(request_id)
        for trail in self._trails.pop(request_id):
            self.host.index.touch(trail.entries())

    def end_request(self, request_id: str) -> None:
        self.release(request_id)
        self.failed_loads.end(request_id)
        self.abandon_loads(request_id)

    def abandon_loads(self, request_id: str) -> None:
        for op in self._inflight.of_request(request_id, OpRole.LOAD):
            op.abandoned = True

    def expire(self) -> int:
        expired = self._leases.older_than(self._clock() - self._limits.lease_s)
        for request_id in expired:
            self.release(request_id)
        self._counts.expired_leases += len(expired)
        self._log.flush()
        if self._disk is not None:
            self._disk.reads.expire(self._clock())
        for group in range(len(self._specs)):
            self.host.refill_reserve(group, REFILL_PAGES)
        return len(expired)

    def _room_for_loads(self) -> int:
        taken = self._leases.reserved_pages + self._inflight.pages[OpRole.LOAD]
        return self._limits.inflight_load_pages - taken

    def _end_lease(self, request_id: str) -> None:
        lease = self._leases.pop(request_id)
        if lease is not None:
            self._routes.release(lease)

    # --- loads and stores ---------------------------------------------------------------------------------------------

    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        lease = self._leases.get(request_id)
        if lease is None:
            if not any(len(b) for b in blocks):
                return None
            raise ContractError(
                f"begin_load: request {request_id!r} has no lease (released, expired or reset?)"
            )
        targets = self._lookup.load_targets(request_id, lease, blocks, tail)
        self._leases.pop(request_id)
        if self._disk is not None:
            self._disk.reads.drop(request_id)
        ops = self._routes.begin_load(request_id, lease, targets, self._epoch)
        for op in ops:
            self._inflight.get(op.op_id).load = ops[0].op_id
        self._log.load_begun(request_id, ops)
        return TransferGraph(tuple(ops)) if ops else None

    def begin_store(
        self,
        request_id: str,
        group: int,
        keys: Keys,
        blocks: BlockIds,
        first_block: int,
        tokens: int | None = None,
    ) -> StorePlan:
        self._check_group(group)
        sources = as_block_ids(blocks, f"begin_store of request {request_id!r}")
        if len(sources) != len(keys):
            raise ContractError(f"begin_store: {len(keys)} keys and {len(sources)} blocks")
        if first_block < 0:
            raise BlockRangeError(f"begin_store: first block {first_block}; allowed are 0 and more")
        room = max(0, self._limits.inflight_store_pages - self._inflight.pages[OpRole.STORE])
        whole = self._specs[group].block_tokens
        valid = whole if tokens is None else tokens
        if not 1 <= valid <= whole:
            raise ContractError(
                f"begin_store of request {request_id!r}: tokens={valid}; allowed are 1 to {whole}, a block's"
            )
        offer = StoreOffer(request_id, group, keys, sources, first_block, valid)
        plan = self._routes.for_stores.begin(offer, room, self._epoch)
        self._counts.busy_pages += plan.dropped
        return plan

    # --- completions --------------------------------------------------------------------------------------------------

    def complete(self, rank: int, result: OpResult) -> Completion | None:
        if not 0 <= rank < self._limits.ranks:
            raise ContractError(f"rank {rank} reported; allowed are 0 to {self._limits.ranks - 1}")
        op = self._inflight.get(result.op_id)
        op.report(rank, result)
        if op.role is OpRole.LOAD:
            if op.astray:
                self._routes.load(op).astray(f"rank {rank}: {result.reason}")
            if op.failed.any():
                self.discard_from(op.request_id, int(op.block_numbers[op.failed].min()))
                if op.epoch == self._epoch:
                    self.failed_loads.note(op)
        if len(op.reported) < self._limits.ranks:
            return None
        self._inflight.remove(op)
        self._log.ended(op, expected=op.abandoned or op.epoch != self._epoch)
        done = self._end_load(op) if op.role is OpRole.LOAD else self._end_store(op)
        self.host.refill_reserve(op.group, max(len(op.entries), REFILL_PAGES))
        return done

    def _end_load(self, op: InflightOp) -> Completion:
        current = op.epoch == self._epoch
        self._routes.load(op).end(op, current)
        self._mark_used(op)
        if not current:
            op.failed[:] = True
            op.reasons.append("the cache was reset while the load was in flight")
        failed_pages = int(np.count_nonzero(op.failed))
        self._counts.failed_load_pages += failed_pages
        self._counts.loaded_pages += len(op.entries) - failed_pages
        return op.completion(op.failed, np.empty(0, np.int32))

    def _end_store(self, op: InflightOp) -> Completion:
        good = ~op.failed & ~op.barred
        if op.epoch != self._epoch or any(load in self._inflight for load in op.waits_for):
            good[:] = False
        published = self._routes.store(op).end(op, good)
        self._mark_used(op)
        positions = np.flatnonzero(published).astype(np.int32)
        self._counts.add_store(len(op.entries), int(np.count_nonzero(op.failed)), len(positions))
        return op.completion(~published, positions)

    def _mark_used(self, op: InflightOp) -> None:
        trail = self._trails.peek(op.request_id, op.group)
        if trail is not None and trail.due():
            self.host.index.touch(trail.entries())

    def discard_from(self, request_id: str, first_block: int) -> int:
        barred = 0
        for op in self._inflight.of_request(request_id, OpRole.STORE):
            pages = (op.block_numbers >= first_block) & ~op.barred
            count = int(np.count_nonzero(pages))
            if not count:
                continue
            op.barred |= pages
            barred += count
            self._routes.store(op).bar(op, pages)
        return barred

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, group: int, keys: Keys) -> int:
        self._check_group(group)
        entries = self.host.index.find(group, keys, ready_only=False)
        removed = self.host.remove(group, entries)
        if self._disk is not None:
            in_host = entries != NO_ENTRY
            self._disk.forget(group, keys[in_host])
            removed += self._disk.forget(group, keys[~in_host])
        self._counts.forgotten_blocks += removed
        return removed

    def reset(self) -> int:
        for request_id in self._leases.requests():
            self._end_lease(request_id)
        self._trails.clear()
        self.host.index.clear()
        if self._disk is not None:
            self._disk.reset()
        self._epoch += 1
        self._counts.resets += 1
        if self._listener:
            self._listener.on_reset(self._epoch)
        return self._epoch

    def grow(self, group: int, slots: int) -> None:
        self._check_group(group)
        if slots < 0:
            raise BlockRangeError(f"grow of group {group} to {slots} slots; allowed are 0 and more")
        self.host.index.grow(group, slots)

    def inflight_ops(self) -> int:
        return len(self._inflight)

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self._specs):
            raise BlockRangeError(f"group {group}; allowed are 0 to {len(self._specs) - 1}")

    def flush_log(self) -> None:
        """At the end: says how many failures were not named."""
        self._log.flush(at_end=True)

    def check_integrity(self) -> None:
        self._inflight.check_integrity()
        self._leases.check_integrity()
        if self._room_for_loads() < 0:
            raise ContractError(f"{-self._room_for_loads()} more load pages are promised than allowed")
        groups = [group for lease in self._leases for group in lease.groups]
        in_host = [group.entries for group in groups]
        in_host += [op.entries for op in self._inflight if not op.in_disk_index]
        if self._disk is not None:
            on_disk = [group.on_disk.entries for group in groups if group.on_disk is not None]
            on_disk += [op.entries for op in self._inflight if op.in_disk_index]
            self._disk.check_integrity(on_disk)
            in_host += self._disk.pinned_in_host()
        self.host.index.check_integrity(np.concatenate(in_host) if in_host else NO_ENTRIES)
