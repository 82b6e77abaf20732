"""Only one unit at a time uses a unit's folder. The folder has as many slots as its configured size allows."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import flexkv.storage.folder as folder_module
from flexkv.errors import CapacityError, DiskError
from flexkv.storage.disk_volume import slots_of
from flexkv.storage.folder import (
    LOCK_NAME,
    FolderLock,
    FolderLockedError,
    folder_at_rest,
    remove_folder,
    unit_folders,
)
from flexkv.storage.fsck import check_folder
from tests.unit.storage.damage import filled
from tests.unit.storage.disk_world import GENEROUS_S, DiskWorld, MakeDisks, make_group


def test_a_folder_has_one_user(make_disks: MakeDisks) -> None:
    world = make_disks()
    with pytest.raises(FolderLockedError, match=f"in use by process {os.getpid()}"):
        make_disks()
    with pytest.raises(FolderLockedError, match="is in use by process"):
        check_folder(world.folder)
    assert world.close()
    assert make_disks().close()


def test_a_unit_starts_while_another_reads_its_index(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit waits for a folder that another unit briefly locks, and then starts. The units of one node start at the
    same time, and each of them reads the indexes of the others."""
    world = make_disks()
    folder = world.folder
    assert world.close()
    held, let_go = threading.Event(), threading.Event()

    def read() -> None:
        with folder_at_rest(folder), folder_at_rest(folder):
            held.set()
            let_go.wait(GENEROUS_S)

    reader = threading.Thread(target=read)
    reader.start()
    assert held.wait(GENEROUS_S)
    monkeypatch.setattr("flexkv.storage.folder.LOCK_WAIT_S", 0.05)
    with pytest.raises(FolderLockedError, match="is in use by process"):
        make_disks()
    monkeypatch.setattr("flexkv.storage.folder.LOCK_WAIT_S", GENEROUS_S)
    threading.Timer(0.1, let_go.set).start()
    world = make_disks()
    reader.join(GENEROUS_S)
    with pytest.raises(FolderLockedError, match=f"in use by process {os.getpid()}"), folder_at_rest(folder):
        raise AssertionError("read while its unit writes it")
    assert world.close()


def test_slots_follow_the_budget(make_disks: MakeDisks) -> None:
    filled(make_disks)
    assert make_disks(slots=4).close()
    world = make_disks(slots=50)
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 2, 3]
    assert world.read_rows(rows) == {}
    assert world.unit.slots(0) == 50


def test_a_budget_whose_index_no_memory_holds_is_refused() -> None:
    with pytest.raises(
        CapacityError, match=rf"{1 << 60} bytes of disk have {2**31 - 1} slots a slab: their index"
    ):
        slots_of([make_group(layers=1, run_bytes=512)] * 64, 1 << 60)


def test_a_budget_without_a_slot_is_refused(make_disks: MakeDisks) -> None:
    with pytest.raises(CapacityError, match="hold no slot of 36864 bytes"):
        make_disks(slots=0)


def deleted(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_lock_that_was_waited_for_is_of_the_folder_that_has_the_name_now(tmp_path: Path) -> None:
    """A process that waited for a folder's lock gets the lock of the folder that has the name at last. While one
    process waits for the folder's lock, `flexkv disk drop` deletes the folder and a third process makes a new one with
    the same name. The waiting process must not get the new folder."""
    folder = tmp_path / "model" / "unit0"
    first = FolderLock(folder)
    won: list[FolderLock | DiskError] = []

    def wait() -> None:
        try:
            won.append(FolderLock(folder))
        except DiskError as error:
            won.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    file = os.stat(folder / LOCK_NAME)
    ends_s = time.monotonic() + GENEROUS_S
    while open_copies(file) < 2:
        assert time.monotonic() < ends_s
        time.sleep(0.002)
    deleted(folder)
    third = FolderLock(folder)
    first.release()
    waiter.join(GENEROUS_S)
    assert isinstance(won[0], FolderLockedError), "two have one folder"
    third.release()


def open_copies(file: os.stat_result) -> int:
    """Returns how many file descriptors of this process refer to the file."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file)
    return count


def test_lock_of_a_deleted_folder_is_taken_on_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model" / "unit0"
    real = folder_module._lock_until
    deletions: list[Path] = []

    def lock_and_delete(fd: int, ends_s: float) -> None:
        if not deletions:
            deletions.append(folder)
            deleted(folder)
        real(fd, ends_s)

    monkeypatch.setattr(folder_module, "_lock_until", lock_and_delete)
    lock = FolderLock(folder)
    assert os.path.samestat(os.fstat(lock.fd), os.stat(folder / LOCK_NAME))
    lock.release()


def test_lock_is_closed_once_by_threads_that_release_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(tmp_path / "unit0")
    fd, closed, real = lock.fd, [], os.close

    def close_and_come_again(closing: int) -> None:
        closed.append(closing)
        if len(closed) == 1:
            lock.release()  # simulates another thread that releases the lock at the same moment
        real(closing)

    monkeypatch.setattr(os, "close", close_and_come_again)
    lock.release()
    assert closed == [fd]


def test_drop_of_a_unit_with_a_folder_in_it_deletes_nothing(make_disks: MakeDisks) -> None:
    folder = filled(make_disks)[0].parent
    (folder / "mine").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(DiskError, match="mine is a folder"):
        remove_folder(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    (folder / "mine").rmdir()
    (folder / "dangling").symlink_to(folder / "nothing")
    assert remove_folder(folder) > 0
    assert not folder.exists()


def test_drop_that_fails_leaves_a_unit_that_is_found(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(make_disks)[0].parent
    real = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "index.sqlite":
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DiskError, match="Operation not permitted"):
        remove_folder(folder)
    assert unit_folders(folder.parent.parent) == [folder]
    monkeypatch.undo()
    assert remove_folder(folder) > 0


def test_folder_whose_path_is_not_utf8_is_a_disk_error(make_disks: MakeDisks, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    with pytest.raises(DiskError, match="UTF-8"):
        DiskWorld([folder])
    unit = filled(make_disks)[0].parent
    with pytest.raises(DiskError, match="UTF-8"):
        check_folder(unit.rename(folder / "unit0"))
