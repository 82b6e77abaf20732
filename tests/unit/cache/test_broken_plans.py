"""If memory runs out once while the control plane plans, no lease, slot or op is left over, whichever line is
interrupted.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import flexkv.cache
from flexkv.cache.base import GroupSpec, MatchResult, StorePlan
from flexkv.cache.moves.broken_plan import BrokenPlans
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.errors import FlexKVError
from flexkv.facts.keys import Keys, Rule
from flexkv.transfer.graph import BlockIds
from tests.soak import soak_factor
from tests.unit.cache import disk_world
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, chain, traffic, two_groups

CONTROL_PLANE = str(Path(flexkv.cache.__file__).parent)
NOT_INJECTED = ("broken_plan.py", "op_log.py", "outbox.py")
"""Files in which no error is raised: the code that undoes plans, the log, and a list whose only allocation comes before
it changes.
"""

PAGES = 4


PASS_ON = frozenset(
    dis.opmap[name]
    for name in ("LOAD_FAST", "STORE_FAST", "POP_TOP", "JUMP_FORWARD", "RETURN_VALUE", "NOP")
    if name in dis.opmap
)
"""Opcodes that allocate nothing and call nothing, so that they cannot fail."""


@functools.cache
def opcodes_of(code: CodeType) -> bytes:
    return code.co_code


def only_passes_on(frame: FrameType) -> bool:
    """Returns whether the next opcode of the frame is one of `PASS_ON`."""
    return opcodes_of(frame.f_code)[frame.f_lasti] in PASS_ON


class MemoryRunsOut:
    """Counts the steps of the control plane's code, and raises MemoryError before step number `at`, counted from 0.

    Args:
        each: the kind of step: "line" or "opcode". Opcodes of `PASS_ON` do not count.
    """

    def __init__(self, at: int, each: str) -> None:
        self._at = at
        self._each = each
        self.steps = 0
        self.where = ""

    def run(self, call: Callable[[], object]) -> bool:
        """Makes the call. Returns whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except MemoryError:
            return True
        finally:
            sys.settrace(before)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(CONTROL_PLANE) or file.endswith(NOT_INJECTED):
            return None
        frame.f_trace_opcodes = self._each == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._each and not (event == "opcode" and only_passes_on(frame)):
            self.steps += 1
            if self.steps == self._at + 1:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise MemoryError(f"before {self.where}")
        return self._step


@dataclass
class Case:
    """A world (a manager with simulated tiers), and a call to its manager that plans and is interrupted.

    Attributes:
        again: a call that must work as usual after the request of the interrupted call has ended.
    """

    world: DiskWorld
    call: Callable[[], Any]
    again: Callable[[], Any]

    def check_nothing_is_left(self) -> None:
        """Ends all ops and requests, and checks that all host slots can be freed."""
        world, manager = self.world, self.world.manager
        manager.check_integrity()
        for op in [op for op in manager.tables.ops if op.role.value in ("load", "store")]:
            world._ended(op.plan)
        for plan in list(world.lane.ops.values()):
            world.end(plan)
        world.run()
        for name in ("r", "w"):
            manager.end_request(name)
        manager.check_integrity()
        assert manager.inflight_ops() == 0
        assert not manager.work.moving
        assert manager.tables.requests.reserved_pages == 0
        for group, tier_slots in enumerate(len(slots) for slots in world.host):
            assert manager.held_slots(group) == set()
            world.drop_host()
            assert manager.free_slots(group) == tier_slots


def stores(world: DiskWorld, keys: Keys, blocks: BlockIds) -> Case:
    def call() -> StorePlan:
        return world.manager.begin_store("w", 0, keys, blocks, 0)

    return Case(world, call, call)


def store(gds: bool = False) -> Case:
    """Makes a case that stores into a full host tier, which evicts blocks. If `gds` is set, it stores directly to
    disk.
    """
    limits = traffic(gds_loads=GdsUse.ALWAYS, gds_stores=True) if gds else traffic()
    world = DiskWorld(limits=limits)
    if not gds:
        world.store(chain(6, seed=9), "earlier")
        world.run()
    keys = chain(PAGES)
    blocks = np.arange(PAGES, dtype=np.int32)
    return stores(world, keys, blocks)


def store_of_what_is_read(gds: bool) -> Case:
    """Makes a case that stores blocks of which some are being read from disk."""
    limits = traffic(gds_loads=GdsUse.ALWAYS, gds_stores=True) if gds else traffic()
    keys = chain(PAGES + 2)
    world = disk_world.written(keys[:PAGES], limits=traffic())
    if gds:
        world = _with_disk_of(world, limits)
    world.look(keys[:PAGES])
    world.take()
    if gds:
        world.load(PAGES)
    blocks = np.arange(len(keys), dtype=np.int32) + 20
    return stores(world, keys, blocks)


def _with_disk_of(world: DiskWorld, limits: Any) -> DiskWorld:
    """Makes a world with a new manager for the same disks."""
    return DiskWorld(disk=world.disk.reopened(world.disk), limits=limits)


def look(groups: int = 1, **facts: Any) -> Case:
    """Makes a case that looks up blocks, of which the first is in host memory and the others are on disk."""
    limits = traffic(**facts)
    if groups == 2:
        world, keys = two_groups(PAGES, limits=limits)
    else:
        keys = [chain(PAGES)]
        world = disk_world.written(keys[0], limits=limits)
    for group, mine in enumerate(keys):
        world.store(mine[:1], f"earlier {group}", group)
    world.run()

    def call() -> MatchResult:
        return world.manager.match("r", keys, 0)

    return Case(world, call, call)


def look_again() -> Case:
    """Makes a case that looks up again after the wait for a fetch, when the blocks are leased already."""
    looking = look()
    looking.call()
    looking.world.run()
    return looking


def look_with_window() -> Case:
    """Makes a case that looks up groups with different rules, some of whose pages are on disk."""
    world = DiskWorld(groups=(GroupSpec(BLOCK_TOKENS, 8), GroupSpec(BLOCK_TOKENS, 8, Rule.WINDOW, 2)))
    keys = [chain(PAGES), chain(PAGES, seed=1)]
    for group, mine in enumerate(keys):
        world.store(mine, group=group)
    world.run()
    world.drop_host()
    for group, mine in enumerate(keys):
        world.store(mine[:1], f"earlier {group}", group)
    world.run()

    def call() -> MatchResult:
        return world.manager.match("r", keys, 0)

    return Case(world, call, call)


def prefetch(groups: int = 1, **facts: Any) -> Case:
    """Makes a case that prefetches blocks from disk."""
    keys, limits = [chain(PAGES)], traffic(**facts)
    if groups == 2:
        world, keys = two_groups(PAGES, limits=limits)
    else:
        world = disk_world.written(keys[0], limits=limits, slots=32)

    def call() -> int:
        return world.manager.prefetch("r", keys)

    return Case(world, call, call)


def look_for_prefetched() -> Case:
    """Makes a case that looks up blocks while they are being prefetched."""
    fetching = prefetch()
    fetching.call()

    def call() -> MatchResult:
        return fetching.world.manager.match("r", [chain(PAGES)], 0)

    return Case(fetching.world, call, call)


def load(groups: int = 1, **facts: Any) -> Case:
    """Makes a case that loads the blocks that a lookup has promised."""
    looking = look(groups, **facts)
    world, promised = looking.world, looking.call()
    assert promised.blocks
    targets = [np.arange(promised.blocks, dtype=np.int32)] * groups
    return Case(world, lambda: world.manager.begin_load("r", targets), looking.call)


CASES: dict[str, Callable[[], Case]] = {
    "store": store,
    "gds store": lambda: store(gds=True),
    "store of what is read": lambda: store_of_what_is_read(gds=False),
    "gds store of what is read": lambda: store_of_what_is_read(gds=True),
    "lookup": look,
    "lookup of two groups": lambda: look(2),
    "lookup that streams": lambda: look(streams=True),
    "lookup that finds pages where they lie": lambda: look(gds_loads=GdsUse.ALWAYS),
    "lookup again": look_again,
    "lookup of groups of other rules": look_with_window,
    "lookup of what was prefetched": look_for_prefetched,
    "prefetch": prefetch,
    "prefetch of two groups": lambda: prefetch(2),
    "load": load,
    "load of two groups": lambda: load(2),
    "load of what streams": lambda: load(streams=True),
    "load from host memory and disk": lambda: load(gds_loads=GdsUse.ALWAYS),
}


def break_everywhere(make: Callable[[], Case], each: str = "line") -> None:
    """Interrupts the call of a case before each of its steps.

    Raises:
        AssertionError: a lease, slot or op was left over; the message names the step.
    """
    counting = MemoryRunsOut(-1, each)
    assert not counting.run(make().call)
    assert counting.steps > 20
    for at in range(counting.steps):
        case, memory = make(), MemoryRunsOut(at, each)
        assert memory.run(case.call)
        try:
            case.check_nothing_is_left()
            case.again()
            case.check_nothing_is_left()
        except (AssertionError, FlexKVError, LookupError) as error:
            raise AssertionError(f"after a MemoryError before {memory.where}: {error!r}") from error


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_breaks_off_leaves_nothing_behind(name: str) -> None:
    break_everywhere(CASES[name], "line" if soak_factor() == 1 else "opcode")


@pytest.mark.parametrize("name", CASES)
def test_control_a_manager_that_undoes_nothing_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenPlans, "undo", lambda plans, last, error: None)
    with pytest.raises(AssertionError, match="after a MemoryError before"):
        break_everywhere(CASES[name])
