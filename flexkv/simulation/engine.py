"""A simulated engine. Instead of KV, each of its blocks and each host slot has a symbol per rank.

Pages move one by one and rank by rank, so the simulation detects a slot or block that is used too early or too late.
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
    """One forward pass for one step of a request: reads the blocks `inputs` and writes the blocks `outputs`.

    Attributes:
        epoch: epoch of the weights with which the step is computed.
        inputs, outputs: engine blocks, each with the key whose KV the block should have.
        ranks_left: number of ranks that have not run the pass yet.
    """

    epoch: int
    inputs: list[tuple[Place, bytes]]
    outputs: list[tuple[Place, bytes]]
    ranks_left: int


@dataclass
class Movement:
    """An op on one rank.

    Attributes:
        left: positions of the pages that have not moved yet.
        failed: positions of the pages that failed.
        missing: positions of the pages that failed because their disk slot has a different content.
        arrived: position of each moved page -> the symbol that the page had.
    """

    op: TransferOp
    is_load: bool
    left: list[int]
    failed: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    arrived: dict[int, Symbol] = field(default_factory=dict)
    started: bool = False


class Rank:
    """One worker: its blocks and slots, a stream whose items run in order, movements that run in any order, and the
    results that were not reported yet.
    """

    def __init__(self, groups: int, blocks: int, slots: Sequence[int], owners: Sequence[int]) -> None:
        self.block: list[list[Symbol]] = [[(-1, 0)] * blocks for _ in range(groups)]
        own: list[list[Symbol]] = [[(-1, 0)] * n for n in slots]
        self.slot = [own[owner] for owner in owners]
        self.stream: deque[Compute | Movement] = deque()
        self.moving: list[Movement] = []
        self.outbox: list[OpResult] = []


class BlockPool:
    """Counts how many users hold each engine block of every group. A block without users is free."""

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
    """A simulated engine: its ranks, and which of its blocks are in use."""

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
        """Submits an op to every rank. The op holds its engine blocks until `ended` is called."""
        for block in op.blocks.tolist():
            self.pool.hold((op.group, block))
        movements = [Movement(op, is_load, list(range(op.pages))) for _ in self.ranks]
        self._movements[op.op_id] = movements
        for rank, movement in zip(self.ranks, movements, strict=True):
            (rank.stream if in_stream else rank.moving).append(movement)

    def slot_content(self, group: int, slot: int) -> list[Symbol]:
        """Returns the symbols in a host slot, one per rank."""
        return [rank.slot[group][slot] for rank in self.ranks]

    def fill_slot(self, group: int, slot: int, symbols: list[Symbol] | None) -> None:
        """Puts one symbol per rank into a host slot, or garbage if `symbols` is None."""
        for number, rank in enumerate(self.ranks):
            rank.slot[group][slot] = symbols[number] if symbols is not None else self.garbage()

    def arrived(self, op: TransferOp, page: int) -> list[Symbol | None]:
        """Returns the symbol that a page of an op had when each rank moved it; None for ranks that have not moved the
        page."""
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
        """Returns the symbol of a page's engine block, for a store straight to disk. If `fails`, returns garbage."""
        movement.started = True
        movement.left.remove(page)
        symbol = rank.block[movement.op.group][int(movement.op.blocks[page])]
        movement.arrived[page] = self.garbage() if fails else symbol
        if fails:
            movement.failed.append(page)
        return movement.arrived[page]

    def fail_page(self, movement: Movement, page: int) -> None:
        """Marks a page as failed without moving it, so that the content of its block does not change."""
        movement.left.remove(page)
        movement.failed.append(page)

    def bring_page(self, rank: Rank, movement: Movement, page: int, symbol: Symbol, fails: bool) -> None:
        """Puts the symbol of a page from disk into the page's engine block; puts garbage there if `fails`."""
        movement.started = True
        movement.left.remove(page)
        movement.arrived[page] = self.garbage() if fails else symbol
        rank.block[movement.op.group][int(movement.op.blocks[page])] = movement.arrived[page]
        if fails:
            movement.failed.append(page)

    def move_page(self, rank: Rank, movement: Movement, page: int, fails: bool) -> None:
        """Moves a page between its host slot and its engine block. If `fails`, the destination gets garbage."""
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
