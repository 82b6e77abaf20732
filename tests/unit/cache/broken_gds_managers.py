"""Broken managers, each of which breaks one rule of GDS loads or GDS stores. The simulation must catch every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.base import HUB
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import FailureCause, OpResult, OpStatus, TransferOp
from tests.unit.cache.broken_disk_managers import (
    ForgetsWhatNobodyBlames,
    KeepsDamagedPages,
    OverwritesUnannounced,
)
from tests.unit.cache.disk_world import disk_tier


class ReusesPlacesBeingLoaded(LocalCacheManager):
    """A broken manager that frees disk slots for the next write while a load from these slots is in flight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = disk_tier(self)
        loads = index.straight
        assert loads is not None
        begin = loads.begin_load

        def begun(*args: Any) -> list[TransferOp]:
            plans = begin(*args)
            for plan in plans:
                entries = self.tables.ops.get(plan.op_id).entries
                index.remove(plan.group, entries)
                index.presence.unpin(entries)
            return plans

        def end(op: Any, current: bool) -> None:
            """Does nothing, because `begun` has already ended the lease."""

        loads.begin_load = begun  # type: ignore[assignment,method-assign]
        loads.end_load = end  # type: ignore[method-assign]


class TakesFailedLoadsFromDiskAsGood(LocalCacheManager):
    def complete(self, rank: int, result: OpResult) -> Any:
        if self.tables.ops.get(result.op_id).tier != HUB and result.status is OpStatus.FAILED:
            result = OpResult(result.op_id, OpStatus.OK, np.empty(0, np.int32))
        return super().complete(rank, result)


class LoadsOnePageIntoAnothersBlock(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loads = disk_tier(self).straight
        assert loads is not None
        begin = loads.begin_load

        def begun(*args: Any) -> list[TransferOp]:
            return [
                replace(op, places=np.roll(op.places, 1), tags=np.roll(op.tags, 1, axis=0))
                for op in begin(*args)
            ]

        loads.begin_load = begun  # type: ignore[assignment,method-assign]


class BrokenGdsStores(LocalCacheManager):
    """Base class of broken managers. A subclass overrides `stripes_ended`, which replaces the code that runs when all
    ranks have written their stripes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stores = disk_tier(self).stores
        assert stores is not None
        self._route = stores
        self._end = stores.end_store
        stores.end_store = self.stripes_ended  # type: ignore[method-assign]

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return self._end(op, good)


class SealsFailedStripes(BrokenGdsStores):
    """A broken manager that writes the trailers of pages even if the pages failed on a rank."""

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return self._end(op, good | op.failed)


class SealsRevokedPages(BrokenGdsStores):
    """A broken manager that writes the trailers of pages even if the pages were computed from a load that failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._route.bar = lambda op, pages: None  # type: ignore[method-assign]

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
    """A broken manager that publishes a page on disk when its stripes are written, before its trailer is written."""

    def stripes_ended(self, op: Any, good: Any) -> Any:
        disk_tier(self).end_write(op.group, op.entries, good)
        return good


class ReusesPlacesBeingStored(BrokenGdsStores):
    """A broken manager that frees disk slots for the next write while ranks still write their stripes to these
    slots.
    """

    def begin_store(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().begin_store(*args, **kwargs)
        for op in plan.graph.ops if plan.graph is not None else ():
            entries = self.tables.ops.get(op.op_id).entries
            disk_tier(self).end_write(op.group, entries, np.zeros(len(entries), np.bool_))
        return plan

    def stripes_ended(self, op: Any, good: Any) -> Any:
        return good


class KeepsFailedSeals(BrokenGdsStores):
    """A broken manager that counts a page as present even if writing its trailer failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ended = self._route.follow_up_ended
        self._route.follow_up_ended = (  # type: ignore[method-assign]
            lambda op, result: ended(op, OpResult(result.op_id, OpStatus.OK, np.empty(0, np.int32)))
        )


class KeepsPagesWithBadContent(LocalCacheManager):
    """A broken manager that replaces the failure cause of every page of a GDS load by NOT_EXECUTED, so that pages with
    wrong content stay on disk.
    """

    def complete(self, rank: int, result: OpResult) -> Any:
        if self.tables.ops.get(result.op_id).tier != HUB and result.status is OpStatus.FAILED:
            result = replace(result, causes=np.full(len(result.failed), FailureCause.NOT_EXECUTED, np.uint8))
        return super().complete(rank, result)


BROKEN_GDS_STORES = [
    SealsFailedStripes,
    SealsRevokedPages,
    SealsWithDigestsOfAnotherPage,
    SealsWithRanksMixedUp,
    PublishesBeforeTheSeal,
    ReusesPlacesBeingStored,
    KeepsFailedSeals,
    OverwritesUnannounced,
]
BROKEN_GDS_LOADS = [
    ForgetsWhatNobodyBlames,
    KeepsPagesWithBadContent,
    ReusesPlacesBeingLoaded,
    TakesFailedLoadsFromDiskAsGood,
    LoadsOnePageIntoAnothersBlock,
    KeepsDamagedPages,
]
