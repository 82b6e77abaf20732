"""Broken cache managers, each of which breaks one rule. The simulation must catch each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from flexkv.cache.ledger.ops import RankOp
from flexkv.cache.manager import LocalCacheManager
from flexkv.errors import ContractError
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from flexkv.transfer.graph import OpId, OpResult


def caught_by(
    configs: Iterable[SimulationConfig], manager_class: type[LocalCacheManager], integrity_every: int = 0
) -> str:
    """Runs simulations with a broken manager. Returns the error of the first simulation that catches the manager, or an
    empty string if none does.
    """
    for config in configs:
        try:
            Simulation(dataclasses.replace(config, integrity_every=integrity_every), manager_class).run()
        except ContractError as error:
            return f"{type(error).__name__}: {error}"
    return ""


class IndexProxy:
    """A native index with some of its methods replaced."""

    def __init__(self, index: Any, **replaced: Callable[..., Any]) -> None:
        self._index = index
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def __len__(self) -> int:
        return len(self._index)


def ranks_ops(manager: LocalCacheManager) -> list[RankOp]:
    """Returns the manager's ops in flight whose results come from ranks."""
    return [op for op in manager.tables.ops if isinstance(op, RankOp)]


def rank_op(manager: LocalCacheManager, op_id: OpId) -> RankOp:
    """Returns the op in flight with this id. Its results must come from ranks."""
    op = manager.tables.ops.get(op_id)
    assert isinstance(op, RankOp)
    return op


class PublishesBeforeCompletion(LocalCacheManager):
    def begin_store(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().begin_store(*args, **kwargs)
        if plan.graph:
            op = self.tables.ops.get(plan.graph.ops[0].op_id)
            self.hub.presence.finish(op.entries, np.ones(len(op.entries), np.uint8))
            self.hub.index.pin(op.entries)
        return plan


class PublishesFailedPages(LocalCacheManager):
    def _end_store(self, op: Any) -> Any:
        op.failed[:] = False
        return super()._end_store(op)


class NeedsOneRankOnly(LocalCacheManager):
    def complete(self, rank: int, result: OpResult) -> Any:
        for other in range(self._limits.ranks):
            if other != rank and result.op_id in self.tables.ops:
                rank_op(self, result.op_id).reported.add(other)
        return super().complete(rank, result) if result.op_id in self.tables.ops else None


class IgnoresDiscard(LocalCacheManager):
    def discard_from(self, request_id: str, first_token: int) -> int:
        return 0


class PublishesPoisonSilently(LocalCacheManager):
    """A broken manager whose `discard_from` returns the right count, but which publishes the discarded pages."""

    def discard_from(self, request_id: str, first_token: int) -> int:
        before = {op.op_id: op.revoked.copy() for op in ranks_ops(self)}
        count = super().discard_from(request_id, first_token)
        for op in ranks_ops(self):
            if op.op_id in before and not np.array_equal(before[op.op_id], op.revoked):
                op.revoked = before[op.op_id]
        return count


class LeasesNothing(LocalCacheManager):
    """A broken manager that leases nothing, so that the slots of promised pages and of loads may be evicted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = self.hub.index

        def pin(entries: Any) -> Any:
            slots = index.pin(entries)
            index.unpin(entries)
            return slots

        def look(*args: Any) -> Any:
            found = native.look(*args)
            for group in range(len(self.tables.specs)):
                index.unpin(found.entries(group))
            return found

        native = self.promises.lookup._native
        self.promises.lookup._native = IndexProxy(native, look=look)  # type: ignore[assignment]

        def match_and_pin(group: int, keys: Any) -> Any:
            entries = index.match_prefix(group, keys)
            return entries, pin(entries)

        self.hub.index = IndexProxy(  # type: ignore[assignment]
            index, pin=pin, match_and_pin=match_and_pin, unpin=lambda entries: None
        )


class FreesLoadsAtPlan(LocalCacheManager):
    """A broken manager that lets a load's slots be evicted while the load is in flight."""

    def begin_load(self, *args: Any, **kwargs: Any) -> Any:
        graph = super().begin_load(*args, **kwargs)
        for op in graph.ops if graph else ():
            self.hub.index.unpin(self.tables.ops.get(op.op_id).entries)
        return graph

    def _end_load(self, op: Any) -> Any:
        index = self.hub.index
        self.hub.index = IndexProxy(index, unpin=lambda entries: None)  # type: ignore[assignment]
        try:
            return super()._end_load(op)
        finally:
            self.hub.index = index


class KeepsFailedPages(LocalCacheManager):
    def _end_load(self, op: Any) -> Any:
        op.suspect[:] = False
        return super()._end_load(op)


class ReportsFailedLoadsAsGood(LocalCacheManager):
    def _end_load(self, op: Any) -> Any:
        op.failed[:] = False
        return super()._end_load(op)


class PublishesAfterReset(LocalCacheManager):
    """A broken manager whose reset drops the visible pages, but lets stores in flight publish pages of the old
    weights.
    """

    def reset(self) -> int:
        pending = {op.op_id: op.entries for op in self.tables.ops if op.role.value == "store"}
        visible = [key for keys in self._seen.values() for key in keys]
        for request_id in self.tables.requests.leased():
            self.promises.end_lease(request_id)
        for group in range(len(self.tables.specs)):
            keys = [key for g, key in visible if g == group]
            if keys:
                array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
                entries = self.hub.index.find(group, array)
                self.hub.presence.remove(entries)
        self.tables.epoch += 1
        for op in self.tables.ops:
            if op.op_id in pending:
                op.epoch = self.tables.epoch
        for listener in self.hub.listeners:
            listener.on_reset(self.tables.epoch)
        return self.tables.epoch

    @property
    def _seen(self) -> dict[int, list[tuple[int, bytes]]]:
        return self.__dict__.setdefault("seen", {})

    def _end_store(self, op: Any) -> Any:
        keys = self.hub.index.keys_of(op.entries)
        done = super()._end_store(op)
        self._seen[op.op_id] = [(op.group, bytes(keys[i])) for i in done.published]
        return done


class KeepsLoadsOverReset(LocalCacheManager):
    """A broken manager that counts a load as good although a reset came while it was in flight."""

    def _end_load(self, op: Any) -> Any:
        op.epoch = self.tables.epoch
        return super()._end_load(op)


class LeaksSlots(LocalCacheManager):
    """A broken manager that leaves pins in the index when a lookup's lease is released."""

    def release(self, request_id: str) -> None:
        self.tables.requests.pop_lease(request_id)


class OverfillsQueues(LocalCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promises.room_for_loads = lambda: 1_000_000  # type: ignore[method-assign]


class ForgetsNothing(LocalCacheManager):
    def forget(self, group: int, keys: Any) -> int:
        return int(np.count_nonzero(self.hub.index.find(group, keys, ready_only=False) != 0xFFFFFFFF))


class StoresInLostOrder(LocalCacheManager):
    """A broken manager that returns the slots of a store in reverse order, so that pages are stored under other pages'
    keys.
    """

    def begin_store(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().begin_store(*args, **kwargs)
        if plan.graph:
            slots = plan.graph.ops[0].slots
            slots[:] = slots[::-1].copy()
        return plan


class PromisesAgainWhatFailed(LocalCacheManager):
    """A broken manager that, after a request's load failed, promises the request the failed pages again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promises.load_tries.of_request = lambda request_id: None  # type: ignore[method-assign]


class RemembersBeyondTheEnd(LocalCacheManager):
    """A broken manager that does not forget a request's failed loads when the request ends."""

    def end_request(self, request_id: str) -> None:
        self.release(request_id)


BROKEN: list[type[LocalCacheManager]] = [
    PromisesAgainWhatFailed,
    RemembersBeyondTheEnd,
    PublishesBeforeCompletion,
    PublishesFailedPages,
    NeedsOneRankOnly,
    IgnoresDiscard,
    PublishesPoisonSilently,
    LeasesNothing,
    FreesLoadsAtPlan,
    KeepsFailedPages,
    ReportsFailedLoadsAsGood,
    PublishesAfterReset,
    KeepsLoadsOverReset,
    LeaksSlots,
    OverfillsQueues,
    ForgetsNothing,
    StoresInLostOrder,
]
