"""Tests the driver that passes disk ops to the data plane. In these tests the data plane is a fake that moves
symbols.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, TierId
from flexkv.cache.tiers.contract import WriteMode
from flexkv.errors import ClosedError
from flexkv.facts.keys import Rule
from flexkv.simulation.symbolic_volumes import SymbolicVolumes
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpId, OpResult, OpStatus, TransferGraph
from flexkv.unit.driver import UnitDriver
from tests.unit.cache.disk_world import DiskWorld, chain, traffic


class FakePlane:
    """A fake data plane that ends a graph after `steps` polls and accepts at most `room` graphs at a time."""

    def __init__(self, world: DiskWorld, steps: int = 1, room: int = 100) -> None:
        self.world = world
        self.steps = steps
        self.room = room
        self.error: Exception | None = None
        self.close_error: Exception | None = None
        self.strange: list[OpResult] = []
        """Unexpected results that `poll` returns just before the next real result."""
        self.queue: list[TransferGraph] = []
        self.submitted = 0
        self.closed = False
        self._polls = 0

    def submit(self, graph: TransferGraph) -> int | None:
        if self.error is not None:
            raise self.error
        if len(self.queue) >= self.room:
            return None
        for op in graph.ops:
            self.world.lane.submit(op)
        self.queue.append(graph)
        self.submitted += 1
        return self.submitted

    def poll(self) -> list[OpResult]:
        self._polls += 1
        if self._polls % (self.steps + 1) or not self.queue:
            return []
        (op,) = self.queue.pop(0).ops
        while not self.world.lane.move_page(op.op_id, False):
            continue
        _, failed = self.world.lane.end(op.op_id)
        status = OpStatus.FAILED if failed else OpStatus.OK
        strange, self.strange = self.strange, []
        return [*strange, OpResult(OpId(op.op_id), status, np.array(failed, np.int32))]

    def close(self, deadline_s: float) -> bool:
        self.closed = True
        if self.close_error is not None:
            raise self.close_error
        return not self.queue


def make(world: DiskWorld, **plane: int) -> tuple[UnitDriver, FakePlane]:
    fake = FakePlane(world, **plane)
    world.tier.plane = fake
    return UnitDriver(world.manager, clock=lambda: world.now_s), fake


def settle(driver: UnitDriver) -> None:
    for _ in range(200):
        driver.poll()
        if not driver.busy:
            return
    raise AssertionError("the driver never came to rest")


def test_pages_go_down_and_come_up() -> None:
    world, keys = DiskWorld(), chain(5)
    driver, plane = make(world)
    assert not driver.busy
    world.store(keys)
    assert driver.busy
    settle(driver)
    assert world.tier.counts.written == 5
    world.now_s += 1
    driver.poll()
    assert world.tier.durable_pages == 5
    world.drop_host()
    assert world.match(keys).reads == 1
    settle(driver)
    assert world.match(keys).blocks == 5
    assert plane.submitted == 2


def test_what_a_journal_had_no_room_for_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journal records that are pending count as work of the driver. Otherwise an idle engine would not poll until the
    records are flushed.
    """
    driver, _ = make(DiskWorld())
    assert not driver.busy
    monkeypatch.setattr(SymbolicVolumes, "unflushed", True)
    assert driver.busy


def test_a_poll_with_nothing_to_do_does_not_poll() -> None:
    world = DiskWorld()
    driver, plane = make(world)
    for _ in range(10):
        driver.poll()
    assert plane._polls == 0


def test_a_full_lane_drops_a_write_and_misses_a_read() -> None:
    world, keys = DiskWorld(), chain(4)
    driver, plane = make(world, room=0)
    world.store(keys)
    settle(driver)
    assert world.tier.counts.failed_writes == 4
    plane.room = 10
    world.drop_host()
    world.store(keys)
    settle(driver)
    world.drop_host()
    plane.room = 0
    assert world.match(keys).reads == 1
    settle(driver)
    assert not world.manager.waits("r")
    assert world.tier.counts.unread == 4
    world.manager.check_integrity()
    plane.room = 10
    world.match(keys)
    settle(driver)
    assert world.match(keys).blocks == 4


@pytest.mark.parametrize("error", [None, ClosedError("closed")], ids=["full", "closed"])
def test_loads_that_wait_for_a_read_hear_that_it_is_never_made(error: Exception | None) -> None:
    world, keys = DiskWorld(limits=traffic(streams=True)), chain(4)
    driver, plane = make(world)
    heard: list[tuple[list[int], int]] = []
    driver._fail_read = lambda slots, read: heard.append((slots.tolist(), read))
    world.store(keys)
    settle(driver)
    world.drop_host()
    slots = world.look(keys).groups[0].slots.tolist()
    load = world.load(4)
    plane.room, plane.error = 0, error
    settle(driver)
    assert heard == [(slots, int(load.reads[0]))]


@pytest.mark.parametrize(
    "error", [ClosedError("the engine was closed"), RuntimeError("can't start new thread")], ids=repr
)
def test_a_data_plane_that_refuses_turns_the_disks_off(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world, keys = DiskWorld(), chain(4)
    driver, plane = make(world)
    world.store(keys[:2])
    world.store(keys[2:], first=2)
    plane.error = error
    settle(driver)
    assert type(error).__name__ in world.tier.down
    assert caplog.text.count("the disk tier is off") == 1
    assert world.match(keys).blocks == 4
    world.store(chain(2, seed=2))
    settle(driver)
    world.manager.check_integrity()


def unfit(op_id: int) -> dict[str, OpResult]:
    """Returns results that a faulty lane could report for the op in flight, by the fault."""
    none, far = np.empty(0, np.int32), np.array([99], np.int32)
    return {
        "of an op that is not in flight": OpResult(OpId(op_id + 1000), OpStatus.OK, none),
        "well, and lists a page": OpResult(OpId(op_id), OpStatus.OK, np.zeros(1, np.int32)),
        "a page that it has not": OpResult(OpId(op_id), OpStatus.FAILED, far),
        "more causes than pages": OpResult(
            OpId(op_id), OpStatus.FAILED, np.zeros(1, np.int32), causes=np.zeros(3, np.uint8)
        ),
    }


@pytest.mark.parametrize("kind", unfit(0))
@pytest.mark.parametrize("way", ["write", "read"])
def test_a_result_that_does_not_fit_turns_the_disks_off_and_leaves_nothing_pinned(
    kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, keys = DiskWorld(), chain(4)
    driver, plane = make(world)
    world.store(keys)
    if way == "read":
        settle(driver)
        world.drop_host()
        assert world.match(keys).reads == 1
    driver.poll()
    ((op,),) = [graph.ops for graph in plane.queue]
    plane.strange = [unfit(op.op_id)[kind]]
    settle(driver)
    assert "does not fit" in world.tier.down
    assert caplog.text.count("the disk tier is off") == 1
    assert not world.manager.waits("r")
    world.manager.end_request("r")
    world.manager.check_integrity()
    assert not world.manager.work.moving
    world.drop_host()
    assert world.manager.free_slots(0) == 8
    assert driver.close(30.0)


def test_a_tier_does_not_end_the_ops_of_another() -> None:
    """If a tier reports an op of another tier, the op stays in flight, because the other tier's lane may still move the
    op's bytes.
    """
    world = DiskWorld()
    world.store(chain(2))
    (op,) = world.take()
    result = OpResult(OpId(op.op_id), OpStatus.OK, np.empty(0, np.int32))
    world.manager.work.take_down = lambda tier, reason: None  # type: ignore[method-assign]
    world.manager.work.reported(TierId(2), result)
    assert world.manager.work.moving
    world.end(op)
    assert not world.manager.work.moving


def test_a_lane_that_cannot_be_closed_keeps_nothing_else_open(caplog: pytest.LogCaptureFixture) -> None:
    world = DiskWorld()
    driver, plane = make(world)
    plane.close_error = OSError("the device is gone")
    assert not driver.close(1.0)
    assert world.disk.closed
    assert "the device is gone" in caplog.text


def test_the_operator_hears_that_pages_are_computed_instead(caplog: pytest.LogCaptureFixture) -> None:
    world, keys = DiskWorld(), chain(6)
    driver, _ = make(world)
    world.store(keys)
    settle(driver)
    world.drop_host()
    rates = world.manager.cost
    with caplog.at_level("INFO"):
        for request in range(3):
            for n in range(8):
                rates.fetch(DISK).see(n + 1, n + 1, world.now_s)
                rates.compute.see(n + 1, 1e-6, world.now_s)
            assert world.match(keys, f"r{request}").reads == 0
            world.now_s += 1
            driver.poll()
    assert caplog.text.count("left to the engine") == 1


def test_lost_disks_are_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    world, keys = DiskWorld(), chain(6)
    driver, _ = make(world)
    world.store(keys)
    settle(driver)
    world.disk.lose(1)
    for _ in range(3):
        world.now_s += 1
        driver.poll()
    assert caplog.text.count("is out of use") == 1
    assert world.tier.counts.gone == 3
    assert world.tier.down == ""
    world.disk.lose(0)
    world.now_s += 1
    driver.poll()
    assert str(world.tier.down) == "no disk is left"


@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.BACK, WriteMode.EVICT])
def test_a_close_writes_what_is_not_on_disk(mode: WriteMode) -> None:
    world, keys = DiskWorld(mode=mode), chain(6)
    driver, plane = make(world, steps=3)
    world.store(keys)
    assert driver.close(30.0)
    assert plane.closed
    assert world.disk.closed
    assert len(world.disk.journal[0]) == 6
    driver.poll()
    assert driver.close(0.0)
    again = DiskWorld(disk=SymbolicVolumes.reopened(world.disk))
    assert again.hits(keys) == 6


def test_a_close_writes_what_was_used_last_where_the_disk_is_smaller() -> None:
    world = DiskWorld(slots=16, places=8, mode=WriteMode.EVICT)
    old, new = chain(6, seed=1), chain(6, seed=2)
    for name, keys in (("old", old), ("new", new)):
        world.store(keys, name=name)
        world.manager.release(name)
    driver, _ = make(world)
    assert driver.close(30.0)
    again = DiskWorld(disk=SymbolicVolumes.reopened(world.disk))
    assert (again.hits(new), again.hits(old)) == (6, 2)


def test_a_close_writes_what_was_used_last_of_all_groups_that_share_slots() -> None:
    groups = (GroupSpec(4, 16), GroupSpec(4, 16, Rule.WINDOW, 1, shares=0))
    world = DiskWorld(groups=groups, places=8, mode=WriteMode.EVICT)
    old, new = chain(9, seed=1), chain(6, seed=2)
    for group, keys in enumerate((old, new)):
        world.store(keys, name=f"r{group}", group=group)
        world.manager.release(f"r{group}")
    driver, _ = make(world)
    assert driver.close(30.0)
    there = [int(np.count_nonzero(world.tier.present(group, keys))) for group, keys in enumerate((old, new))]
    assert there == [2, 6]
    assert world.tier.counts.dropped_writes == 7


def test_a_close_does_not_write_twice() -> None:
    world, keys = DiskWorld(mode=WriteMode.THROUGH), chain(6)
    driver, plane = make(world)
    world.store(keys)
    settle(driver)
    submitted = plane.submitted
    assert driver.close(30.0)
    assert plane.submitted == submitted


def test_a_close_begins_no_write_that_has_no_time_to_end(caplog: pytest.LogCaptureFixture) -> None:
    world = DiskWorld(mode=WriteMode.EVICT, limits=traffic(write_pages=2))
    driver, _ = make(world, steps=10**9)
    world.store(chain(6))
    assert not driver.close(0.1)
    assert "4 pages of host memory were not written" in caplog.text
    assert world.tier.counts.lost == 4


def test_a_look_that_lasts_past_the_deadline_counts_what_it_did_not_write(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = DiskWorld(mode=WriteMode.EVICT, limits=traffic(write_pages=2))
    driver, _ = make(world, steps=10**9)
    world.store(chain(6))
    monkeypatch.setattr("flexkv.unit.driver.CLOSE_LOOK_S", 0.3)
    assert not driver.close(0.2)
    assert "4 pages of host memory were not written" in caplog.text
    assert world.tier.counts.lost == 4


def test_a_close_past_its_deadline_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = DiskWorld()
    driver, _ = make(world, steps=10**9)
    world.store(chain(2))
    assert not driver.close(0.05)
    assert caplog.text.count("did not end") == 1
    assert not driver.close(0.05), "nothing has become durable since"
    assert caplog.text.count("did not end") == 1


@pytest.mark.parametrize("shared", [True, False], ids=["", "control"])
def test_a_part_that_hangs_leaves_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """If one part hangs during a close, the parts that close later still get time. In this test a write hangs, and so
    does the lane's close; the journal still gets time. In the control, the driver reserves no time for later parts.
    """
    world = DiskWorld()
    driver, plane = make(world, steps=10**9)
    world.store(chain(2))
    given: list[float] = []

    def hang(deadline_s: float) -> bool:
        time.sleep(deadline_s)
        return False

    def close(deadline_s: float) -> bool:
        given.append(deadline_s)
        return True

    monkeypatch.setattr(plane, "close", hang)
    monkeypatch.setattr(world.tier, "close", close)
    if not shared:
        monkeypatch.setattr("flexkv.unit.driver.WORK_SHARE", 1.0)
    begun_s = time.monotonic()
    assert not driver.close(0.5)
    assert (given[0] > 0.02) == shared
    assert time.monotonic() - begun_s < 5.0


def test_a_close_that_began_too_few_writes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close returns False if it began too few of the waiting writes, although the lane and the journal close in
    time.
    """
    world = DiskWorld(mode=WriteMode.EVICT, limits=traffic(write_pages=2))
    driver, _ = make(world)
    world.store(chain(6))
    monkeypatch.setattr("flexkv.unit.driver.FLUSH_SHARE", 0.0)
    assert not driver.close(30.0)
    assert world.tier.counts.lost == 4
    assert not driver.close(30.0)
