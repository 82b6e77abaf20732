"""The scheduler's thread does not loop over blocks in Python: for a request with many blocks it runs as many lines of
Python as for a request with few.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import flexkv.cache
from flexkv.cache.ledger.ops import FetchOp
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.tiers.contract import WriteMode
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpId, OpResult, OpStatus
from tests.unit.cache.disk_world import NONE, DiskWorld, chain

FOLDER = str(Path(flexkv.cache.__file__).parent)
FEW, MANY = 24, 3000


@contextmanager
def counted(lines: list[int]) -> Iterator[None]:
    """Counts the lines of the control plane that run in the `with` block, and appends their number to `lines`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal count
        name = frame.f_code.co_filename
        if not name.startswith(FOLDER):
            return None
        count += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)
    lines.append(count)


def lines_of(blocks: int, measured: bool) -> list[int]:
    """Returns the number of lines that run in each step of a request with `blocks` blocks. The steps are a store's end,
    the write's end, lookups that hit disk, the read's end, and the promise. If `measured` is set, the manager knows how
    long reads and steps take.
    """
    lines: list[int] = []
    world = DiskWorld(slots=2 * blocks, places=2 * blocks, mode=WriteMode.THROUGH)
    manager, keys = world.manager, chain(blocks)
    cost = manager.cost
    for n in range(8 if measured else 0):
        # Reads are slow enough that the manager compares reading each prefix with computing it. They are fast enough
        # that it reads all blocks.
        cost.fetch(DISK).see(n + 1, 1.0 + n, 0.0)
        cost.compute.see(n + 1, 0.3 * (n + 1), world.now_s)
        cost.fetch(DISK).see(n + 1, 1.0 + n, world.now_s)
    plan = world.manager.begin_store("w", 0, keys, np.arange(blocks, dtype=np.int32), 0)
    assert plan.graph is not None
    with counted(lines):
        world.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, NONE))
        planned = manager.work.poll()
    (write,) = [op for _, graph in planned for op in graph.ops]
    with counted(lines):
        manager.work.complete(OpResult(OpId(write.op_id), OpStatus.OK, NONE))
    world.drop_host(2 * blocks)
    with counted(lines):
        assert world.manager.match("r", [keys], 0).reads == 1
    (read,) = [op for _, graph in manager.work.take_planned() for op in graph.ops]
    assert read.pages == blocks
    with counted(lines):
        assert world.manager.match("s", [keys], 0).reads == 1, "another waits for the same read"
    with counted(lines):
        manager.work.complete(OpResult(OpId(read.op_id), OpStatus.OK, NONE))
    with counted(lines):
        assert world.manager.match("r", [keys], 0).blocks == blocks
    return lines


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches off the simulated disk's checks, because no page moves in these tests."""
    monkeypatch.setattr("flexkv.simulation.symbolic_volumes.require", lambda *_: None)


@pytest.mark.usefixtures("unjudged")
@pytest.mark.parametrize("measured", [False, True])
def test_many_blocks_take_as_many_lines_as_few(measured: bool) -> None:
    assert lines_of(MANY, measured) == lines_of(FEW, measured)


def lines_of_a_put_into_full_tiers(blocks: int) -> list[int]:
    """Returns the number of lines that run for a store and for the plan of its write, twice. The second time each block
    evicts another.
    """
    lines: list[int] = []
    world = DiskWorld(slots=blocks, places=blocks, mode=WriteMode.THROUGH)
    manager = world.manager
    told: list[int] = []
    record_evict = world.disk.record_evict

    def note(group: int, places: Any, generations: Any) -> None:
        told.append(len(places))
        record_evict(group, places, generations)

    world.disk.record_evict = note  # type: ignore[method-assign]
    for seed in range(2):
        with counted(lines):
            plan = world.manager.begin_store(
                "w", 0, chain(blocks, seed), np.arange(blocks, dtype=np.int32), 0
            )
        assert plan.graph is not None
        assert (len(plan.stored), plan.dropped) == (blocks, 0)
        world.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, NONE))
        with counted(lines):
            planned = manager.work.poll()
        (write,) = [op for _, graph in planned for op in graph.ops]
        assert write.pages == blocks
        manager.work.complete(OpResult(OpId(write.op_id), OpStatus.OK, NONE))
    assert told == [blocks], "what leaves the disk is told at once, and only what leaves"
    assert world.tier.counts.evicted == blocks
    return lines


@pytest.mark.usefixtures("unjudged")
def test_a_put_into_full_tiers_displaces_as_many_as_it_brings_and_in_bulk() -> None:
    assert lines_of_a_put_into_full_tiers(MANY) == lines_of_a_put_into_full_tiers(FEW)


@pytest.mark.usefixtures("unjudged")
def test_a_loop_over_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Promotions.end_fetch
    source = "def looping(op):\n    for _ in op.host.tolist():\n        pass\n"
    space: dict[str, Any] = {}
    exec(compile(source, f"{FOLDER}/moves/fetches.py", "exec"), space)

    def both(self: Promotions, op: FetchOp, result: OpResult, current: bool) -> None:
        space["looping"](op)
        complete(self, op, result, current)

    monkeypatch.setattr(Promotions, "end_fetch", both)
    assert lines_of(MANY, False) != lines_of(FEW, False)
