"""The cache manager of one ownership unit: a host tier, and maybe a disk tier behind it.

Contracts: `flexkv.cache.base.CacheManager`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import (
    NO_BLOCK,
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
from flexkv.cache.disk_base import DiskLimits
from flexkv.cache.disk_flow import DiskFlow
from flexkv.cache.disk_index import NO_ENTRY, DiskIndex
from flexkv.cache.disk_ops import HostSide
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import NO_ENTRIES, EntryIds, GroupLease, LeaseTable
from flexkv.cache.lookup import Lookup
from flexkv.cache.planner import Planner
from flexkv.cache.reserve import REFILL_PAGES, reserve_pages
from flexkv.cache.stats import Counters, ManagerStats
from flexkv.cache.straight_loads import StraightPages
from flexkv.cache.trails import TrailTable
from flexkv.errors import BlockRangeError, ContractError
from flexkv.storage.base import DiskTier, StoredPages
from flexkv.transfer.graph import (
    NO_DIGESTS,
    NO_READS,
    BlockIds,
    OpResult,
    ReadIds,
    SlotIds,
    TransferGraph,
    TransferOp,
)


class LocalCacheManager(CacheManager):
    """Keys to host slots, in one process. Deterministic: the only outside input is `clock`.

    Args:
        groups: the unit's KV groups; all must have the same `block_tokens`.
        policy: eviction policy of every group's slots; allowed is "lru".
        clock: seconds, never running backwards; only lease ages are read from it.
        listener: is told what becomes visible and what leaves.
        disk: the unit's disks; None for a host tier alone. Its ops are handed out by `disk.take_orders`, apart from the
            graphs for the workers, and their results come back by `disk.complete`.
        unix_s: wall clock for times to live on disk.
        siblings: with a disk, pages of other units' folders that are read too.

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
        unix_s: Callable[[], float] = time.time,
        siblings: StoredPages | None = None,
    ) -> None:
        check_groups(groups)
        check_limits(limits)
        self._specs = tuple(groups)
        self._limits = limits
        self._clock = clock
        self._listener = listener
        self._index = BlockIndex([spec.slots for spec in groups], policy)
        self._leases = LeaseTable()
        self._inflight = InflightTable()
        self._trails = TrailTable(len(groups))
        self._planner = Planner()
        self._counters = Counters()
        self._lookup = Lookup(self._specs, self._index)
        self._epoch = 0
        self._disk: DiskFlow | None = None
        if disk is not None:
            index = DiskIndex(self._specs, disk, policy, unix_s, disk_limits.ttl_s)
            self._tokens = [np.full(spec.slots, spec.block_tokens, np.int32) for spec in self._specs]
            host = HostSide(
                self._index, self._planner, self._tokens, self._say_brought_up, self._count_evicted
            )
            others = None if siblings is None else DiskIndex(self._specs, siblings, policy, unix_s)
            self._disk = DiskFlow(self._specs, host, index, disk_limits, clock, others)

    @property
    def epoch(self) -> int:
        """How often `reset` was called."""
        return self._epoch

    def stats(self) -> ManagerStats:
        return self._counters.snapshot()

    def cached_blocks(self) -> int:
        """Blocks of all groups that are visible or being stored."""
        return len(self._index)

    def free_slots(self, group: int) -> int:
        return self._index.free_slots(group)

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
        self._end_lease(request_id)
        room = self._room_for_loads()
        found = self._lookup.find(keys, start_block, tail, room)
        lease = self._lookup.lease(found, self._clock())
        reads = 0
        if self._disk is not None:
            # After the lease, which takes over what was read for this request.
            self._disk.reads.let_go(request_id)
            if not found.cut:
                looked = self._disk.look(
                    request_id, keys, start_block, found.blocks, tail, found.tail_tokens, room
                )
                reads = looked.reads
                if looked.coming is not None:
                    found, lease = self._lookup.extend(found, lease, looked.coming)
                if looked.straight is not None:
                    found, lease = self._lookup.extend_straight(found, lease, looked.straight)
        if lease.pages:
            self._leases.add(request_id, lease)
        trails = self._trails.of(request_id)
        for group, trail in enumerate(trails):
            if start_block:
                trail.put(0, self._index.find(group, keys[group][:start_block]))
            if found.blocks:
                trail.put(
                    lease.groups[group].first_block, lease.groups[group].entries[: lease.groups[group].blocks]
                )
        counters = self._counters
        counters.lookups += 1
        counters.hit_blocks += found.blocks
        counters.miss_blocks += max(0, min(len(k) for k in keys) - start_block) - found.blocks
        counters.tail_hits += found.tail_tokens > 0
        counters.cut_promises += found.cut
        return self._lookup.result(request_id, found, lease, reads)

    def waits(self, request_id: str) -> bool:
        return self._disk is not None and self._disk.waits(request_id)

    def release(self, request_id: str) -> None:
        self._end_lease(request_id)
        if self._disk is not None:
            self._disk.reads.drop(request_id)
        for trail in self._trails.pop(request_id):
            self._index.touch(trail.entries())

    def expire(self) -> int:
        expired = self._leases.older_than(self._clock() - self._limits.lease_s)
        for request_id in expired:
            self.release(request_id)
        self._counters.expired_leases += len(expired)
        if self._disk is not None:
            self._disk.expire(self._clock())
        for group in range(len(self._specs)):
            self._refill_reserve(group, REFILL_PAGES)
        return len(expired)

    def _room_for_loads(self) -> int:
        taken = self._leases.reserved_pages + self._inflight.pages[OpRole.LOAD]
        return self._limits.inflight_load_pages - taken

    def _end_lease(self, request_id: str) -> None:
        lease = self._leases.pop(request_id)
        if lease is not None:
            for group in lease.groups:
                self._index.unpin(group.entries)
                if group.straight is not None:
                    self._release_straight(group.straight)

    def _release_straight(self, pages: StraightPages) -> None:
        assert self.disk.straight is not None
        self.disk.straight.release(pages)

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
        in_host = [target[: len(group.entries)] for target, group in zip(targets, lease.groups, strict=True)]
        kept = [np.flatnonzero(target != NO_BLOCK) for target in in_host]
        graph = self._planner.load(
            (g, target[kept[g]], lease.groups[g].slots[kept[g]], _reads_of(lease.groups[g], kept[g]))
            for g, target in enumerate(in_host)
            if len(kept[g])
        )
        begun_s = self._clock() if self._disk is not None else 0.0
        for op in graph.ops:
            group = lease.groups[op.group]
            self._inflight.add(
                InflightOp(
                    op.op_id,
                    request_id,
                    OpRole.LOAD,
                    op.group,
                    op.blocks,
                    group.entries[kept[op.group]],
                    group.first_block,
                    kept[op.group],
                    self._epoch,
                    begun_s=begun_s,
                    ahead=self._inflight.pages[OpRole.LOAD],
                    coming=op.reads != 0 if len(op.reads) else None,
                )
            )
            if self._disk is not None:
                self._disk.counts.streamed += int(np.count_nonzero(op.reads))
        for group, used in zip(lease.groups, kept, strict=True):
            if len(used) < len(group.entries):
                self._index.unpin(np.delete(group.entries, used))
        straight = [
            self._begin_straight(request_id, g, group, targets[g][len(group.entries) :], begun_s)
            for g, group in enumerate(lease.groups)
            if group.straight is not None
        ]
        ops = (*graph.ops, *(op for op in straight if op is not None))
        return TransferGraph(ops) if ops else None

    def _begin_straight(
        self, request_id: str, number: int, group: GroupLease, target: BlockIds, begun_s: float
    ) -> TransferOp | None:
        """The op that loads what of a promise lies on disk to these engine blocks; lets go of what none takes."""
        pages, loads = group.straight, self.disk.straight
        assert pages is not None
        assert loads is not None
        kept = np.flatnonzero(target != NO_BLOCK)
        used = pages.at(kept)
        if len(used) < len(pages):
            loads.release(pages.at(np.setdiff1d(np.arange(len(pages)), kept)))
        if not len(used):
            return None
        op = self._planner.straight(number, target[kept], used.places, used.tags)
        self._inflight.add(
            InflightOp(
                op.op_id,
                request_id,
                OpRole.LOAD,
                number,
                op.blocks,
                used.entries,
                group.first_block,
                kept + len(group.entries),
                self._epoch,
                begun_s=begun_s,
                ahead=loads.pages,
                places=used.places,
            )
        )
        loads.begin(used)
        return op

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
        if self._disk is not None and self._disk.straight_stores is not None and not self._disk.down:
            return self._begin_straight_store(request_id, group, keys, sources, first_block, tokens, room)
        positions, entries, slots, evicted, known, dropped = self._index.insert(group, keys, room)
        self._count_evicted(group, evicted)
        self._counters.busy_pages += dropped
        stored = positions.view(np.int32)
        if not len(stored):
            return StorePlan(None, stored, known, dropped)
        if self._disk is not None:
            whole = self._specs[group].block_tokens
            self._tokens[group][slots] = whole if tokens is None else tokens
            self._disk.index.any_partial |= tokens not in (None, whole)
        all_new = len(stored) == len(sources)
        graph = self._planner.store(group, sources if all_new else sources[positions], slots)
        self._inflight.add(
            InflightOp(
                graph.ops[0].op_id,
                request_id,
                OpRole.STORE,
                group,
                graph.ops[0].blocks,
                entries,
                first_block,
                positions,
                self._epoch,
                tuple(op.op_id for op in self._inflight.of_request(request_id, OpRole.LOAD)),
            )
        )
        self._trails.of(request_id)[group].put_at(first_block, positions, entries)
        return StorePlan(graph, stored, known, dropped)

    def _begin_straight_store(
        self,
        request_id: str,
        group: int,
        keys: Keys,
        sources: BlockIds,
        first_block: int,
        tokens: int | None,
        room: int,
    ) -> StorePlan:
        """A store to disk alone, of what is on neither tier."""
        flow = self.disk
        stores = flow.straight_stores
        assert stores is not None
        known = flow.index.known(group, keys) | (self._index.find(group, keys, ready_only=False) != NO_ENTRY)
        new = np.flatnonzero(~known)
        whole = self._specs[group].block_tokens
        valid = whole if tokens is None else tokens
        flow.index.any_partial |= valid != whole
        at, entries, op = stores.begin(group, np.ascontiguousarray(keys[new]), sources[new], valid, room)
        dropped = len(new) - len(at)
        self._counters.busy_pages += dropped
        stored = new[at].astype(np.int32)
        if op is None:
            return StorePlan(None, stored, len(keys) - len(new), dropped)
        loads = tuple(load.op_id for load in self._inflight.of_request(request_id, OpRole.LOAD))
        self._inflight.add(
            InflightOp(
                op.op_id,
                request_id,
                OpRole.STORE,
                group,
                op.blocks,
                entries,
                first_block,
                stored,
                self._epoch,
                loads,
                places=op.places,
                straight_store=op,
            )
        )
        return StorePlan(TransferGraph((op,)), stored, len(keys) - len(new), dropped)

    # --- completions --------------------------------------------------------------------------------------------------

    def complete(self, rank: int, result: OpResult) -> Completion | None:
        if not 0 <= rank < self._limits.ranks:
            raise ContractError(f"rank {rank} reported; allowed are 0 to {self._limits.ranks - 1}")
        op = self._inflight.get(result.op_id)
        op.report(rank, result)
        if op.astray and op.role is OpRole.LOAD and self.disk.straight is not None:
            self.disk.straight.rest(f"rank {rank}: {result.reason}")
        if op.role is OpRole.LOAD and op.failed.any():
            self.discard_from(op.request_id, int(op.block_numbers[op.failed].min()))
        if len(op.reported) < self._limits.ranks:
            return None
        self._inflight.remove(op)
        done = self._end_load(op) if op.role is OpRole.LOAD else self._end_store(op)
        self._refill_reserve(op.group, max(len(op.entries), REFILL_PAGES))
        return done

    def _end_load(self, op: InflightOp) -> Completion:
        if op.places is None:
            self._end_load_from_host(op)
        else:
            self._end_load_from_disk(op, op.places)
        self._mark_used(op)
        if op.epoch != self._epoch:
            op.failed[:] = True
            op.reasons.append("the cache was reset while the load was in flight")
        failed_pages = int(np.count_nonzero(op.failed))
        self._counters.failed_load_pages += failed_pages
        self._counters.loaded_pages += len(op.entries) - failed_pages
        return self._completion(op, op.failed, np.empty(0, np.int32))

    def _end_load_from_disk(self, op: InflightOp, places: SlotIds) -> None:
        straight = self.disk.straight
        assert straight is not None
        if op.epoch != self._epoch:
            # What the places held was forgotten by the reset; a failure says nothing about what is there now.
            op.suspect[:] = False
        elif op.suspect.all():
            # Perhaps not the disk's fault but the way's: then the next ones would go as these did.
            straight.rest("; ".join(op.reasons) or "all of a load failed")
        straight.end(op.group, op.entries, places, op.failed, op.suspect, op.begun_s, op.ahead)

    def _end_load_from_host(self, op: InflightOp) -> None:
        if self._disk is not None:
            keys = self._index.keys_of(op.entries)
            if op.coming is not None:
                # What never came up is judged by its read, which may not have been heard of yet.
                op.suspect &= ~op.coming | self._index.ready(op.entries).view(np.bool_)
            # Also on disk: what is wrong with the page may have been written there too.
            self._disk.forget(op.group, keys[op.suspect])
            self._disk.index.used(op.group, keys[~op.suspect])
            if not op.failed.any() and op.coming is None:
                now_s = self._clock()
                self._disk.rates.load.see(op.ahead + len(op.entries), now_s - op.begun_s, now_s)
        if op.suspect.any():
            self._counters.forgotten_blocks += self._remove(op.group, op.entries[op.suspect])
        self._index.unpin(op.entries)

    def _end_store(self, op: InflightOp) -> Completion:
        good = ~op.failed & ~op.barred
        if op.epoch != self._epoch or any(load in self._inflight for load in op.waits_for):
            good[:] = False
        if op.straight_store is not None:
            return self._end_straight_store(op, op.straight_store, good)
        published = self._index.finish(op.entries, good.view(np.uint8)).view(np.bool_)
        positions = np.flatnonzero(published).astype(np.int32)
        counters = self._counters
        counters.stored_pages += len(positions)
        failed_pages = int(np.count_nonzero(op.failed))
        counters.failed_store_pages += failed_pages
        counters.discarded_pages += len(op.entries) - failed_pages - len(positions)
        if len(positions) and (self._listener is not None or self._disk is not None):
            keys = self._index.keys_of(op.entries[published])
            self._say_published(op.group, keys)
            if self._disk is not None:
                self._disk.stored(op.group, keys)
        self._mark_used(op)
        return self._completion(op, ~published, positions)

    def _end_straight_store(self, op: InflightOp, stripes: TransferOp, good: NDArray[np.bool_]) -> Completion:
        """The ranks have written their stripes: the good pages are sealed, and visible when that has ended."""
        stores = self.disk.straight_stores
        assert stores is not None
        if op.digests:
            # One row a page, of all ranks' runs side by side; a rank whose stripe is another's has reported none.
            digests = np.concatenate([op.digests[rank] for rank in sorted(op.digests)], axis=1)[good]
        else:
            good = np.zeros_like(good)
            digests = NO_DIGESTS
        stores.stripes_ended(stripes, op.entries, good, np.ascontiguousarray(digests))
        positions = np.flatnonzero(good).astype(np.int32)
        counters = self._counters
        counters.stored_pages += len(positions)
        failed_pages = int(np.count_nonzero(op.failed))
        self.disk.counts.failed_writes += failed_pages
        counters.failed_store_pages += failed_pages
        counters.discarded_pages += len(op.entries) - failed_pages - len(positions)
        return self._completion(op, ~good, positions)

    def _say_published(self, group: int, keys: Keys) -> None:
        if self._listener:
            self._listener.on_publish(group, keys)

    def _say_brought_up(self, group: int, entries: EntryIds) -> None:
        if self._listener:
            self._listener.on_publish(group, self._index.keys_of(entries))

    def _mark_used(self, op: InflightOp) -> None:
        trail = self._trails.peek(op.request_id, op.group)
        if trail is not None and trail.due():
            self._index.touch(trail.entries())

    def _completion(
        self, op: InflightOp, failed: NDArray[np.bool_], published: NDArray[np.int32]
    ) -> Completion:
        return Completion(
            op_id=op.op_id,
            request_id=op.request_id,
            role=op.role,
            group=op.group,
            blocks=op.blocks,
            failed_blocks=op.blocks[failed],
            published=published,
            reason="; ".join(op.reasons),
        )

    def _refill_reserve(self, group: int, most: int) -> None:
        """Evicts up to `most` blocks where fewer slots are free than `reserve_pages` says."""
        missing = reserve_pages(self._index.up_slots(group)) - self._index.free_slots(group)
        if missing > 0:
            self._count_evicted(group, self._index.evict(group, min(missing, most)))

    def _count_evicted(self, group: int, keys: Keys) -> None:
        self._counters.evicted_blocks += len(keys)
        if self._disk is not None and len(keys):
            self._disk.left(group, keys)
        if self._listener and len(keys):
            self._listener.on_evict(group, keys)

    def discard_from(self, request_id: str, first_block: int) -> int:
        barred = 0
        for op in self._inflight.of_request(request_id, OpRole.STORE):
            pages = (op.block_numbers >= first_block) & ~op.barred
            count = int(np.count_nonzero(pages))
            if not count:
                continue
            op.barred |= pages
            barred += count
            # Out of the map at once, so that the recomputed blocks can be stored under the same keys.
            if op.places is None:
                self._remove(op.group, op.entries[pages])
            else:
                self.disk.index.entries.remove(op.entries[pages])
        return barred

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, group: int, keys: Keys) -> int:
        self._check_group(group)
        entries = self._index.find(group, keys, ready_only=False)
        removed = self._remove(group, entries)
        if self._disk is not None:
            in_host = entries != NO_ENTRY
            self._disk.forget(group, keys[in_host])
            removed += self._disk.forget(group, keys[~in_host])
        self._counters.forgotten_blocks += removed
        return removed

    def _remove(self, group: int, entries: EntryIds) -> int:
        was_ready = self._index.ready(entries) if self._listener else None
        keys = self._index.keys_of(entries[was_ready.view(np.bool_)]) if was_ready is not None else None
        removed = int(np.count_nonzero(self._index.remove(entries)))
        if self._listener and keys is not None and len(keys):
            self._listener.on_evict(group, keys)
        return removed

    def reset(self) -> int:
        for request_id in self._leases.requests():
            self._end_lease(request_id)
        self._trails.clear()
        self._index.clear()
        if self._disk is not None:
            self._disk.reset()
        self._epoch += 1
        self._counters.resets += 1
        if self._listener:
            self._listener.on_reset(self._epoch)
        return self._epoch

    def grow(self, group: int, slots: int) -> None:
        self._check_group(group)
        if slots < 0:
            raise BlockRangeError(f"grow of group {group} to {slots} slots; allowed are 0 and more")
        self._index.grow(group, slots)

    def inflight_ops(self) -> int:
        return len(self._inflight)

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self._specs):
            raise BlockRangeError(f"group {group}; allowed are 0 to {len(self._specs) - 1}")

    def check_integrity(self) -> None:
        self._inflight.check_integrity()
        leased = [group.entries for lease in self._leases for group in lease.groups]
        straight = [
            group.straight.entries
            for lease in self._leases
            for group in lease.groups
            if group.straight is not None
        ]
        reserved = sum(map(len, (*leased, *straight)))
        if reserved != self._leases.reserved_pages:
            raise ContractError(
                f"{self._leases.reserved_pages} pages are counted as reserved, not {reserved}"
            )
        if self._room_for_loads() < 0:
            raise ContractError(f"{-self._room_for_loads()} more load pages are promised than allowed")
        pinned = [*leased, *(op.entries for op in self._inflight if op.places is None)]
        if self._disk is not None:
            straight += [op.entries for op in self._inflight if op.places is not None]
            self._disk.check_integrity(straight)
            pinned += self._disk.pinned_in_host()
        self._index.check_integrity(np.concatenate(pinned) if pinned else NO_ENTRIES)


def _reads_of(group: GroupLease, kept: NDArray[np.intp]) -> ReadIds:
    """The reads that bring the pages of a load; empty when all of them are there."""
    if group.reads is None:
        return NO_READS
    reads = group.reads[kept]
    return reads if reads.any() else NO_READS
