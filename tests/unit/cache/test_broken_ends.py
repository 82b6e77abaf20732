"""Memory runs out in the code that takes results, writes pages to disk, and ends requests and epochs. Each call is
interrupted before each of its lines. An op whose end is interrupted counts as failed with all its pages. No lease, slot
or op is left over, and no page that may be bad is visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flexkv.cache.moves.broken_plan import BrokenPlans
from flexkv.cache.tiers.contract import WriteMode
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.errors import ContractError
from flexkv.simulation.symbolic_volumes import stripe_digest
from flexkv.transfer.graph import OpResult, OpStatus, TransferOp
from tests.soak import soak_factor
from tests.unit.cache import disk_world
from tests.unit.cache.disk_world import NONE, DiskWorld, chain, traffic
from tests.unit.cache.test_broken_plans import PAGES, Case, MemoryRunsOut, break_everywhere

KEYS = chain(PAGES)
BLOCKS = np.arange(PAGES, dtype=np.int32)
BAD = np.array([1], np.int32)
GDS: dict[str, Any] = {"gds_loads": GdsUse.ALWAYS}


def ok(op: TransferOp) -> OpResult:
    return OpResult(op.op_id, OpStatus.OK, NONE)


def bad(op: TransferOp) -> OpResult:
    return OpResult(op.op_id, OpStatus.FAILED, BAD, "why")


@dataclass
class End(Case):
    """A case whose call ends an op, a request or an epoch.

    Attributes:
        op: the op whose result the call takes; None if the call ends something else.
    """

    op: TransferOp | None = None

    def check_nothing_is_left(self) -> None:
        if self.op is not None and self.op.op_id in self.world.manager.tables.ops:
            self.call()  # the interrupted call had not taken the result yet
        super().check_nothing_is_left()


def case(world: DiskWorld, call: Callable[[], Any], op: TransferOp | None = None) -> Case:
    """Returns a case after which a lookup and a store must work as usual."""

    def again() -> None:
        world.match(KEYS, "r")
        new = chain(2, seed=5)
        assert len(world.manager.begin_store("w", 0, new, BLOCKS[:2], 0).stored) == 2

    return End(world, call, again, op)


def store_ends(result: Callable[[TransferOp], OpResult]) -> Case:
    world = DiskWorld()
    graph = world.manager.begin_store("w", 0, KEYS, BLOCKS, 0).graph
    assert graph is not None
    (op,) = graph.ops
    for slot, key in zip(op.slots.tolist(), KEYS, strict=True):
        world.host[0][slot] = (0, key.tobytes())
    return case(world, lambda: world.manager.complete(0, result(op)))


def gds_store_ends(sealing: bool = False) -> Case:
    world = DiskWorld(limits=traffic(gds_stores=True, **GDS))
    graph = world.manager.begin_store("w", 0, KEYS, BLOCKS, 0).graph
    assert graph is not None
    (op,) = graph.ops
    symbols = [(0, key.tobytes()) for key in KEYS]
    for place, symbol in zip(op.places.tolist(), symbols, strict=True):
        world.disk.write_stripe(0, place, 0, symbol)
    digests = np.array([[stripe_digest(0, symbol)] for symbol in symbols], np.uint64)
    written = OpResult(op.op_id, OpStatus.OK, NONE, digests=digests)
    if not sealing:
        return case(world, lambda: world.manager.complete(0, written))
    world.manager.complete(0, written)
    return tier_op_ends(world)


def tier_op_ends(world: DiskWorld) -> Case:
    """Moves the pages of a tier's only planned op. Returns a case whose call reports that the op succeeded."""
    (op,) = world.take()
    while not world.lane.move_page(op.op_id, False):
        continue
    world.lane.end(op.op_id)
    return case(world, lambda: world.manager.work.complete(ok(op)), op)


def load_ends(result: Callable[[TransferOp], OpResult], on_disk: bool = False, **facts: Any) -> Case:
    world = disk_world.written(KEYS, limits=traffic(**facts)) if on_disk else DiskWorld()
    if not on_disk:
        world.store(KEYS, "earlier")
        world.run()
    promised = world.look(KEYS).blocks
    assert promised == PAGES
    op = world.load(promised)
    return case(world, lambda: world.manager.complete(0, result(op)))


def fetch_ends(fails: bool, loading: bool = False, **facts: Any) -> Case:
    """Returns a case that ends a fetch. A request waits for the fetch. If `loading` is set, a load waits for the
    fetched pages instead.
    """
    world = disk_world.written(KEYS, limits=traffic(**facts))
    world.look(KEYS)
    (fetch,) = world.take()
    while not world.lane.move_page(fetch.op_id, fails):
        continue
    if loading:
        world.load(PAGES)
    _, failed = world.lane.end(fetch.op_id)
    ended = OpResult(
        fetch.op_id, OpStatus.FAILED if failed else OpStatus.OK, np.array(failed, np.int32), "why"
    )
    return case(world, lambda: world.manager.work.complete(ended), fetch)


def write_ends(mode: WriteMode = WriteMode.THROUGH) -> Case:
    world = DiskWorld(mode=mode)
    world.store(KEYS)
    if mode is WriteMode.EVICT:
        world.store(chain(PAGES, seed=3), "other")
    return tier_op_ends(world)


def writes_are_planned(mode: WriteMode = WriteMode.THROUGH) -> Case:
    world = DiskWorld(mode=mode)
    world.store(KEYS)
    if mode is WriteMode.EVICT:
        world.store(chain(PAGES, seed=3), "other")

    def call() -> None:
        for _, graph in world.manager.work.poll():
            for op in graph.ops:
                world.lane.submit(op)

    return case(world, call)


def request_ends(end: str, waits: bool = False) -> Case:
    world = disk_world.written(KEYS) if waits else DiskWorld()
    if not waits:
        world.store(KEYS, "earlier")
        world.run()
    world.look(KEYS)
    if end == "expire":
        world.now_s += 10_000.0
        return case(world, world.manager.expire)
    return case(world, lambda: getattr(world.manager, end)("r"))


CASES: dict[str, Callable[[], Case]] = {
    "store": lambda: store_ends(ok),
    "store that failed": lambda: store_ends(bad),
    "gds store": gds_store_ends,
    "seal": lambda: gds_store_ends(sealing=True),
    "load": lambda: load_ends(ok),
    "load that failed": lambda: load_ends(bad),
    "gds load": lambda: load_ends(ok, on_disk=True, **GDS),
    "gds load that failed": lambda: load_ends(bad, on_disk=True, **GDS),
    "fetch": lambda: fetch_ends(False),
    "fetch that failed": lambda: fetch_ends(True),
    "fetch that streams": lambda: fetch_ends(False, loading=True, streams=True),
    "write": write_ends,
    "write of what leaves": lambda: write_ends(WriteMode.EVICT),
    "plan of writes": writes_are_planned,
    "plan of writes of what leaves": lambda: writes_are_planned(WriteMode.EVICT),
    "release": lambda: request_ends("release"),
    "release of what waits": lambda: request_ends("release", waits=True),
    "end of a request": lambda: request_ends("end_request"),
    "expiry": lambda: request_ends("expire"),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_an_end_that_breaks_off_leaves_nothing_behind(name: str) -> None:
    break_everywhere(CASES[name], "line" if soak_factor() == 1 else "opcode")


@pytest.mark.parametrize("name", [name for name in CASES if name != "plan of writes"])
def test_control_a_manager_that_undoes_no_end_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenPlans, "undo", lambda plans, last, error: None)
    with pytest.raises(AssertionError, match="after a MemoryError before"):
        break_everywhere(CASES[name])


def test_a_reset_that_breaks_off_promises_nothing_until_one_has_ended() -> None:
    def world_of_two() -> DiskWorld:
        world = disk_world.written(KEYS[:2])
        world.store(KEYS[2:], "later")
        return world

    memory = MemoryRunsOut(-1, "line")
    assert not memory.run(world_of_two().manager.reset)
    for at in range(memory.steps):
        world, broken = world_of_two(), MemoryRunsOut(at, "line")
        assert broken.run(world.manager.reset)
        if world.manager.promises.resetting:
            found = world.match(KEYS)
            assert (found.blocks, found.reads) == (0, 0), broken.where
            assert world.manager.prefetch("p", [KEYS]) == 0
        world.manager.check_integrity()
        world.manager.reset()
        assert world.hits(KEYS) == 0
        world.store(KEYS, "again")
        assert world.hits(KEYS) == PAGES


def test_control_pages_from_before_a_reset_that_broke_off_would_be_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = DiskWorld()
    world.store(KEYS)
    with monkeypatch.context() as broken:
        broken.setattr(world.manager.promises, "end_all", _runs_out)
        with pytest.raises(MemoryError):
            world.manager.reset()
    assert world.match(KEYS).blocks == 0
    world.manager.promises.resetting = False
    assert world.match(KEYS).blocks == PAGES


def test_what_a_load_computes_is_not_published_where_its_report_broke_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = DiskWorld()
    world.store(KEYS, "earlier")
    world.look(KEYS)
    load = world.load(PAGES)
    new = chain(2, seed=4)
    store = world.manager.begin_store("r", 0, new, BLOCKS[:2] + 10, PAGES).graph
    assert store is not None
    with monkeypatch.context() as broken:
        broken.setattr(world.manager, "discard_from", _runs_out)
        with pytest.raises(MemoryError):
            world.manager.complete(0, bad(load))
    world.load_ended(store)
    assert world.match(new, "other").blocks == 0
    world.manager.check_integrity()


def test_a_result_that_does_not_fit_leaves_its_op_in_flight() -> None:
    world = DiskWorld()
    world.store(KEYS, "earlier")
    world.look(KEYS)
    load = world.load(PAGES)
    with pytest.raises(ContractError, match="allowed are positions"):
        world.manager.complete(0, OpResult(load.op_id, OpStatus.FAILED, BAD + PAGES))
    assert world.manager.inflight_ops() == 1
    world.end_load(load)
    with pytest.raises(ContractError, match="not in flight"):
        world.manager.complete(0, ok(load))


def _runs_out(*arguments: object) -> None:
    raise MemoryError("for the test")
