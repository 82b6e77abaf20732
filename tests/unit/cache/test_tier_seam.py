"""The manager uses every tier through one interface. No code outside `cache/tiers` knows a particular tier, and a new
tier takes about a page of code.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexkv.cache
from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_ENTRY, GroupSpec, TierId
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import Sink, Source, Tier, TierCounts, TierFacts, WriteMode
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import NO_BLOCKS, OpId, OpKind, OpResult, OpStatus, Priority, TransferOp
from tests.unit.cache.disk_world import chain

CACHE = Path(flexkv.cache.__file__).parent
TOY = TierId(1)
NONE = np.empty(0, np.int32)
SLOTS = 16


class ToyTier(Tier, Source, Sink):
    """A tier with only the methods that the manager needs from every tier. It has no memory: the test itself ends the
    tier's ops.
    """

    def __init__(self, context: TierContext) -> None:
        self.facts, self.counts = TierFacts("toy", write=WriteMode.THROUGH), TierCounts()
        self.source = self.sink = self
        self.presence = BlockIndex([SLOTS], context.policy)
        self.presence.grow(0, SLOTS)

    def leading(self, group: int, keys: Keys) -> Any:
        return self.presence.match_prefix(group, keys)

    def present(self, group: int, keys: Keys) -> Any:
        return self.presence.find(group, keys) != NO_ENTRY

    def known(self, group: int, keys: Keys) -> Any:
        return self.presence.find(group, keys, ready_only=False) != NO_ENTRY

    def plan_fetch(
        self, op_id: OpId, group: int, keys: Keys, entries: Any, places: Any, slots: Any, layerwise: bool
    ) -> Any:
        return TransferOp(op_id, OpKind.DISK_READ, group, Priority.LOAD, NO_BLOCKS, slots, places=places)

    def end_fetch(self, plan: TransferOp, entries: Any, suspect: Any) -> None:
        self.presence.remove(entries[suspect])
        self.presence.unpin(entries)

    def tokens_of(self, plan: TransferOp) -> None:
        return None

    def plan_write(self, op_id: OpId, group: int, keys: Keys, slots: Any, tokens: Any) -> Any:
        at, entries, places, *_ = self.presence.insert(group, keys, len(keys))
        op = TransferOp(op_id, OpKind.DISK_WRITE, group, Priority.STORE, NO_BLOCKS, slots[at], places=places)
        return at, entries, op if len(at) else None

    def end_write(self, group: int, entries: Any, good: Any) -> Any:
        return self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)

    def used(self, group: int, keys: Keys) -> None:
        self.presence.touch(self.presence.find(group, keys))

    def room(self, group: int) -> int:
        return SLOTS

    def forget(self, group: int, keys: Keys) -> int:
        entries = self.presence.find(group, keys, ready_only=False)
        return int(np.count_nonzero(self.presence.remove(entries[entries != NO_ENTRY])))

    def begin_reset(self) -> None:
        self.presence.clear()

    def finish_reset(self, ends_s: float) -> None: ...
    def poll(self, now_s: float) -> None: ...


def make() -> LocalCacheManager:
    manager = LocalCacheManager([GroupSpec(4, 8)], tiers=[*unit_tiers(), ToyTier])
    manager.grow(0, 8)
    return manager


def run(manager: LocalCacheManager) -> list[OpKind]:
    """Reports success for every op of the toy tier until none is planned. Returns the ops' kinds."""
    kinds = []
    while planned := manager.work.poll():
        for tier, graph in planned:
            assert tier == TOY
            for op in graph.ops:
                manager.work.complete(OpResult(op.op_id, OpStatus.OK, NONE))
                kinds.append(op.kind)
        manager.check_integrity()
    return kinds


def store(manager: LocalCacheManager, keys: Keys) -> None:
    plan = manager.begin_store("w", 0, keys, np.arange(len(keys), dtype=np.int32), 0)
    assert plan.graph is not None
    manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, NONE))


def test_a_toy_tier_is_written_looked_up_loaded_and_reset() -> None:
    manager, keys = make(), chain(5)
    store(manager, keys)
    assert run(manager) == [OpKind.DISK_WRITE]
    manager.hub.evict(0, 8)
    result = manager.match("r", [keys], 0)
    assert (result.blocks, result.reads) == (0, 1)
    assert run(manager) == [OpKind.DISK_READ]
    assert manager.match("r", [keys], 0).blocks == 5
    graph = manager.begin_load("r", [np.arange(5, dtype=np.int32)])
    assert graph is not None
    assert manager.complete(0, OpResult(graph.ops[0].op_id, OpStatus.OK, NONE)) is not None
    manager.reset()
    result = manager.match("s", [keys], 0)
    assert (result.blocks, result.reads) == (0, 0)
    manager.check_integrity()


def test_a_toy_tier_that_fails_pages_loses_them_and_no_others() -> None:
    manager, keys = make(), chain(5)
    store(manager, keys)
    run(manager)
    manager.hub.evict(0, 8)
    manager.match("r", [keys], 0)
    ((_, graph),) = manager.work.poll()
    failed = np.array([3], np.int32)
    manager.work.complete(OpResult(graph.ops[0].op_id, OpStatus.FAILED, failed, "damaged"))
    assert manager.match("r", [keys], 0).blocks == 3
    assert manager.tiers[TOY].present(0, keys).tolist() == [True, True, True, False, True]
    manager.release("r")
    manager.check_integrity()


def test_a_tier_that_is_down_is_not_asked() -> None:
    manager, keys = make(), chain(5)
    store(manager, keys)
    run(manager)
    manager.hub.evict(0, 8)
    manager.work.take_down(TOY, "a test")
    result = manager.match("r", [keys], 0)
    assert (result.blocks, result.reads) == (0, 0)
    store(manager, keys)
    assert manager.work.poll() == []
    manager.release("r")
    manager.check_integrity()


FILES = [file for file in sorted(CACHE.rglob("*.py")) if not file.is_relative_to(CACHE / "tiers")]


def imports_of(source: str) -> set[str]:
    """Returns the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def tiers_named(source: str) -> set[str]:
    """Returns the imported modules of tiers, except the modules that all tiers share."""
    shared = {f"flexkv.cache.tiers.{name}" for name in ("contract", "routes", "tables")}
    outside = ("flexkv.cache.tiers", "flexkv.storage")
    return {module for module in imports_of(source) - shared if module.startswith(outside)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_of_the_control_plane_imports_a_tier(file: Path) -> None:
    assert tiers_named(file.read_text()) == set()


def test_control_an_import_of_a_tier_is_seen() -> None:
    assert tiers_named("from flexkv.cache.tiers.disk.tier import DiskTier\n")
    assert tiers_named("def f():\n    from flexkv.storage.base import Volumes\n")
