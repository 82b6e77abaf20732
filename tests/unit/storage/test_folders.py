"""A unit's folder: one user at a time, and as many slots as its budget holds."""

from __future__ import annotations

import os
import threading

import pytest

from flexkv.errors import CapacityError
from flexkv.storage.folder import FolderLockedError, folder_at_rest
from flexkv.storage.fsck import check_folder
from flexkv.storage.member import slots_of
from tests.unit.storage.damage import filled
from tests.unit.storage.disk_world import GENEROUS_S, MakeDisks, make_group


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
    """Units of one node start together; each has the others' folders for a moment."""
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
        CapacityError, match=rf"{1 << 60} bytes of disk have {2**31 - 1} slots a group: their index"
    ):
        slots_of([make_group(layers=1, run_bytes=512)] * 64, 1 << 60)


def test_a_budget_without_a_slot_is_refused(make_disks: MakeDisks) -> None:
    with pytest.raises(CapacityError, match="hold no slot of 36864 bytes"):
        make_disks(slots=0)
