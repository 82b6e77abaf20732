"""Events of a simulation's symbolic tier. Pages fail. Ops end late, in any order, or are cancelled before they begin.
Pages are lost without a report to the tier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flexkv.cache.base import NO_ENTRY, OpRole
from flexkv.simulation.base import Key, Symbol, require
from flexkv.simulation.failure_causes import causes_by_page, causes_of
from flexkv.simulation.model_ops import ModelOp
from flexkv.simulation.symbolic_tier import SymbolicTier
from flexkv.simulation.world import World, host_slots
from flexkv.transfer.graph import FailureCause, OpId, OpKind, OpResult, OpStatus, TransferOp


@dataclass
class SimulatedMove:
    """An op in flight.

    Attributes:
        keys: keys of the op's pages.
        epoch: the tier's epoch when the op began.
        done: number of pages that have moved or failed.
        failed: positions of the pages that failed.
        missing: positions of the pages that failed because the tier does not have them.
        result: the op's result; None until it has finished.
    """

    op: TransferOp
    keys: list[bytes]
    epoch: int
    done: int = 0
    failed: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    result: OpResult | None = None


class TierMoves:
    """Carries out the ops of a world's symbolic tier."""

    def __init__(self, world: World, tier: SymbolicTier) -> None:
        self.world = world
        self.tier = tier
        self._moving: dict[int, SimulatedMove] = {}

    def submit(self, op: TransferOp) -> None:
        """Begins an op that was just planned. Checks that its slots do not conflict with another op in flight."""
        for other in self._moving.values():
            if other.op.group == op.group and OpKind.DISK_WRITE in (op.kind, other.op.kind):
                shared = set(op.places.tolist()) & set(other.op.places.tolist())
                require(not shared, "a place of the tier was given away while an op uses it")
        self._enter(op, self.tier.keys_of.pop(op.op_id))

    def _enter(self, op: TransferOp, names: list[bytes]) -> None:
        world = self.world
        keys: list[Key] = [(op.group, name) for name in names]
        role = OpRole.LOAD if op.kind is OpKind.DISK_READ else OpRole.STORE
        world.model.add_disk_op(
            op.op_id, ModelOp("", role, keys, host_slots(op), [], world.model.epoch, set())
        )
        self._moving[op.op_id] = SimulatedMove(op, names, self._epoch)

    @property
    def _epoch(self) -> int:
        return self.tier.epoch

    # --- events ---

    def move(self) -> None:
        """Moves some pages of an op, or records them as failed."""
        world = self.world
        moving = [each for each in self._moving.values() if each.result is None]
        if not moving:
            return
        each = world.random.choice(moving)
        for _ in range(world.random.randint(1, 5)):
            self._move_page(each, world.random.random() < world.config.failure_rate)
            if each.done == each.op.pages:
                each.result = self._result(each)
                return

    def _move_page(self, each: SimulatedMove, fails: bool) -> None:
        world, page, group = self.world, each.done, each.op.group
        place, slot, key = int(each.op.places[page]), int(each.op.slots[page]), each.keys[page]
        each.done += 1
        if each.op.kind is OpKind.DISK_WRITE:
            symbols = world.engine.slot_content(group, slot)
            self.tier.content[group].pop(place, None)
            if not fails:
                self.tier.content[group][place] = (each.epoch, key, symbols)
        else:
            brought = None if fails else self.read(group, place, key, each.epoch)
            if brought is None and not fails:
                each.missing.add(page)
            fails = brought is None
            world.engine.fill_slot(group, slot, brought)
        if fails:
            each.failed.append(page)

    def read(self, group: int, place: int, key: bytes, epoch: int) -> list[Symbol] | None:
        """Returns the symbols of the page in a slot of the tier; None if the slot does not have the requested page."""
        found = self.tier.content[group].get(place)
        return found[2] if found is not None and found[:2] == (epoch, key) else None

    def _result(self, each: SimulatedMove) -> OpResult:
        op = each.op
        if not each.failed:
            return OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32))
        causes = causes_of(self.world.random, op.kind, each.failed, each.missing, 0.0)
        failed = np.array(each.failed, np.int32)
        return OpResult(op.op_id, OpStatus.FAILED, failed, "page failed", causes=causes)

    def cancel(self) -> None:
        """Cancels an op that has not begun."""
        waiting = [each for each in self._moving.values() if not each.done and each.result is None]
        if waiting:
            each = self.world.random.choice(waiting)
            each.result = OpResult.cancelled(OpId(each.op.op_id), each.op.pages, "cancelled")

    def lose(self) -> None:
        """Deletes a page from the tier's slots. The tier's index still lists the page."""
        random = self.world.random
        group = random.randrange(len(self.tier.content))
        written = {
            int(place)
            for each in self._moving.values()
            if each.op.group == group and each.op.kind is OpKind.DISK_WRITE
            for place in each.op.places
        }
        places = [place for place in self.tier.content[group] if place not in written]
        if places:
            del self.tier.content[group][random.choice(places)]

    def deliver(self) -> None:
        """Hands the manager the result of a finished op, which is chosen at random."""
        world = self.world
        ended = [each for each in self._moving.values() if each.result is not None]
        if not ended:
            return
        each = world.random.choice(ended)
        result = each.result
        assert result is not None
        del self._moving[each.op.op_id]
        world.manager.work.complete(result)
        world.model.end_disk_op(result, world.recorder.take_evicted(), world.recorder.take_published())
        if each.op.kind is OpKind.DISK_READ and each.epoch == self._epoch:
            self._check_forgotten(each, result)

    def _check_forgotten(self, each: SimulatedMove, result: OpResult) -> None:
        """Checks the op's pages that could not be read from their slots. The tier must no longer list them in these
        slots."""
        for page, cause in causes_by_page(result).items():
            if cause > FailureCause.SOURCE:
                continue
            key = np.frombuffer(each.keys[page], np.uint8).reshape(1, 16)
            found = self.tier.presence.find(each.op.group, key)
            places = self.tier.presence.slots_of(found[found != NO_ENTRY]).tolist()
            require(
                int(each.op.places[page]) not in places, "a page that could not be read is still in the tier"
            )

    # --- end of a run ---

    @property
    def busy(self) -> bool:
        """Whether there is an op whose result was not passed to the manager yet."""
        return bool(self._moving)

    def check(self) -> None:
        """Checks that every page of the tier has the KV of its key on every rank."""
        for places in self.tier.content:
            for epoch, key, symbols in places.values():
                require(
                    epoch != self.tier.epoch
                    or all(symbol == (self.world.engine.weights, key) for symbol in symbols),
                    "a page of the tier holds another block's bytes",
                )
