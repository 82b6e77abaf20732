"""After a reset, flexkv serves no page of the previous weights, even if a disk or an index was missing during the
reset."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.storage.epoch import read_epoch, write_epoch
from flexkv.storage.fsck import check_folder
from flexkv.storage.number_file import DamagedNumberError
from tests.unit.cache.disk_world import disk_tier
from tests.unit.storage.damage import filled
from tests.unit.storage.disk_world import BLOCK_TOKENS, DiskWorld, MakeDisks, key_of


class TwoDisks:
    """A unit on two disks. To simulate a missing disk, the test replaces the disk's folder by a file."""

    def __init__(self, tmp_path: Path) -> None:
        self.disks = [tmp_path / "disk0", tmp_path / "disk1"]
        self.away = tmp_path / "away"

    def open(self) -> DiskWorld:
        return DiskWorld(self.disks)

    def remove(self, disk: int) -> None:
        self.disks[disk].rename(self.away)
        self.disks[disk].write_text("no folder")

    def bring_back(self, disk: int) -> None:
        self.disks[disk].unlink()
        self.away.rename(self.disks[disk])


@pytest.fixture
def two(tmp_path: Path) -> TwoDisks:
    disks = TwoDisks(tmp_path)
    world = disks.open()
    _, generations = world.write(range(8), range(8))
    world.wait_durable(range(8), generations)
    assert world.close()
    disks.remove(1)
    world = disks.open()
    assert world.unit.alive == (True, False)
    world.unit.reset(2)
    _, generations = world.write([20], [2])
    world.wait_durable([2], generations)
    assert world.close()
    disks.bring_back(1)
    return disks


def test_a_disk_that_was_away_in_a_reset_comes_back_empty(two: TwoDisks) -> None:
    world = two.open()
    rows = world.unit.rows(0)
    assert world.unit.epoch == 2
    assert rows.places.tolist() == [2]
    assert world.read_rows(rows) == {}
    assert world.close()


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_it_stays_empty_when_it_is_alone_afterwards(two: TwoDisks, index: str) -> None:
    """If both disks are opened together, the epoch is also written to the disk that missed the reset, so this disk
    alone serves no old page later. The epoch has a file of its own, so losing the index does not lose it."""
    assert two.open().close()
    two.remove(0)
    if index == "lost":
        next(two.disks[1].rglob("index.sqlite")).unlink()
    world = two.open()
    assert world.unit.alive == (False, True)
    assert world.unit.epoch == 2
    assert len(world.unit.rows(0)) == 0
    assert world.close()


def test_alone_it_keeps_no_page_of_weights_that_a_reset_brought(tmp_path: Path) -> None:
    """A disk that missed the last reset drops its pages, even if the disk that recorded this reset is gone. The pages'
    epoch is odd, so only the process that wrote them knew their weights."""
    two = TwoDisks(tmp_path)
    world = two.open()
    world.unit.reset(1)
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    assert world.close()
    two.remove(1)
    world = two.open()
    world.unit.reset(3)
    assert world.close()
    two.bring_back(1)
    two.away = tmp_path / "away0"
    two.remove(0)
    world = two.open()
    assert world.unit.epoch == 1
    manager = LocalCacheManager([GroupSpec(BLOCK_TOKENS, 16)], tiers=unit_tiers(world.unit))
    index = disk_tier(manager)
    assert len(index) == 0
    assert world.unit.epoch == 2
    assert world.close()


@pytest.fixture
def beside_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the folders of two disks. The first has eight pages. In the second one, a
    crash ended the very first opening before the epoch was written."""
    folders = [tmp_path / "disk0", tmp_path / "disk1"]
    world = DiskWorld(folders[:1])
    _, generations = world.write(range(8), range(8))
    world.wait_durable(range(8), generations)
    assert world.close()

    class CrashError(Exception):
        pass

    def crash(folder: Path, epoch: int) -> None:
        raise CrashError

    monkeypatch.setattr("flexkv.storage.disk_volume.write_epoch", crash)
    with pytest.raises(CrashError):
        DiskWorld(folders)
    monkeypatch.undo()
    assert len(list(folders[1].rglob("group0.slab"))) == 1
    assert list(folders[1].rglob("epoch")) == []
    return folders


def test_a_crash_at_the_first_opening_of_a_disk_costs_the_others_no_page(beside_a_crash: list[Path]) -> None:
    world = DiskWorld(beside_a_crash)
    assert world.unit.epoch == 0
    rows = world.unit.rows(0)
    assert len(rows) == 8
    assert world.read_rows(rows) == {}
    assert world.close()


def test_fsck_leaves_the_epoch_of_a_disk_that_never_had_a_page(beside_a_crash: list[Path]) -> None:
    folder = next(beside_a_crash[1].rglob("group0.slab")).parent
    assert check_folder(folder).clean, "crashes leave what is clean"
    assert check_folder(folder, repair=True).clean
    assert read_epoch(folder) == 0
    test_a_crash_at_the_first_opening_of_a_disk_costs_the_others_no_page(beside_a_crash)


def test_a_lost_index_does_not_bring_old_weights_back(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    world = make_disks()
    world.unit.reset(5)
    assert world.close()
    (slab.parent / "index.sqlite").unlink()
    world = make_disks()
    assert world.unit.epoch == 5
    assert len(world.unit.rows(0)) == 0


def test_a_reset_survives(make_disks: MakeDisks) -> None:
    filled(make_disks)
    world = make_disks(2)
    world.unit.reset(1)
    _, generations = world.write([1], [3])
    world.wait_durable([3], generations)
    assert world.close()
    world = make_disks(2)
    assert world.unit.epoch == 1
    rows = world.unit.rows(0)
    assert rows.places.tolist() == [3]
    np.testing.assert_array_equal(rows.keys[0], key_of(1))


def test_nothing_that_a_reset_forgot_is_called_durable(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.write([1], [0])
    world.unit.reset(1)
    assert world.unit.poll().durable == ()


def test_pages_of_another_epoch_are_not_served(make_disks: MakeDisks) -> None:
    world = make_disks()
    _, generations = world.write([1], [0])
    world.unit.reset(1)
    assert "disk miss (epoch)" in world.read([1], [0], generations).reason


def test_an_epoch_is_durable_before_it_takes_its_name_and_its_name_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, replace = os.fsync, os.replace
    done: list[str] = []

    def synced(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def named(old: Path, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    write_epoch(tmp_path, 7)
    assert done == ["file", "name", "folder"]
    assert read_epoch(tmp_path) == 7


@pytest.mark.parametrize("text", [b"", b"-1", b"4294967296", b"9" * 5000, "\u0661".encode(), b"\xff\xfe"])
def test_an_epoch_that_is_none_is_named_and_the_index_decides(make_disks: MakeDisks, text: bytes) -> None:
    slab, _ = filled(make_disks)
    (slab.parent / "epoch").write_bytes(text)
    with pytest.raises(DamagedNumberError, match="is no number"):
        read_epoch(slab.parent)
    assert any("is no number" in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    assert len(world.unit.rows(0)) == 6
    assert read_epoch(slab.parent) == 0


def test_an_epoch_that_is_written_in_part_leaves_the_former_one(tmp_path: Path) -> None:
    write_epoch(tmp_path, 7)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # limits the file size: a write ends at byte 4, and the next write fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_epoch(tmp_path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_epoch(tmp_path) == 7
    write_epoch(tmp_path, 8)
    assert read_epoch(tmp_path) == 8, "the control"
