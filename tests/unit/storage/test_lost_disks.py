"""A disk that fails, hangs or cannot be opened is taken out of service, and the unit's other disks remain in use."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.observe import NamedThread
from flexkv.storage.base import LostDisk
from flexkv.storage.disk_volume import DiskVolume
from flexkv.storage.journal import Journal
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from tests import testing_ext
from tests.read_only_mount import make_read_only
from tests.unit.storage.disk_world import (
    CORRUPT,
    FAIL,
    GENEROUS_S,
    SHORT,
    STALL,
    DiskWorld,
    MakeDisks,
    ids,
    keys_of,
)

BACKENDS = ["threads", *(["uring"] if not c_ext.uring_refusal() else [])]


def lost_of(world: DiskWorld, count: int = 0) -> list[LostDisk]:
    """Polls until at least `count` disks are reported lost. Returns all disks that are reported lost. It must poll,
    because an op's result comes before the report that its disk is lost."""

    def lost() -> list[LostDisk]:
        return [lost for events in world.events for lost in events.lost]

    world.poll()
    world.until(lambda: len(lost()) >= count, f"{count} disks were not lost")
    return lost()


@pytest.mark.parametrize("io", BACKENDS)
def test_a_read_error_is_a_miss_of_that_page(make_disks: MakeDisks, io: str) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=False, nth=1)])
    world = make_disks(faults=faults, io=io)
    _, generations = world.write(range(4), range(4))
    result = world.read(range(4), range(4), generations)
    assert result.failed.tolist() == [1]
    assert "disk miss (io) on disk 0, slot 1: Input/output error" in result.reason
    assert lost_of(world) == []


@pytest.mark.parametrize("io", BACKENDS)
@pytest.mark.parametrize("moved", [0, 4096, 20480])
def test_a_short_read_is_a_miss(make_disks: MakeDisks, io: str, moved: int) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(SHORT, write=False, nth=0, bytes=moved)])
    world = make_disks(faults=faults, io=io)
    _, generations = world.write([1], [0])
    assert "disk miss (short)" in world.read([1], [0], generations).reason
    assert world.read([1], [0], generations).status is OpStatus.OK


@pytest.mark.parametrize("write", [False, True])
def test_bytes_that_change_on_the_way_are_a_miss(make_disks: MakeDisks, write: bool) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(CORRUPT, write=write, nth=0, bytes=12_345)])
    world = make_disks(faults=faults)
    _, generations = world.write([1], [0])
    assert "disk miss (data)" in world.read([1], [0], generations).reason


@pytest.mark.parametrize("action", [FAIL, SHORT])
def test_a_failed_write_is_not_published(make_disks: MakeDisks, action: int) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(action, write=True, nth=1, bytes=4096)])
    world = make_disks(faults=faults)
    result, generations = world.write(range(3), range(3))
    assert result.failed.tolist() == [1]
    good = np.array([0, 2])
    world.wait_durable(good.tolist(), generations[good])
    assert world.close()
    assert sorted(make_disks().unit.rows(0).places.tolist()) == [0, 2]


@pytest.mark.parametrize(("error", "text"), [(30, "Read-only"), (19, "No such device")])
def test_a_read_only_or_absent_disk_is_taken_out_and_the_other_goes_on(
    make_disks: MakeDisks, error: int, text: str
) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=True, disk=1, error=error)])
    world = make_disks(2, faults=faults)
    result, generations = world.write(range(6), range(6))
    assert result.failed.tolist() == [1, 3, 5]
    assert f"disk write to disk 1, slot 0: {text}" in result.reason
    (lost,) = lost_of(world, 1)
    assert lost.disk == 1
    assert text in lost.reason
    assert world.unit.alive == (True, False)
    # Pages for slots of the lost disk fail without another I/O.
    acted = faults.acted
    result, _ = world.write([10, 11], [10, 11], publish=False)
    assert result.failed.tolist() == [1]
    assert "was taken out" in result.reason
    assert faults.acted == acted
    world.wait_durable([0, 2, 4], generations[[0, 2, 4]])
    assert lost_of(world) == [lost]  # the same disk is not reported again


def test_a_disk_that_fails_all_reads_is_taken_out(make_disks: MakeDisks) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=False, disk=0)])
    world = make_disks(2, faults=faults)
    _, generations = world.write(range(30), range(30))
    result = world.read(range(30), range(30), generations)
    assert result.failed.tolist() == list(range(0, 30, 2))
    (lost,) = lost_of(world, 1)
    assert "times in a row" in lost.reason


@pytest.mark.parametrize("io", BACKENDS)
def test_a_hung_disk_does_not_take_the_other_down(make_disks: MakeDisks, io: str) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(STALL, write=False, disk=0)])
    world = make_disks(2, faults=faults, io=io, stuck_s=2.0)
    _, generations = world.write(range(8), range(8))
    tags = make_tags(keys_of([0]), 0, generations[:1], 16)
    hung = TransferOp(
        OpId(9_001), OpKind.DISK_READ, 0, Priority.LOAD, ids([]), ids([0]), places=ids([0]), tags=tags
    )
    ticket = world.engine.submit(TransferGraph((hung,)))
    assert ticket is not None
    assert faults.wait_stalled(1, GENEROUS_S)
    world.until(lambda: not world.unit.alive[0], "the hung disk was not found")
    assert "has not ended" in lost_of(world, 1)[0].reason
    assert all(lane.up for lane in world.engine.lanes())
    result = world.read(range(8), range(8), generations)
    assert result.failed.tolist() == [0, 2, 4, 6]
    # The op finishes only after its hanging I/O: until then the device may write to the op's host slot.
    assert not world.engine.wait(ticket, 0)
    faults.release()
    assert world.engine.wait(ticket, GENEROUS_S)


def test_a_failed_sync_is_not_durable(make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is not durable if the sync of the journal fails: fdatasync returns EIO."""

    def fail(self: Journal, groups: set[int]) -> None:
        if groups:
            raise DiskError("fdatasync of the slab of group 0: Input/output error")

    monkeypatch.setattr(Journal, "_sync_data", fail)
    world = make_disks()
    world.write([1], [0])
    world.until(lambda: not world.unit.alive[0], "the disk was not taken out")
    assert world.durable == set()
    monkeypatch.undo()
    world.close()
    assert len(make_disks().unit.rows(0)) == 0


def test_an_index_that_cannot_be_written_for_a_while_loses_nothing(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SQLite reports a full disk for two commits of the index and then succeeds, no page is lost."""
    from flexkv.storage.index import SlotIndex

    commit, failures = SlotIndex.commit, iter([True, True])

    def sometimes(self: SlotIndex) -> None:
        if next(failures, False):
            raise DiskError("index.sqlite: database or disk is full")
        commit(self)

    world = make_disks()
    monkeypatch.setattr(SlotIndex, "commit", sometimes)
    _, generations = world.write([1, 2], [0, 1])
    world.wait_durable([0, 1], generations)
    assert lost_of(world) == []


def test_a_disk_that_cannot_be_opened_is_lost_and_the_other_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    world = DiskWorld([tmp_path / "good", tmp_path / "file"])
    assert [lost.disk for lost in lost_of(world, 1)] == [1]
    result, _ = world.write([1, 2], [0, 1], publish=False)
    assert result.failed.tolist() == [1]
    assert world.unit.slots(0) == 64
    assert world.close()


def test_a_disk_without_a_thread_for_its_journal_is_lost_and_the_other_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = NamedThread.start, []

    def second_fails(self: NamedThread) -> None:
        started.append(self.name)
        if started.count("flexkv-journal") == 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(NamedThread, "start", second_fails)
    world = DiskWorld([tmp_path / "good", tmp_path / "bad"])
    (lost,) = lost_of(world, 1)
    assert lost.disk == 1
    assert "no thread for its journal" in lost.reason
    result, _ = world.write([1, 2], [0, 1], publish=False)
    assert result.failed.tolist() == [1]
    alone = DiskWorld([tmp_path / "bad"])
    assert alone.close(), "its folder was let go"
    assert world.close()
    assert DiskWorld([tmp_path / "good", tmp_path / "bad"]).close()


def test_an_opening_that_breaks_off_at_the_second_disk_lets_the_first_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second disk cannot be opened, for example because its index does not fit in memory, the failed opening
    ends the thread of the first disk's journal.
    """
    before = set(threading.enumerate())
    begin_use, begun = DiskVolume.begin_use, []

    def second_fails(self: DiskVolume, opens: int, epoch: int) -> None:
        begun.append(self.folder)
        if len(begun) == 2:
            raise MemoryError("no room for its rows")
        begin_use(self, opens, epoch)

    folders = [tmp_path / "first", tmp_path / "second"]
    with monkeypatch.context() as patched:
        patched.setattr(DiskVolume, "begin_use", second_fails)
        with pytest.raises(MemoryError):
            DiskWorld(folders)
    assert set(threading.enumerate()) <= before
    assert DiskWorld(folders).close(), "both folders were let go"


def test_without_any_disk_there_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DiskError, match="no disk can be used"):
        DiskWorld([tmp_path / "file"])


def test_a_disk_too_small_for_its_slab_is_lost_at_open(small_disk: Path, tmp_path: Path) -> None:
    world = DiskWorld([tmp_path / "large", small_disk], slots=64)
    (lost,) = lost_of(world, 1)
    assert lost.disk == 1
    assert "No space left" in lost.reason
    assert world.close()
    assert sum(path.stat().st_blocks for path in small_disk.rglob("*.slab")) * 512 < 64 << 10


def test_a_read_only_file_system_is_lost_at_open(small_disk: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "large", small_disk]
    world = DiskWorld(folders, slots=8)
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    assert world.close()
    make_read_only(small_disk)
    world = DiskWorld(folders, slots=8)
    (lost,) = lost_of(world, 1)
    assert "Read-only" in lost.reason
    assert sorted(world.unit.rows(0).places.tolist()) == [0, 2]
    assert world.close()


def test_bytes_of_a_write_in_flight_at_close_are_recorded(make_disks: MakeDisks) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(STALL, write=True, nth=0)])
    world = make_disks(faults=faults)
    world.fill(0, 1)
    generations = world.unit.next_generations(1)
    write = TransferOp(
        OpId(77),
        OpKind.DISK_WRITE,
        0,
        Priority.STORE,
        ids([]),
        ids([0]),
        places=ids([5]),
        tags=make_tags(keys_of([1]), 0, generations, 16),
    )
    assert world.engine.submit(TransferGraph((write,))) is not None
    assert faults.wait_stalled(1, GENEROUS_S)
    assert not world.engine.close(0)
    faults.release()
    assert world.engine.close(GENEROUS_S)
    (result,) = world.engine.poll()
    assert result.status is OpStatus.OK
    world.unit.record_publish(0, keys_of([1]), ids([5]), generations, np.array([16], np.int32))
    assert world.unit.close(GENEROUS_S)
    rows = make_disks().unit.rows(0)
    assert rows.places.tolist() == [5]


def test_a_deleted_slab_is_found_and_nothing_more_is_called_durable(make_disks: MakeDisks) -> None:
    world = make_disks(2)
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    (world.folder / "group0.slab").unlink()
    result, _ = world.write([10], [10])
    assert result.status is OpStatus.OK
    world.until(lambda: not world.unit.alive[0], "the deletion was not noticed")
    lost = [lost for events in world.events for lost in events.lost]
    assert [(disk.disk, "deleted" in disk.reason) for disk in lost] == [(0, True)]
    result = world.read(range(4), range(4), generations)
    assert result.failed.tolist() == [0, 2]
    assert "was taken out" in result.reason
    _, more = world.write([20], [21])  # the unit's other disk is still in use
    world.wait_durable([21], more)


def test_a_folder_that_cannot_be_listed_is_lost_and_the_other_serves(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob = Path.glob

    def fail(self: Path, pattern: str) -> Iterator[Path]:
        if "disk0" in self.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", fail)
    world = make_disks(2)
    assert world.unit.alive == (False, True)
    (lost,) = lost_of(world, 1)
    assert "disk0" in lost.reason
    assert "Input/output error" in lost.reason
    _, generations = world.write([1], [1])
    world.wait_durable([1], generations)
