"""Broken managers, each of which breaks one rule of the disk tier. The simulation must catch every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.base import HUB
from flexkv.cache.ledger.leases import HeldPages
from flexkv.cache.ledger.ops import FetchOp, WriteOp
from flexkv.cache.manager import LocalCacheManager
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import NO_CAUSES, OpResult, OpStatus
from tests.unit.cache.disk_world import disk_tier


class PromisesBeforeVerified(LocalCacheManager):
    """A broken manager that counts a page as a hit while it is still being fetched."""

    def match(self, *args: Any, **kwargs: Any) -> Any:
        result = super().match(*args, **kwargs)
        for op in self.tables.ops:
            if isinstance(op, FetchOp) and not self.hub.index.ready(op.host).all():
                self.hub.presence.finish(op.host, np.ones(len(op.host), np.uint8))
                self.hub.index.pin(op.host)
        return result


class PublishesFailedReads(LocalCacheManager):
    """A broken manager that treats a page whose verification failed as good."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        complete = self.work._promotions.end_fetch

        def completed(op: Any, result: OpResult, current: bool) -> Any:
            status = OpStatus.OK if result.status is OpStatus.FAILED else result.status
            failed = np.empty(0, np.int32) if status is OpStatus.OK else result.failed
            return complete(op, OpResult(result.op_id, status, failed), current)

        self.work._promotions.end_fetch = completed  # type: ignore[method-assign]


class PublishesOnDiskBeforeTheWriteEnds(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, begin_write = disk_tier(self), disk_tier(self).begin_write

        def early(group: int, keys: Any, tokens: Any, room: int, expiries: Any = None) -> Any:
            planned = begin_write(group, keys, tokens, room, expiries)
            disk.end_write(group, planned[1], np.ones(len(planned[1]), np.bool_))
            disk.presence.pin(planned[1])
            return planned

        disk.begin_write = early  # type: ignore[method-assign]


class PublishesFailedWrites(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, end_write = disk_tier(self), disk_tier(self).end_write
        disk.end_write = (  # type: ignore[method-assign]
            lambda group, entries, good: end_write(group, entries, np.ones_like(good))
        )


class ReusesSlotsBeingWritten(LocalCacheManager):
    """A broken manager that lets host slots be evicted while a write to disk still reads these slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queue, index = self.work._writes[DISK], self.hub.index
        poll = queue.poll

        def polled() -> None:
            before = {op.op_id for op in self.tables.ops}
            poll()
            for op in self.tables.ops:
                if isinstance(op, WriteOp) and op.op_id not in before:
                    index.unpin(op.host)

        def complete(op: WriteOp, result: OpResult) -> None:
            good = result.status is OpStatus.OK
            disk_tier(self).end_write(op.group, op.entries, np.full(op.pages, good))

        queue.poll = polled  # type: ignore[method-assign]
        queue.end_write = complete  # type: ignore[method-assign]


class ReusesPlacesBeingRead(LocalCacheManager):
    """A broken manager that lets disk slots be evicted and written again while a read still needs these slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, plan_fetch = disk_tier(self), disk_tier(self).plan_fetch

        def unpinned(op_id: Any, group: int, keys: Any, entries: Any, *rest: Any) -> Any:
            planned = plan_fetch(op_id, group, keys, entries, *rest)
            disk.presence.unpin(entries)
            return planned

        def end_fetch(plan: Any, entries: Any, suspect: Any) -> None:
            if suspect.any():
                disk.remove(plan.group, entries[suspect])

        disk.plan_fetch = unpinned  # type: ignore[assignment,method-assign]
        disk.end_fetch = end_fetch  # type: ignore[method-assign]


class KeepsDamagedPages(LocalCacheManager):
    """A broken manager that keeps a page on disk although it could not be read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = disk_tier(self).presence
        disk_tier(self).end_use = (  # type: ignore[method-assign]
            lambda group, entries, places, suspect: index.unpin(entries)
        )


class KeepsTheDiskOverReset(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk_tier(self).begin_reset = lambda: None  # type: ignore[method-assign]
        disk_tier(self).finish_reset = lambda ends_s: None  # type: ignore[method-assign]


class OverwritesUnannounced(LocalCacheManager):
    """A broken manager that writes to a disk slot again without first noting the eviction in the journal, which
    survives a crash.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk_tier(self).pages.record_evict = (  # type: ignore[method-assign]
            lambda group, places, generations: None
        )


class UsesLostDisks(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk_tier(self).lose = lambda volume: None  # type: ignore[method-assign]


class DropsWhatWasReadForAnother(LocalCacheManager):
    """A broken manager that lets pages fetched for a request be evicted before the request's next lookup."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hold, index = self.tables.requests.hold, self.hub.index

        def held(request_id: str, pages: HeldPages) -> None:
            hold(request_id, pages)
            index.unpin(pages.entries)

        def take_held(request_id: str) -> Any:
            if (wait := self.tables.requests.waits.get(request_id)) is not None:
                wait.held.clear()
            return ()

        self.tables.requests.hold = held  # type: ignore[method-assign]
        self.tables.requests.take_held = take_held  # type: ignore[method-assign]


class TakesHeldPagesForReady(LocalCacheManager):
    """A broken manager that, at a request's next lookup, counts the pages that the request has waited for as present,
    even if the fetch failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hub.holds = lambda group, keys, entries: True  # type: ignore[method-assign]


class FetchesTwice(LocalCacheManager):
    """A broken manager whose lookup ignores fetches that other requests have begun, and begins new ones."""

    def match(self, *args: Any, **kwargs: Any) -> Any:
        for op in self.tables.ops:
            if isinstance(op, FetchOp):
                self.hub.presence.remove(op.host)
        return super().match(*args, **kwargs)


class ForgetsInHostAlone(LocalCacheManager):
    def forget(self, group: int, keys: Any) -> int:
        return self.tiers[HUB].forget(group, keys)


class ForgetsWhatNobodyBlames(LocalCacheManager):
    """A broken manager that drops every failed page from disk, even if the page's failure cause shows that the disk is
    not at fault.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        complete = self.work.complete
        self.work.complete = (  # type: ignore[method-assign]
            lambda result: complete(replace(result, causes=NO_CAUSES))
        )

    def complete(self, rank: int, result: OpResult) -> Any:
        return super().complete(rank, replace(result, causes=NO_CAUSES))


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
    TakesHeldPagesForReady,
    FetchesTwice,
    ForgetsInHostAlone,
]
