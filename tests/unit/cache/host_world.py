"""Makes managers with only a host tier, and calls them as an engine does."""

from __future__ import annotations

import numpy as np

from flexkv.cache.base import CacheListener, Completion, GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import OpId, OpResult, OpStatus

NONE = np.empty(0, np.int32)


def keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def make(
    slots: int = 16,
    groups: tuple[GroupSpec, ...] = (),
    listener: CacheListener | None = None,
    manager_class: type[LocalCacheManager] = LocalCacheManager,
    **limits: float,
) -> LocalCacheManager:
    specs = groups or (GroupSpec(4, slots),)
    bounds = ManagerLimits(**limits)  # type: ignore[arg-type]
    manager = manager_class(specs, bounds, tiers=unit_tiers(), clock=lambda: 0.0, listener=listener)
    for group, spec in enumerate(specs):
        manager.grow(group, spec.slots)
    return manager


def end(
    manager: LocalCacheManager,
    op_id: int,
    status: OpStatus = OpStatus.OK,
    failed: np.ndarray = NONE,
    rank: int = 0,
) -> Completion | None:
    done = manager.complete(
        rank, OpResult(OpId(op_id), status, failed, "" if status is OpStatus.OK else "why")
    )
    manager.check_integrity()
    return done


def store(
    manager: LocalCacheManager, stored: Keys, request: str = "w", first: int = 0, group: int = 0
) -> None:
    plan = manager.begin_store(request, group, stored, np.arange(len(stored), dtype=np.int32), first)
    assert plan.graph is not None
    assert end(manager, plan.graph.ops[0].op_id) is not None


def hit(manager: LocalCacheManager, wanted: Keys) -> int:
    blocks = manager.match("probe", [wanted], 0).blocks
    manager.release("probe")
    return blocks
