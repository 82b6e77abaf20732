"""`fsck` finds differences between a folder's index and its slabs, and repairs them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.folder import LOCK_NAME, FolderLockedError, folder_at_rest
from flexkv.storage.fsck import check_folder
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import read_header
from flexkv.storage.index_database import INDEX_NAME
from flexkv.storage.scan import SlotReader
from flexkv.storage.slot_rows import CHUNK_SLOTS
from flexkv.storage.weights_name import WEIGHTS_NAME, write_weights
from tests.read_only_mount import make_read_only, read_only_mount
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import DiskWorld, MakeDisks, make_group


def test_repair_leaves_evicted_what_a_whole_index_evicted(make_disks: MakeDisks) -> None:
    """A repair does not bring back pages whose eviction the index recorded, although they are still intact in their
    slots. It brings them back only if the index is gone."""
    world = make_disks()
    _, generations = world.write(range(6), range(6))
    world.wait_durable(range(6), generations)
    world.unit.record_evict(0, np.array([1, 4], np.int32), generations[[1, 4]])
    folder = world.folder
    assert world.close()
    report = check_folder(folder, repair=True)
    assert report.clean
    assert report.slabs[0].orphans == [1, 4]
    world = make_disks()
    assert sorted(world.unit.rows(0).places.tolist()) == [0, 2, 3, 5]
    assert world.close()
    (folder / "index.sqlite").unlink()
    assert check_folder(folder, repair=True).repaired
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}


def test_repair_takes_out_what_is_not_there(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    flip(slab, header.header_bytes + 2 * header.slot_bytes + 5000)
    assert check_folder(slab.parent, repair=True).slabs[0].missing == [2]
    assert check_folder(slab.parent).slabs[0].missing == []
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 3, 4, 5]
    assert world.read_rows(rows) == {}


@pytest.mark.parametrize("left", [0, 4])
def test_pages_of_a_slab_that_was_cut_are_missing(make_disks: MakeDisks, left: int) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    os.truncate(slab, header.header_bytes + left * header.slot_bytes)
    report = check_folder(slab.parent)
    assert not report.clean
    assert report.slabs[0].missing == list(range(left, 6))
    assert check_folder(slab.parent, repair=True).slabs[0].missing == list(range(left, 6))
    report = check_folder(slab.parent)
    assert report.clean
    assert report.slabs[0].good == left
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(left))
    assert world.read_rows(rows) == {}


def test_missing_pages_beyond_the_last_chunk_of_rows_are_found(make_disks: MakeDisks) -> None:
    world = make_disks(slots=3 * CHUNK_SLOTS)
    places = [1, CHUNK_SLOTS - 1, CHUNK_SLOTS, 3 * CHUNK_SLOTS - 1]
    _, generations = world.write(range(4), places)
    world.wait_durable(places, generations)
    slab = world.folder / "group0.slab"
    assert world.close()
    header = read_header(str(slab))
    os.truncate(slab, header.header_bytes + (CHUNK_SLOTS - 2) * header.slot_bytes)
    assert check_folder(slab.parent).slabs[0].missing == places[1:]


def test_damaged_name_of_weights_is_not_clean(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    write_weights(slab.parent, bytes(32), 0)
    assert check_folder(slab.parent).clean
    (slab.parent / WEIGHTS_NAME).write_bytes(b"?")
    (problem,) = check_folder(slab.parent).problems
    assert problem.startswith(f"{slab.parent / WEIGHTS_NAME}: no name of weights")


def test_fsck_brings_orphans_back(make_disks: MakeDisks) -> None:
    slab, generations = filled(make_disks)
    (slab.parent / "index.sqlite").unlink()
    report = check_folder(slab.parent)
    assert not report.clean
    assert report.slabs[0].orphans == list(range(6))
    assert check_folder(slab.parent, repair=True).repaired
    assert check_folder(slab.parent).clean
    world = make_disks()
    rows = world.unit.rows(0)
    assert len(rows) == 6
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()


@pytest.mark.parametrize("name", ["epoch", "opens"])
def test_fsck_names_a_missing_number_and_writes_it_anew(make_disks: MakeDisks, name: str) -> None:
    slab, _ = filled(make_disks)
    assert check_folder(slab.parent).clean
    (slab.parent / name).unlink()
    (problem,) = check_folder(slab.parent).problems
    assert problem == f"{slab.parent / name} is missing: the next start, or --repair, writes it anew"
    assert check_folder(slab.parent, repair=True).repaired
    assert check_folder(slab.parent).clean
    assert len(make_disks().unit.rows(0)) == 6


def test_fsck_goes_on_past_a_slab_under_another_groups_name(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    (slab.parent / "group1.slab").write_bytes(slab.read_bytes())
    report = check_folder(slab.parent)
    assert [found.good for found in report.slabs] == [6]
    (problem,) = report.problems
    assert "group1.slab is the slab of group 0" in problem


def small_unit(small_disk: Path, pages: int = 0) -> Path:
    """Makes a unit of 8 slots on the small disk, stores `pages` pages, and closes it. Returns its folder."""
    world = DiskWorld([small_disk], slots=8)
    if pages:
        _, generations = world.write(range(pages), range(pages))
        world.wait_durable(range(pages), generations)
    assert world.close()
    return world.folder


def test_a_read_only_file_system_is_checked(small_disk: Path) -> None:
    """`fsck` also checks a folder on a read-only file system. The kernel may remount a file system read-only after I/O
    errors, and an operator then needs to know which pages can still be read.
    """
    folder = small_unit(small_disk, pages=4)
    slab = folder / "group0.slab"
    header = read_header(str(slab))
    flip(slab, header.header_bytes + 2 * header.slot_bytes + 5000)
    writable = check_folder(folder)
    assert (writable.slabs[0].good, writable.slabs[0].missing) == (3, [2]), "the control"
    make_read_only(small_disk)
    assert check_folder(folder) == writable
    with pytest.raises(DiskError, match="the file system is read-only: nothing can be repaired"):
        check_folder(folder, repair=True)
    with folder_at_rest(folder):
        assert check_folder(folder) == writable, "other readers are no hindrance"


def test_a_damaged_index_on_a_read_only_file_system_is_named_by_its_own_path(small_disk: Path) -> None:
    folder = small_unit(small_disk)
    index = folder / INDEX_NAME
    index.write_bytes(b"no database" * 1000)
    make_read_only(small_disk)
    report = check_folder(folder)
    assert not report.clean
    assert [problem for problem in report.problems if problem.startswith(f"{index}: ")]
    assert "flexkv-index-" not in str(report)


def test_a_folder_in_use_is_not_checked_through_a_read_only_mount(
    make_disks: MakeDisks, tmp_path: Path
) -> None:
    world = make_disks()
    with read_only_mount(world.folder, tmp_path / "seen") as seen:
        with pytest.raises(FolderLockedError, match=f"in use by process {os.getpid()}"):
            check_folder(seen)
        assert world.close()
        assert check_folder(seen).clean, "the control"


def test_a_slab_that_is_gone_or_was_replaced_is_not_clean(make_disks: MakeDisks, tmp_path: Path) -> None:
    slab, _ = filled(make_disks)
    assert check_folder(slab.parent).clean, "the control"
    away = slab.rename(tmp_path / "away")
    report = check_folder(slab.parent)
    assert [problem for problem in report.problems if "group0.slab is missing" in problem]
    away.rename(slab)
    other = DiskWorld([tmp_path / "other"], slots=8)
    assert other.close()
    for name in ("group0.slab", "group0.header"):
        (slab.parent / name).write_bytes((other.folder / name).read_bytes())
    report = check_folder(slab.parent)
    assert [problem for problem in report.problems if "another slab than the one whose pages" in problem]


def test_an_empty_index_beside_pages_is_not_clean(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    (slab.parent / INDEX_NAME).write_bytes(b"")
    report = check_folder(slab.parent)
    assert [problem for problem in report.problems if "is empty, but slabs have pages" in problem]
    assert check_folder(slab.parent, repair=True).slabs[0].orphans, "they are entered by the repair"
    report = check_folder(slab.parent)
    assert report.clean
    assert report.slabs[0].good == 6


@pytest.mark.parametrize("checked", [True, False], ids=["fsck", "control"])
def test_a_slot_that_cannot_be_read_is_named_and_the_others_are_checked(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    bad = header.header_bytes + 2 * header.slot_bytes
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if bad <= offset < bad + header.slot_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr("flexkv.storage.scan.os.preadv", failing)
    if checked:
        report = check_folder(slab.parent)
        assert report.slabs[0].damaged == [(2, "cannot be read: Input/output error")]
        assert (report.slabs[0].good, report.slabs[0].missing) == (5, [2])
    else:  # A rebuild of the index fails on a disk with a page that cannot be read.
        reader = SlotReader(
            c_ext.SlabFile(str(slab), header.header_bytes, header.slot_bytes, 6, header.slab_id),
            header.slab_id,
            [codec_of(make_group())],
            False,
        )
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(2)


def be_a_pipe(index: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def be_a_folder(index: Path) -> None:
    index.unlink()
    index.mkdir()


def have_odd_neighbours(index: Path) -> None:
    os.mkfifo(index.with_name("index.sqlite.bak"))
    index.with_name("index.sqlite.old").mkdir()


def lack_a_lock(index: Path) -> None:
    index.with_name(LOCK_NAME).unlink()


@pytest.mark.parametrize(
    ("change", "problems"), [(be_a_pipe, 1), (be_a_folder, 1), (have_odd_neighbours, 0), (lack_a_lock, 0)]
)
def test_odd_files_end_no_check_of_a_read_only_file_system(
    small_disk: Path, change: Callable[[Path], None], problems: int
) -> None:
    folder = small_unit(small_disk, pages=4)
    change(folder / INDEX_NAME)
    make_read_only(small_disk)
    report = check_folder(folder)
    assert len(report.problems) == problems, report.problems
    assert all("is no file" in problem for problem in report.problems)
    (slab,) = report.slabs
    assert slab.good + len(slab.orphans) == 4, "all slots were read"


def test_a_full_temporary_folder_is_named(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_unit(small_disk)
    make_read_only(small_disk)
    assert check_folder(folder).clean, "the control"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("flexkv.storage.index_copy.shutil.copyfile", full)
    [problem] = check_folder(folder).problems
    assert tempfile.gettempdir() in problem
    assert problem.endswith("No space left on device")
