"""Managers whose disk tier breaks one rule each. The simulation must catch every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.disk_lookup import Coming
from flexkv.cache.disk_reads import DiskReads
from flexkv.cache.disk_writes import DiskWrites
from flexkv.cache.leases import NO_ENTRY
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import NO_READS, OpResult, OpStatus, TransferGraph, TransferOp


class PromisesBeforeVerified(LocalCacheManager):
    """What is being read counts as a hit at once."""

    def match(self, *args: Any, **kwargs: Any) -> Any:
        result = super().match(*args, **kwargs)
        for op in self.disk.reads.ops:
            if self.host.index.ready(op.host).all():
                continue
            self.host.index.finish(op.host, np.ones(len(op.host), np.uint8))
            self.host.index.pin(op.host)
        return result


class PublishesFailedReads(LocalCacheManager):
    """A page that did not verify is taken as good."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reads = self.disk.reads

        def complete(result: OpResult) -> None:
            status = OpStatus.OK if result.status is OpStatus.FAILED else result.status
            failed = np.empty(0, np.int32) if status is OpStatus.OK else result.failed
            DiskReads.complete(reads, OpResult(result.op_id, status, failed))

        reads.complete = complete  # type: ignore[method-assign]


class PublishesOnDiskBeforeTheWriteEnds(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, begin_write = self.disk.index, self.disk.index.begin_write

        def early(group: int, keys: Any, tokens: Any, room: int) -> Any:
            planned = begin_write(group, keys, tokens, room)
            disk.end_write(group, planned[1], np.ones(len(planned[1]), np.bool_))
            disk.entries.pin(planned[1])
            return planned

        disk.begin_write = early  # type: ignore[method-assign]


class PublishesFailedWrites(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, end_write = self.disk.index, self.disk.index.end_write
        disk.end_write = (  # type: ignore[method-assign]
            lambda group, entries, good: end_write(group, entries, np.ones_like(good))
        )


class ReusesSlotsBeingWritten(LocalCacheManager):
    """Host slots may be evicted while a write to disk still reads them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        writes, index = self.disk.writes, self.host.index

        def pump(groups: int, idle: bool) -> None:
            before = {op.op_id for op in writes.ops}
            DiskWrites.pump(writes, groups, idle)
            for op in writes.ops:
                if op.op_id not in before:
                    index.unpin(op.host)

        def complete(result: OpResult) -> None:
            op = writes.ops.pop(result.op_id)
            self.disk.index.end_write(op.group, op.disk, op.good(result))

        writes.pump = pump  # type: ignore[method-assign]
        writes.complete = complete  # type: ignore[method-assign]


class ReusesPlacesBeingRead(LocalCacheManager):
    """Places may be evicted and written again while a read still needs them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, begin_read = self.disk.index, self.disk.index.begin_read

        def unpinned(group: int, keys: Any, entries: Any) -> Any:
            planned = begin_read(group, keys, entries)
            disk.entries.unpin(entries)
            return planned

        def end_read(group: int, entries: Any, places: Any, suspect: Any) -> None:
            if suspect.any():
                disk.remove(group, entries[suspect])

        disk.begin_read = unpinned  # type: ignore[method-assign]
        disk.end_read = end_read  # type: ignore[method-assign]


class KeepsDamagedPages(LocalCacheManager):
    """A page that could not be read stays on disk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = self.disk.index.entries
        self.disk.index.end_read = (  # type: ignore[method-assign]
            lambda group, entries, places, suspect: index.unpin(entries)
        )


class KeepsTheDiskOverReset(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.disk.index.reset = lambda: None  # type: ignore[method-assign]


class OverwritesUnannounced(LocalCacheManager):
    """The index that survives a crash is not told before a place is written again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.disk.index.tier.record_evict = (  # type: ignore[method-assign]
            lambda group, places, generations: None
        )


class UsesLostDisks(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.disk.index.lose = lambda disk: None  # type: ignore[method-assign]


class DropsWhatWasReadForAnother(LocalCacheManager):
    """What was read for a request may be evicted before the request asks again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reads, index = self.disk.reads, self.host.index

        def complete(result: OpResult) -> None:
            DiskReads.complete(reads, result)
            for wait in reads.waits.values():
                for _, held in wait.held:
                    index.unpin(held)

        def let_go(request_id: str) -> None:
            wait = reads.waits.get(request_id)
            if wait is not None:
                wait.held.clear()

        reads.complete = complete  # type: ignore[method-assign]
        reads.let_go = let_go  # type: ignore[method-assign]


class ForgetsInHostAlone(LocalCacheManager):
    def forget(self, group: int, keys: Any) -> int:
        disk, self._disk = self._disk, None
        try:
            return super().forget(group, keys)
        finally:
            self._disk = disk


class LoadsWithoutWaiting(LocalCacheManager):
    """What is on its way up is loaded as if it were there."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        if graph is None:
            return None
        return TransferGraph(tuple(replace(op, reads=NO_READS) for op in graph.ops), graph.edges)


class WaitsForAnEarlierRead(LocalCacheManager):
    """A load waits for a read that its slot had before, and takes what is there then."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        if graph is None:
            return None
        earlier = getattr(self, "_earlier", {})
        ops = []
        for op in graph.ops:
            before = [earlier.get((op.group, slot), 0) for slot in op.slots.tolist()]
            for slot, read in zip(op.slots.tolist(), op.reads.tolist(), strict=False):
                earlier[op.group, slot] = read
            ops.append(replace(op, reads=np.where(before, before, op.reads) if len(op.reads) else NO_READS))
        self._earlier = earlier
        return TransferGraph(tuple(ops), graph.edges)


class PromisesWhatStoresFill(LocalCacheManager):
    """Also a block that a store in flight is filling is promised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        flow, index = self.disk, self.host.index

        def coming(wanted: Any) -> Coming:
            entries, reads = [], []
            for part in wanted.parts:
                found = index.find(part.group, part.keys, ready_only=False)
                entries.append(found[: int(np.argmin(np.append(found != NO_ENTRY, False)))])
                reads.append(flow.reads.filling(part.group, index.slots_of(entries[-1])))
            return Coming(entries, reads)

        flow.lookup._coming = coming  # type: ignore[method-assign]


class ReusesSlotsThatLoadsWaitFor(LocalCacheManager):
    """What comes up for a load may be evicted before it was loaded."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        for op in graph.ops if graph is not None else ():
            inflight = self._inflight.get(op.op_id)
            if inflight.coming is not None:
                self.host.index.unpin(inflight.entries[inflight.coming])
                inflight.entries = inflight.entries.copy()
        return graph

    def complete(self, rank: int, result: OpResult) -> Any:
        op = self._inflight.get(result.op_id)
        if op.coming is not None and len(op.reported) + 1 == self._limits.ranks:
            self.host.index.pin_coming(op.entries[op.coming])
        return super().complete(rank, result)


class ReusesPlacesBeingLoaded(LocalCacheManager):
    """Places are free for the next write while a load from them is under way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loads, index = self.disk.gds_loads, self.disk.index
        assert loads is not None
        begin = loads.begin

        def begun(*args: Any) -> list[TransferOp]:
            plans = begin(*args)
            for plan in plans:
                entries = self._inflight.get(plan.op_id).entries
                index.remove(plan.group, entries)
                index.entries.unpin(entries)
            return plans

        def end(op: Any, current: bool) -> None:
            loads.pages -= len(op.entries)

        loads.begin = begun  # type: ignore[assignment,method-assign]
        loads.end = end  # type: ignore[method-assign]


class TakesFailedLoadsFromDiskAsGood(LocalCacheManager):
    def complete(self, rank: int, result: OpResult) -> Any:
        if self._inflight.get(result.op_id).in_disk_index and result.status is OpStatus.FAILED:
            result = OpResult(result.op_id, OpStatus.OK, np.empty(0, np.int32))
        return super().complete(rank, result)


class LoadsOnePageIntoAnothersBlock(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loads = self.disk.gds_loads
        assert loads is not None
        begin = loads.begin

        def begun(*args: Any) -> list[TransferOp]:
            return [
                replace(op, places=np.roll(op.places, 1), tags=np.roll(op.tags, 1, axis=0))
                for op in begin(*args)
            ]

        loads.begin = begun  # type: ignore[assignment,method-assign]


class BrokenGdsStores(LocalCacheManager):
    """Puts what a subclass does in the place of the end of a store's stripes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stores = self.disk.gds_stores
        assert stores is not None
        self._stores = stores
        self._end = stores.end
        stores.end = self.stripes_ended  # type: ignore[method-assign]

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return self._end(op, good)


class SealsFailedStripes(BrokenGdsStores):
    """Pages that failed on a rank get their trailer all the same."""

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return self._end(op, good | op.failed)


class SealsWhatWasBarred(BrokenGdsStores):
    """Also what was computed from a load that failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stores.bar = lambda op, pages: None  # type: ignore[method-assign]

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return self._end(op, ~op.failed)


class SealsWithDigestsOfAnotherPage(BrokenGdsStores):
    def stripes_ended(self, op: Any, good: Any) -> Any:
        op.digests = {rank: np.roll(digests, 1, axis=0) for rank, digests in op.digests.items()}
        return self._end(op, good)


class SealsWithRanksMixedUp(BrokenGdsStores):
    def stripes_ended(self, op: Any, good: Any) -> Any:
        op.digests = dict(zip(op.digests, [op.digests[rank] for rank in reversed(op.digests)], strict=True))
        return self._end(op, good)


class PublishesBeforeTheSeal(BrokenGdsStores):
    """A page is on disk when its stripes are."""

    def stripes_ended(self, op: Any, good: Any) -> Any:
        self.disk.index.end_write(op.group, op.entries, good)
        self._stores.pages -= len(op.entries)
        return good


class ReusesPlacesBeingStored(BrokenGdsStores):
    """Places are free for the next write while ranks still write their stripes."""

    def begin_store(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().begin_store(*args, **kwargs)
        for op in plan.graph.ops if plan.graph is not None else ():
            entries = self._inflight.get(op.op_id).entries
            self.disk.index.end_write(op.group, entries, np.zeros(len(entries), np.bool_))
        return plan

    def stripes_ended(self, op: Any, good: Any) -> Any:
        self._stores.pages -= len(op.entries)
        return good


class KeepsFailedSeals(BrokenGdsStores):
    """A page whose trailer was not written is taken as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        complete = self._stores.complete
        self._stores.complete = (  # type: ignore[method-assign]
            lambda result: complete(OpResult(result.op_id, OpStatus.OK, np.empty(0, np.int32)))
        )


BROKEN_GDS_STORES = [
    SealsFailedStripes,
    SealsWhatWasBarred,
    SealsWithDigestsOfAnotherPage,
    SealsWithRanksMixedUp,
    PublishesBeforeTheSeal,
    ReusesPlacesBeingStored,
    KeepsFailedSeals,
    OverwritesUnannounced,
]

BROKEN_GDS_LOADS = [
    ReusesPlacesBeingLoaded,
    TakesFailedLoadsFromDiskAsGood,
    LoadsOnePageIntoAnothersBlock,
    KeepsDamagedPages,
]

BROKEN_STREAMS = [
    LoadsWithoutWaiting,
    WaitsForAnEarlierRead,
    PromisesWhatStoresFill,
    ReusesSlotsThatLoadsWaitFor,
]

BROKEN = [
    PromisesBeforeVerified,
    PublishesFailedReads,
    PublishesOnDiskBeforeTheWriteEnds,
    PublishesFailedWrites,
    ReusesSlotsBeingWritten,
    ReusesPlacesBeingRead,
    KeepsDamagedPages,
    KeepsTheDiskOverReset,
    OverwritesUnannounced,
    UsesLostDisks,
    DropsWhatWasReadForAnother,
    ForgetsInHostAlone,
]
