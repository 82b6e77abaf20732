"""A simulated engine that holds symbols instead of KV, one in each of its blocks and in each host slot.

The simulation moves pages one by one and rank by rank, so that an access to a slot or block that comes too early or too
late is detected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from flexkv.simulation.base import Place, Symbol
from flexkv.transfer.graph import OpResult, TransferOp


@dataclass
class Compute:
    """One forward pass over one block of every group: reads `inputs`, writes `outputs`."""

    epoch: int
    inputs: list[tuple[Place, bytes]]
    outputs: list[tuple[Place, bytes]]
    ranks_left: int


@dataclass
class Movement:
    """An op on one rank.

    Attributes:
        left: the pages still to move.
        missing: the pages that failed because their disk slot holds something else.
        arrived: the symbol that each moved page brought.
    """

    op: TransferOp
    is_load: bool
    left: list[int]
    failed: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    arrived: dict[int, Symbol] = field(default_factory=dict)
    started: bool = False


class Rank:
    """One worker: a stream that runs in order, a set of movements that run in any order, and results that are not
    reported yet.
    """

    def __init__(self, groups: int, blocks: int, slots: Sequence[int], owners: Sequence[int]) -> None:
        self.block: list[list[Symbol]] = [[(-1, 0)] * blocks for _ in range(groups)]
        own: list[list[Symbol]] = [[(-1, 0)] * n for n in slots]
        self.slot = [own[owner] for owner in owners]
        self.stream: deque[Compute | Movement] = deque()
        self.moving: list[Movement] = []
        self.outbox: list[OpResult] = []


class BlockPool:
    """The engine blocks of every group, and how many users may touch each of them."""

    def __init__(self, groups: int, blocks: int) -> None:
        self._users = [[0] * blocks for _ in range(groups)]

    def free(self, group: int) -> list[int]:
        return [b for b, users in enumerate(self._users[group]) if not users]

    def hold(self, place: Place) -> None:
        self._users[place[0]][place[1]] += 1

    def drop(self, place: Place) -> None:
        assert self._users[place[0]][place[1]] > 0
        self._users[place[0]][place[1]] -= 1


class SimEngine:
    """Ranks, blocks and the symbols in them."""

    def __init__(
        self, ranks: int, groups: int, blocks: int, slots: Sequence[int], owners: Sequence[int]
    ) -> None:
        self.ranks = [Rank(groups, blocks, slots, owners) for _ in range(ranks)]
        self.pool = BlockPool(groups, blocks)
        self.weights = 0
        self._garbage = count(1)
        self._movements: dict[int, list[Movement]] = {}

    def garbage(self) -> Symbol:
        return (-1, next(self._garbage))

    def enqueue(self, op: TransferOp, is_load: bool, in_stream: bool) -> None:
        """Gives an op to every rank; its blocks are held until `ended`."""
        for block in op.blocks.tolist():
            self.pool.hold((op.group, block))
        movements = [Movement(op, is_load, list(range(op.pages))) for _ in self.ranks]
        self._movements[op.op_id] = movements
        for rank, movement in zip(self.ranks, movements, strict=True):
            (rank.stream if in_stream else rank.moving).append(movement)

    def slot_content(self, group: int, slot: int) -> list[Symbol]:
        """The symbols in a host slot, one per rank."""
        return [rank.slot[group][slot] for rank in self.ranks]

    def fill_slot(self, group: int, slot: int, symbols: list[Symbol] | None) -> None:
        """Puts a page into a host slot, one symbol per rank; garbage if `symbols` is None."""
        for number, rank in enumerate(self.ranks):
            rank.slot[group][slot] = symbols[number] if symbols is not None else self.garbage()

    def arrived(self, op: TransferOp, page: int) -> list[Symbol | None]:
        """The symbol that the page brought on each rank; None if it was not moved."""
        return [movement.arrived.get(page) for movement in self._movements[op.op_id]]

    def ended(self, op: TransferOp) -> None:
        del self._movements[op.op_id]
        for block in op.blocks.tolist():
            self.pool.drop((op.group, block))

    def compute(self, inputs: list[tuple[Place, bytes]], outputs: list[tuple[Place, bytes]]) -> None:
        for place, _ in [*inputs, *outputs]:
            self.pool.hold(place)
        task = Compute(self.weights, inputs, outputs, len(self.ranks))
        for rank in self.ranks:
            rank.stream.append(task)

    def run_compute(self, rank: Rank, task: Compute) -> None:
        good = all(rank.block[g][b] == (task.epoch, key) for (g, b), key in task.inputs)
        for (g, b), key in task.outputs:
            rank.block[g][b] = (task.epoch, key) if good else self.garbage()
        task.ranks_left -= 1
        if not task.ranks_left:
            for place, _ in [*task.inputs, *task.outputs]:
                self.pool.drop(place)

    def read_page(self, rank: Rank, movement: Movement, page: int, fails: bool) -> Symbol:
        """Reads a block for a store to disk; a failing page becomes garbage."""
        movement.started = True
        movement.left.remove(page)
        symbol = rank.block[movement.op.group][int(movement.op.blocks[page])]
        movement.arrived[page] = self.garbage() if fails else symbol
        if fails:
            movement.failed.append(page)
        return movement.arrived[page]

    def fail_page(self, movement: Movement, page: int) -> None:
        """Fails a page that never arrives: its block stays as it is."""
        movement.left.remove(page)
        movement.failed.append(page)

    def bring_page(self, rank: Rank, movement: Movement, page: int, symbol: Symbol, fails: bool) -> None:
        """Brings a page from disk; a failing page leaves garbage."""
        movement.started = True
        movement.left.remove(page)
        movement.arrived[page] = self.garbage() if fails else symbol
        rank.block[movement.op.group][int(movement.op.blocks[page])] = movement.arrived[page]
        if fails:
            movement.failed.append(page)

    def move_page(self, rank: Rank, movement: Movement, page: int, fails: bool) -> None:
        """Moves a page; a failing page leaves garbage."""
        movement.started = True
        movement.left.remove(page)
        group = movement.op.group
        block, slot = int(movement.op.blocks[page]), int(movement.op.slots[page])
        source = rank.slot[group][slot] if movement.is_load else rank.block[group][block]
        movement.arrived[page] = self.garbage() if fails else source
        if movement.is_load:
            rank.block[group][block] = movement.arrived[page]
        else:
            rank.slot[group][slot] = movement.arrived[page]
        if fails:
            movement.failed.append(page)
