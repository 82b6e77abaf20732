"""A manager with a host tier and simulated disks. Its disk lane moves pages only when a test calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from flexkv.cache.base import Completion, GroupSpec, ManagerLimits, MatchResult
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.moves.writes import WriteQueue
from flexkv.cache.tiers.contract import TierFacts, WriteMode
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.facts.keys import Keys
from flexkv.simulation.base import Symbol
from flexkv.simulation.disk_lane import SimDiskLane
from flexkv.simulation.symbolic_volumes import SymbolicVolumes
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, TransferGraph, TransferOp

BLOCK_TOKENS = 4
NONE = np.empty(0, np.int32)


def chain(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def disk_tier(manager: LocalCacheManager) -> DiskTier:
    """Returns the manager's disk tier."""
    tier = manager.tiers[DISK]
    assert isinstance(tier, DiskTier)
    return tier


def traffic(
    ttl_s: int | None = None,
    gds_loads: GdsUse = GdsUse.NEVER,
    gds_stores: bool = False,
    **facts: Any,
) -> DiskTraffic:
    """Returns how the manager uses the disks. `facts` are fields of `TierFacts`."""
    return DiskTraffic(TierFacts("disk", **facts), ttl_s, gds_loads, gds_stores)


def blocks_by_tier(result: MatchResult) -> tuple[int, ...]:
    return tuple(tokens // BLOCK_TOKENS for tokens in result.by_tier)


class DiskWorld:
    """A manager with host memory and simulated disks. The test acts as the engine and as the disk lane. Each group has
    `slots` host slots and `places` disk slots. In place of a page's bytes, the world keeps the page's key.
    """

    def __init__(
        self,
        slots: int = 8,
        places: int = 32,
        mode: WriteMode = WriteMode.THROUGH,
        disk: SymbolicVolumes | None = None,
        groups: tuple[GroupSpec, ...] = (),
        limits: DiskTraffic = DiskTraffic(),  # noqa: B008 - frozen
        manager_limits: ManagerLimits = ManagerLimits(),  # noqa: B008 - frozen
        compute_if_faster: bool = True,
        policy: str = "lru",
        manager_class: type[LocalCacheManager] = LocalCacheManager,
    ) -> None:
        self.now_s = 1000.0
        specs = groups or (GroupSpec(BLOCK_TOKENS, slots),)
        self.disk = disk or SymbolicVolumes([places] * len(specs))
        self.ranks = range(manager_limits.ranks)
        use = replace(limits, facts=replace(limits.facts, write=mode))
        self.manager = manager_class(
            specs,
            manager_limits,
            clock=lambda: self.now_s,
            policy=policy,
            compute_if_faster=compute_if_faster,
            unix_s=lambda: self.now_s,
            tiers=unit_tiers(self.disk, use),
        )
        self.host: list[list[Symbol]] = [[(-1, 0)] * spec.slots for spec in specs]
        self.lane = SimDiskLane(self.disk, self._get_slot, self._set_slot)
        for group, spec in enumerate(specs):
            self.manager.grow(group, spec.slots)

    @property
    def tier(self) -> DiskTier:
        """The manager's disk tier."""
        return disk_tier(self.manager)

    @property
    def queue(self) -> WriteQueue:
        """The manager's queue of pages that wait to be written to disk."""
        return self.manager.work._writes[DISK]

    def _get_slot(self, group: int, slot: int) -> list[Symbol]:
        return [self.host[group][slot]]

    def _set_slot(self, group: int, slot: int, symbols: list[Symbol] | None) -> None:
        self.host[group][slot] = (-1, 1) if symbols is None else symbols[0]

    # --- the test acts as the engine ---

    def store(
        self,
        keys: Keys,
        name: str = "w",
        group: int = 0,
        first: int = 0,
        tokens: int | None = None,
        ttl_s: int | None = None,
    ) -> int:
        """Stores blocks into host memory. Returns how many blocks were dropped for lack of slots."""
        plan = self.manager.begin_store(
            name, group, keys, np.arange(len(keys), dtype=np.int32), first, tokens, ttl_s=ttl_s
        )
        if plan.graph is not None:
            (op,) = plan.graph.ops
            for position, slot in zip(plan.stored.tolist(), op.slots.tolist(), strict=True):
                self.host[group][slot] = (0, keys[position].tobytes())
            self._ended(op)
        self.manager.check_integrity()
        return plan.dropped

    def load_ended(self, graph: TransferGraph) -> None:
        """Reports that all ops of a load succeeded on all ranks."""
        for op in graph.ops:
            self._ended(op)

    def _ended(self, op: TransferOp) -> None:
        for rank in self.ranks:
            self.manager.complete(rank, OpResult(op.op_id, OpStatus.OK, NONE))

    def look(self, keys: Keys, name: str = "r") -> MatchResult:
        """Looks up blocks. Promised blocks may still be on disk or in a read."""
        result = self.manager.match(name, [keys], 0)
        self.manager.check_integrity()
        return result

    def match(self, keys: Keys, name: str = "r") -> MatchResult:
        """Looks up blocks, and checks that every promised block is in host memory with the right bytes."""
        result = self.look(keys, name)
        self.check_promise(result, keys)
        return result

    def begin(self, blocks: list[int], name: str = "r") -> TransferGraph:
        """Begins the load of all blocks that the request's last lookup promised, into the engine blocks `blocks`."""
        graph = self.manager.begin_load(name, [np.array(blocks, np.int32)])
        assert graph is not None
        self.manager.check_integrity()
        return graph

    def load(self, blocks: int, name: str = "r") -> TransferOp:
        """Begins a load of the promised blocks into engine blocks 0 to `blocks` - 1. Returns the load's only op."""
        (op,) = self.begin(list(range(blocks)), name).ops
        return op

    def end_load(
        self, op: TransferOp, failed: list[int] | None = None, status: OpStatus | None = None
    ) -> Completion:
        """Reports a load's result for rank 0, which must be the last rank to report. Returns the manager's completion
        of the load.
        """
        status = status or (OpStatus.FAILED if failed else OpStatus.OK)
        done = self.manager.complete(0, OpResult(op.op_id, status, np.array(failed or [], np.int32), "why"))
        assert done is not None
        self.manager.check_integrity()
        return done

    def check_promise(self, result: MatchResult, keys: Keys) -> None:
        """Checks that the promised pages are in their host slots with the right bytes."""
        for slot, key in zip(result.groups[0].slots.tolist(), keys, strict=False):
            assert self.host[0][slot] == (0, key.tobytes())

    def hits(self, keys: Keys, name: str = "r") -> int:
        """Looks blocks up again until the request need not wait for a fetch. Returns how many blocks are promised, and
        releases them.
        """
        result = self.match(keys, name)
        while result.reads:
            self.run()
            result = self.match(keys, name)
        self.manager.release(name)
        return result.blocks

    # --- the test acts as the disk lane ---

    def take(self) -> list[TransferOp]:
        """Makes the manager plan the writes that are due, and submits all planned ops to the lane. Returns the ops."""
        ops = [op for _, graph in self.manager.work.poll() for op in graph.ops]
        for op in ops:
            self.lane.submit(op)
        return ops

    def end(
        self,
        op: TransferOp,
        fails: Callable[[int], bool] = lambda page: False,
        status: OpStatus | None = None,
    ) -> None:
        """Moves all pages of an op, unless `status` is given, and reports the op's result."""
        if status is None:
            while not self.lane.move_page(op.op_id, fails(op.pages - len(self.lane.left[op.op_id]))):
                continue
        _, failed = self.lane.end(op.op_id)
        failed_pages = np.array(failed, np.int32)
        if status is None:
            status = OpStatus.FAILED if failed else OpStatus.OK
        else:
            failed_pages = np.arange(op.pages, dtype=np.int32)
        self.manager.work.complete(OpResult(OpId(op.op_id), status, failed_pages, "why"))
        self.manager.check_integrity()

    def run(self, fails: Callable[[int], bool] = lambda page: False) -> list[OpKind]:
        """Plans and runs ops until no op is left. Returns the kinds of the ops."""
        kinds = []
        while ops := self.take():
            for op in ops:
                self.end(op, fails)
                kinds.append(op.kind)
        return kinds

    def drop_host(self, count: int = 1000) -> None:
        """Evicts every page without a lease from host memory."""
        for group in range(len(self.host)):
            self.manager.hub.evict(group, count)
        self.manager.check_integrity()


def written(keys: Keys, **kwargs: Any) -> DiskWorld:
    """Returns a world in which `keys` are on disk and not in host memory; `kwargs` are arguments of `DiskWorld`."""
    world = DiskWorld(**kwargs)
    world.store(keys)
    assert OpKind.DISK_WRITE in world.run()
    world.drop_host()
    return world


def two_groups(count: int, **kwargs: Any) -> tuple[DiskWorld, list[Keys]]:
    """Returns a world of two groups, each with `count` keys on disk and none in host memory."""
    keys = [chain(count), chain(count, seed=1)]
    world = DiskWorld(groups=(GroupSpec(BLOCK_TOKENS, 8), GroupSpec(BLOCK_TOKENS, 8)), **kwargs)
    for group in range(2):
        world.store(keys[group], group=group)
    world.run()
    world.drop_host()
    return world, keys
