"""Managers whose disk tier breaks one rule each. The simulation must catch every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.disk.reads import DiskReads
from flexkv.cache.disk.writes import DiskWrites
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import NO_BLAMES, OpResult, OpStatus


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


class ForgetsWhatNobodyBlames(LocalCacheManager):
    """A page that failed is forgotten on disk, whoever was to blame for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reads = self.disk.reads
        reads.complete = (  # type: ignore[method-assign]
            lambda result: DiskReads.complete(reads, replace(result, blames=NO_BLAMES))
        )

    def complete(self, rank: int, result: OpResult) -> Any:
        return super().complete(rank, replace(result, blames=NO_BLAMES))


BROKEN = [
    ForgetsWhatNobodyBlames,
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
