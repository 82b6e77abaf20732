"""A full disk rejects only pages that need new space: it still serves its pages, and accepts new ones after space is
freed.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv.config import load_config
from flexkv.errors import DiskError
from flexkv.storage.epoch import read_epoch
from flexkv.storage.folder_share import bytes_per_folder, own_bytes
from flexkv.storage.group_tables import codec_of
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_trouble import FullDiskError
from flexkv.transfer.graph import OpStatus
from tests import testing_ext
from tests.unit.storage.disk_world import (
    FAIL,
    GENEROUS_S,
    IDENTITY,
    NO_HOLES,
    DiskWorld,
    MakeDisks,
    holes,
    make_group,
    sharing_groups,
)

IMAGE_BYTES = codec_of(make_group()).image_bytes


def fill_up(disk: Path) -> Path:
    """Writes a file that takes all the remaining space of the disk. Returns its path."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    return ballast


def fills(world: DiskWorld, first: int, most: int) -> tuple[list[int], np.ndarray, list[int]]:
    """Writes pages until some fail because the disk is full. Returns three lists: the disk slots that were written, the
    generations of these slots, and the disk slots whose write failed."""
    good, generations, failed = [], [], []
    for place in range(first, most):
        result, generation = world.write([place], [place])
        if result.failed.size:
            assert "No space left on device" in result.reason, result.reason
            failed.append(place)
        else:
            good.append(place)
            generations.append(int(generation[0]))
    return good, np.array(generations, np.uint64), failed


def until_written(world: DiskWorld, place: int) -> None:
    def written() -> bool:
        result, generations = world.write([place], [place])
        if result.status is OpStatus.OK:
            world.wait_durable([place], generations)
        return result.status is OpStatus.OK

    world.until(written, "the disk takes no pages again")


def test_a_disk_that_fills_up_serves_what_it_has_and_takes_pages_again_later(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = DiskWorld([small_disk], slots=64, preallocate=False)
    if not holes(world.folder / "group0.slab"):
        pytest.skip(NO_HOLES)
    good, generations, failed = fills(world, 0, 64)
    assert good
    assert failed
    world.poll()
    assert world.unit.alive == (True,)
    assert world.unit.stats().write_errors == len(failed)
    assert "takes no new pages: No space left on device" in caplog.text
    for at in range(0, len(good), 8):
        assert world.read(good[at : at + 8], good[at : at + 8], generations[at : at + 8]).reason == ""
    # A slot whose space is allocated accepts another page even while the disk is full.
    result, _ = world.write([700], [good[0]], publish=False)
    assert result.status is OpStatus.OK
    world.poll()
    assert "takes new pages again" not in caplog.text
    with open(world.folder / "group0.slab", "r+b") as slab:
        holes_before = holes(world.folder / "group0.slab")
        punch(slab.fileno(), world, good[-4:])
        assert holes(world.folder / "group0.slab") > holes_before
    until_written(world, failed[0])
    world.poll()
    assert "takes new pages again" in caplog.text
    assert world.unit.alive == (True,)
    assert world.close()


def punch(fd: int, world: DiskWorld, places: list[int]) -> None:
    """Frees the space of the pages in `places`, as if an operator had freed space on the disk."""
    import ctypes

    keep_size, punch_hole = 1, 2
    (slab,) = world.unit.slab_map().disks[0]
    libc = ctypes.CDLL(None, use_errno=True)
    for place in places:
        offset = ctypes.c_long(slab.header_bytes + place * slab.slot_bytes)
        assert libc.fallocate(fd, keep_size | punch_hole, offset, ctypes.c_long(slab.slot_bytes)) == 0


def test_a_full_disk_is_asked_again_only_after_a_pause(make_disks: MakeDisks) -> None:
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=True, nth=0, error=28, times=1)])
    world = make_disks(faults=faults, preallocate=False)
    if not holes(world.folder / "group0.slab"):
        pytest.skip(NO_HOLES)
    for place in range(3):
        result, _ = world.write([place], [place])
        assert "No space left on device" in result.reason
    assert faults.acted == 1, "the second and third were not tried"
    until_written(world, 3)
    assert world.unit.alive == (True,)


def test_a_full_disk_takes_a_small_image_where_one_lay(make_disks: MakeDisks) -> None:
    """On a full disk, a slot accepts a small image if a small image was there before. A slot is as large as the largest
    slot image of the groups that share it, but a small image allocates only the space that it covers. So a large image
    is rejected."""
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=True, nth=1, error=28, times=1)])
    first, *more = sharing_groups()
    world = make_disks(group=first, more=more, faults=faults, preallocate=False)
    if not holes(world.folder / "group0.slab"):
        pytest.skip(NO_HOLES)
    assert world.write([1], [0], of=2)[0].status is OpStatus.OK
    assert "No space left on device" in world.write([2], [1], of=2)[0].reason
    assert "No space left on device" in world.write([3], [0])[0].reason, (
        "the control: a large one was not tried"
    )
    assert faults.acted == 1
    assert world.write([4], [0], of=2)[0].status is OpStatus.OK


def test_a_disk_that_was_full_for_a_slot_with_space_takes_pages_again(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk counts as having space again after a successful write to any slot. On copy-on-write file systems and thin
    volumes, even a write to an allocated slot can run out of space."""
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=True, nth=4, error=28, times=1)])
    world = make_disks(faults=faults, preallocate=False)
    for place in range(4):
        assert world.write([place], [place])[0].status is OpStatus.OK
    assert "No space left on device" in world.write([10], [0])[0].reason
    world.poll()
    assert "takes no new pages: No space left on device" in caplog.text
    assert "takes new pages again" not in caplog.text
    assert world.write([11], [1])[0].status is OpStatus.OK
    world.poll()
    assert "takes new pages again" in caplog.text


def test_an_index_on_a_full_disk_is_written_when_there_is_space_again(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = DiskWorld([small_disk], slots=8, preallocate=True)
    ballast = fill_up(small_disk)
    _, generations = world.write(range(8), range(8))
    world.until(lambda: "it is tried again while the disk is full" in caplog.text, "the index was written")
    assert world.durable == set()
    assert world.unit.alive == (True,)
    assert world.read(range(8), range(8), generations).reason == ""
    ballast.unlink()
    world.wait_durable(range(8), generations)
    assert world.unit.alive == (True,)
    assert world.close()
    world = DiskWorld([small_disk], slots=8)
    assert len(world.unit.rows(0)) == 8
    assert not (world.folder / "index.damaged").exists()
    assert world.close()


@pytest.mark.parametrize("former", ["closed", "crashed"])
def test_a_disk_that_is_full_at_the_start_serves_its_pages(small_disk: Path, former: str) -> None:
    world = DiskWorld([small_disk], slots=8)
    _, generations = world.write(range(8), range(8))
    world.wait_durable(range(8), generations)
    if former == "crashed":
        left = small_disk.parent / "left"
        shutil.copytree(small_disk, left)
    assert world.close()
    if former == "crashed":
        for path in world.folder.iterdir():
            path.unlink()
        shutil.copytree(left, small_disk, dirs_exist_ok=True)
    fill_up(small_disk)
    for _ in range(2):  # the first start must leave the space that the second one needs
        world = DiskWorld([small_disk], slots=8)
        assert world.unit.alive == (True,)
        rows = world.unit.rows(0)
        assert len(rows) == 8
        assert world.read_rows(rows) == {}
        assert world.close()


def test_a_full_disk_without_spare_room_is_refused(small_disk: Path) -> None:
    """Without its spare space, a folder on a full disk cannot be opened. This shows why a folder reserves spare space
    for its index."""
    world = DiskWorld([small_disk], slots=8)
    assert world.close()
    (world.folder / "spare").unlink()
    fill_up(small_disk)
    with pytest.raises(DiskError, match="No space left"):
        DiskWorld([small_disk], slots=8)


def full_world(small_disk: Path, spare: bool = True, pages: int = 8) -> tuple[DiskWorld, Path]:
    """Makes a unit with durable pages, then fills its disk. With `spare` False, even the spare space of the unit's
    folder is filled."""
    world = DiskWorld([small_disk], slots=8)
    _, generations = world.write(range(pages), range(pages))
    world.wait_durable(range(pages), generations)
    if not spare:
        (world.folder / "spare").unlink()
    return world, fill_up(small_disk)


def open_after_reset(small_disk: Path) -> None:
    world = DiskWorld([small_disk], slots=8)
    assert world.unit.epoch == 2
    assert len(world.unit.rows(0)) == 0
    assert world.close()


@pytest.mark.parametrize("ends", ["closed", "crashed"])
def test_a_reset_on_a_full_disk_keeps_the_disk(small_disk: Path, tmp_path: Path, ends: str) -> None:
    world, _ = full_world(small_disk)
    world.unit.reset(2, GENEROUS_S)
    world.poll()
    assert world.unit.alive == (True,)
    assert read_epoch(world.folder) == 2
    if ends == "crashed":
        shutil.copytree(world.folder, tmp_path / "left")
    assert world.close()
    if ends == "crashed":
        shutil.rmtree(world.folder)
        shutil.copytree(tmp_path / "left", world.folder)
        fill_up(small_disk)
    open_after_reset(small_disk)  # the reset freed no space, so the disk is still full


def test_a_reset_goes_before_a_commit_that_waits_for_space(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, ballast = full_world(small_disk, pages=4)
    _, late = world.write(range(4, 8), range(4, 8))
    tried_again = "index.sqlite: database or disk is full"
    world.until(lambda: tried_again in caplog.text, "the index found space")
    world.unit.reset(2, GENEROUS_S)
    world.poll()
    assert world.unit.alive == (True,)
    assert read_epoch(world.folder) == 2
    _, generations = world.write([1], [1])
    ballast.unlink()
    world.wait_durable([1], generations)
    assert not {(4 + i, int(generation)) for i, generation in enumerate(late)} & world.durable
    assert world.close()
    world = DiskWorld([small_disk], slots=8)
    rows = world.unit.rows(0)
    assert rows.places.tolist() == [1]
    assert world.read_rows(rows) == {}
    assert world.close()


def test_a_reset_without_spare_room_waits_for_space(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, ballast = full_world(small_disk, spare=False)
    resetting = threading.Thread(target=world.unit.reset, args=(2, GENEROUS_S))
    resetting.start()
    deadline = time.monotonic() + GENEROUS_S
    while "epoch: No space left on device; it is tried again" not in caplog.text:
        assert time.monotonic() < deadline, "it found space"
        time.sleep(0.005)
    assert resetting.is_alive()
    ballast.unlink()
    resetting.join(GENEROUS_S)
    assert not resetting.is_alive()
    assert world.unit.alive == (True,)
    assert world.close()
    open_after_reset(small_disk)


def test_a_reset_that_finds_no_space_by_its_deadline_takes_the_disk_out(small_disk: Path) -> None:
    """If a disk has no space to record a reset before the deadline, it is taken out of service. Otherwise the next
    process would serve pages of the previous weights from it."""
    world, _ = full_world(small_disk, spare=False)
    world.unit.reset(2, 0.1)
    (lost,) = world.poll().lost
    assert "a reset was not durable in time" in lost.reason
    world.close()


def test_a_close_on_a_full_disk_does_not_wait_for_space(small_disk: Path) -> None:
    world = DiskWorld([small_disk], slots=8, preallocate=True)
    fill_up(small_disk)
    world.write(range(8), range(8))
    assert not world.close(), "what was written is not durable"


def test_a_full_disk_is_no_damage_of_its_index(small_disk: Path) -> None:
    index = SlotIndex(small_disk / "index.sqlite", [8000])
    index.adopt([5])
    index.begin_use(1, 0)
    ballast = fill_up(small_disk)
    slots = np.arange(8000)
    index.publish(
        0,
        slots,
        np.ones((8000, 16), np.uint8),
        np.full(8000, 1 << 40, np.uint64),
        np.zeros(8000, np.uint64),
        np.full(8000, 16, np.int32),
        7,
    )
    with pytest.raises(FullDiskError, match="full"):
        index.commit()
    ballast.unlink()
    index.commit()
    assert not (small_disk / "index.damaged").exists()
    index.close()
    again = SlotIndex(small_disk / "index.sqlite", [8000])
    assert (again.rows[0]["generation"] == 1 << 40).all()
    again.close()


def test_a_folder_on_a_full_disk_can_be_locked(small_disk: Path) -> None:
    """A folder on a full disk can be locked, because even reading its pages needs the lock. The lock file may have no
    space for the process id, but that only informs the operator.
    """
    from flexkv.storage.folder import FolderLock

    FolderLock(small_disk / "unit").release()
    (small_disk / "unit" / "lock").write_bytes(b"")
    fill_up(small_disk)
    FolderLock(small_disk / "unit").release()


@pytest.mark.parametrize("units", [1, 2])
def test_a_share_of_the_whole_disk_leaves_room_for_headers_and_index(small_disk: Path, units: int) -> None:
    config = load_config({"disk.folders": str(small_disk), "disk.space_share": 1.0}, {})
    worlds = []
    for unit in range(units):
        identity = replace(IDENTITY, unit=f"unit{unit}")
        size = bytes_per_folder(config.disk, units, own_bytes(identity, make_group()))
        world = DiskWorld([small_disk], identity=identity, slots=size // IMAGE_BYTES)
        worlds.append(world)
        slots = world.unit.slots(0)
        assert slots >= 1
        _, generations = world.write(range(slots), range(slots))
        world.wait_durable(range(slots), generations)
    for world in worlds:
        assert world.unit.alive == (True,)
        assert world.close()


def test_slabs_of_all_that_is_free_leave_no_room_for_headers_and_index(small_disk: Path) -> None:
    free = os.statvfs(small_disk)
    with pytest.raises(DiskError, match="No space left"):
        DiskWorld([small_disk], slots=free.f_bavail * free.f_frsize // IMAGE_BYTES)
