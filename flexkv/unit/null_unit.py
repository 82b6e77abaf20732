"""A unit without a cache. An adapter uses it until the engine's ranks are known, and if the ranks cannot be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import (
    CacheManager,
    Completion,
    GroupMatch,
    MatchResult,
    Outcome,
    StorePlan,
    TailCandidates,
)
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import Counters, MissReason
from flexkv.transfer.graph import BlockIds, OpResult, TransferGraph
from flexkv.unit.base import EngineUnit, UnitState


class NullManager(CacheManager):
    """A manager that caches and stores nothing."""

    def __init__(self) -> None:
        self.was_reset = False

    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> MatchResult:
        none = tuple(GroupMatch(0, np.empty(0, np.int32)) for _ in keys)
        return MatchResult(request_id, start_tokens, none, 0, 0, Outcome.MISS, MissReason.OFF)

    def prefetch(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int = 0,
        settings: RequestSettings = NO_SETTINGS,
    ) -> int:
        return 0

    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        if any(len(group) for group in blocks):
            raise ContractError(f"begin_load: request {request_id!r} has no lease: nothing is cached")
        return None

    def waits(self, request_id: str) -> bool:
        return False

    def leased_pages(self, request_id: str) -> int:
        return 0

    def still_waits(self, request_id: str) -> bool:
        return False

    def begin_store(
        self,
        request_id: str,
        group: int,
        keys: Keys,
        blocks: BlockIds,
        first_block: int,
        tokens: int | None = None,
        spare: bool = False,
        ttl_s: int | None = None,
    ) -> StorePlan:
        return StorePlan(None, np.empty(0, np.int32), 0, 0)

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        return np.zeros(len(keys), np.bool_)

    def complete(self, rank: int, result: OpResult) -> Completion | None:
        raise ContractError(f"rank {rank} reported op {result.op_id}: nothing was planned")

    def discard_from(self, request_id: str, first_token: int) -> int:
        return 0

    def release(self, request_id: str) -> None:
        """Does nothing: this manager leases no pages."""

    def abandon_loads(self, request_id: str) -> None:
        """Does nothing: this manager plans no loads."""

    def end_request(self, request_id: str) -> None:
        """Does nothing: this manager has no record of requests."""

    def forget(self, group: int, keys: Keys) -> int:
        return 0

    def erase_namespace(self, name: str) -> int:
        return 0

    def reset(self) -> int:
        self.was_reset = True
        return 0

    def grow(self, group: int, slots: int) -> None:
        """Does nothing: there is no host pool."""

    def expire(self) -> int:
        return 0

    def inflight_ops(self) -> int:
        return 0

    def disable(self) -> None:
        """Does nothing: this manager never promises pages."""

    def check_integrity(self) -> None:
        """Does nothing: there is no index to check."""


class NullUnit(EngineUnit):
    """A unit that caches nothing.

    Args:
        reason: why nothing is cached, for a unit that will never be usable; empty while ranks are awaited.
    """

    tier_names = ()
    busy = False

    def __init__(self, reason: str = "") -> None:
        self.state = UnitState.AWAITING_RANKS
        self.reason = reason
        self.manager: NullManager = NullManager()

    @property
    def was_reset(self) -> bool:
        """Whether the engine reset its cache while it had this unit, because its weights changed. Tiers may hold pages
        of the old weights, so the next unit is reset before it promises or stores anything.
        """
        return self.manager.was_reset

    def poll(self) -> bool:
        return False

    def rank_ready(self, ready: Mapping[int, int]) -> None:
        """Does nothing: no rank maps a host pool."""

    def grow(self) -> None:
        """Does nothing: there is no host pool."""

    def disable(self, rank: int, error: str) -> None:
        self.reason = self.reason or error

    def stop_straight_loads(self, rank: int, reason: str) -> None:
        """Does nothing: there are no tiers to load from."""

    def expire_if_due(self, counters: Counters) -> None:
        """Does nothing: there are no leases."""

    def count(self, counters: Counters) -> None:
        """Does nothing: a unit without a cache has no counts."""

    def close(self) -> bool:
        self.state = UnitState.CLOSED
        return True
