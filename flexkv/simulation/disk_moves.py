"""Events of simulated disks: disks move pages or report them as failed, cancel ops, report results late and in any
order, and break down."""

from __future__ import annotations

import numpy as np

from flexkv.cache.base import OpRole, TierId
from flexkv.simulation.base import Key, require
from flexkv.simulation.failure_causes import causes_by_page, causes_of
from flexkv.simulation.model_ops import ModelOp
from flexkv.simulation.store_moves import StoreMoves
from flexkv.simulation.symbolic_volumes import identities
from flexkv.simulation.tier_moves import TierMoves
from flexkv.simulation.world import World, host_slots
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import FailureCause, OpId, OpKind, OpResult, OpStatus, TransferGraph, TransferOp

SAME_PACE_S = 5.0
"""Seconds after which the engine's speed changes. A simulation takes 500 steps in this time."""


class DiskMoves:
    """Runs a world's disk lane (see `disk_lane.py`), and hands the results of the lane's ops to the manager."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tier_moves: TierMoves | None = None
        """Carries out the ops of the symbolic or remote tier; None if the world has neither."""
        if world.symbolic_tier is not None:
            self.tier_moves = TierMoves(world, world.symbolic_tier)
        if world.remote_tier is not None:
            self.tier_moves = StoreMoves(world, world.remote_tier, world.store, self.take_orders)
        self._started: set[int] = set()
        self._outbox: list[OpResult] = []

    def poll(self) -> None:
        """Does the work of a unit's driver: lets the manager plan writes, and submits all planned ops to their
        lanes."""
        world = self.world
        planned = world.manager.work.poll()
        world.model.evict(world.recorder.take_evicted())
        self._hand_over(planned)

    def take_orders(self) -> None:
        """Submits planned ops to their lanes. Must be called right after any call that may plan ops."""
        self._hand_over(self.world.manager.work.take_planned())

    def _hand_over(self, planned: list[tuple[TierId, TransferGraph]]) -> None:
        world = self.world
        for tier, graph in planned:
            for op in graph.ops:
                if self.tier_moves is not None and world.manager.tiers[tier] is self.tier_moves.tier:
                    self.tier_moves.submit(op)
                    continue
                keys: list[Key] = [(op.group, identity[0]) for identity in identities(op)]
                role = OpRole.LOAD if op.kind is OpKind.DISK_READ else OpRole.STORE
                model_op = ModelOp("", role, keys, host_slots(op), [], world.model.epoch, set())
                world.model.add_disk_op(op.op_id, model_op)
                if role is OpRole.LOAD:
                    ends = tag_fields(op.tags)["expiry"].tolist()
                    world.model.note_times(dict(zip(keys, ends, strict=True)))
                world.disk_lane.submit(op)

    def move(self) -> None:
        """Moves some pages of a few ops of the disks, chosen at random."""
        world = self.world
        self.poll()
        for _ in range(3):
            if not world.disk_lane.ops:
                return
            op_id = world.random.choice(list(world.disk_lane.ops))
            self._started.add(op_id)
            for _ in range(world.random.randint(1, 4)):
                if world.disk_lane.move_page(op_id, world.random.random() < world.config.failure_rate):
                    missing = world.disk_lane.missing[op_id]
                    op, failed = world.disk_lane.end(op_id)
                    self._outbox.append(self._result(op, failed, missing))
                    world.disk_ended[op_id] = op
                    break

    def _result(self, op: TransferOp, failed: list[int], missing: set[int]) -> OpResult:
        pages = np.array(failed, np.int32)
        if not failed:
            return OpResult(op.op_id, OpStatus.OK, pages)
        causes = causes_of(self.world.random, op.kind, failed, missing, 0.0)
        return OpResult(op.op_id, OpStatus.FAILED, pages, "page failed", causes=causes)

    def cancel(self) -> None:
        """Cancels an op that the disks have not begun."""
        world = self.world
        waiting = [op_id for op_id in world.disk_lane.ops if op_id not in self._started]
        if waiting:
            op_id = world.random.choice(waiting)
            op, _ = world.disk_lane.end(op_id)
            self._outbox.append(OpResult.cancelled(OpId(op_id), op.pages, "cancelled"))
            world.disk_ended[op_id] = op

    def deliver(self) -> None:
        """Hands the manager the result of a finished op, which is chosen at random."""
        world = self.world
        if not self._outbox:
            return
        result = self._outbox.pop(world.random.randrange(len(self._outbox)))
        op = world.disk_ended.pop(result.op_id)
        self._started.discard(result.op_id)
        named = world.disk.named(op) if op.kind is OpKind.DISK_READ else set()
        world.manager.work.complete(result)
        world.model.end_disk_op(result, world.recorder.take_evicted(), world.recorder.take_published())
        if op.kind is OpKind.DISK_READ:
            disproved = {
                page for page, cause in causes_by_page(result).items() if cause <= FailureCause.SOURCE
            }
            world.disk.require_forgotten(op, disproved)
            world.disk.require_kept(op, named - disproved)

    def measure_step(self) -> None:
        """Reports a few measured prefill steps of the engine, whose speed changes every SAME_PACE_S seconds."""
        world = self.world
        token_s = (0.001, 0.1)[int(world.now_s / SAME_PACE_S) % 2]
        for _ in range(4):
            tokens = world.random.randint(16, 64)
            world.manager.cost.compute.see(tokens, tokens * token_s, world.now_s)

    def lose(self) -> None:
        """Breaks a disk permanently and reports the loss to the manager. Does not break the last disk, because without
        any disk the run could no longer test the disk tier.
        """
        world = self.world
        if not world.config.disk_places:
            return
        alive = [disk for disk, is_alive in enumerate(world.disk.alive) if is_alive]
        if len(alive) < 2:
            return
        world.disk.lose(world.random.choice(alive))
        for lost in world.disk.poll().lost:
            world.disk_tier.lose(lost.disk)
            for op_id, op in world.disk_lane.rank_ops.items():
                on_it = np.flatnonzero(op.places % world.disk.disks == lost.disk)
                world.model.lose(op_id, on_it.tolist())

    @property
    def busy(self) -> bool:
        """Whether an op is in flight, has finished without a report to the manager, or the manager has more work to
        do."""
        moving = self.tier_moves is not None and self.tier_moves.busy
        return bool(moving or self.world.disk_lane.ops or self._outbox or self.world.manager.work.busy)

    def check(self) -> None:
        """Checks the pages that a new process would find on the disks after a crash at this time. Each must have the KV
        of its key on every rank."""
        world = self.world
        if self.tier_moves is not None:
            self.tier_moves.check()
        for group, rows in enumerate(world.disk.journal):
            for place, (key, generation, tokens, _) in rows.items():
                content = world.disk.content[group].get(place)
                identity = (key, generation, world.disk.epoch, tokens)
                require(
                    content is not None and content[0] == identity,
                    "the index on disk names a page that is not there",
                )
                assert content is not None
                require(
                    all(symbol == (world.engine.weights, key) for symbol in content[1]),
                    "a page on disk holds another block's bytes",
                )
