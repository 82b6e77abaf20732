"""If an index is damaged, lost or locked, no intact page is lost."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from flexkv.errors import CapacityError, DiskError
from flexkv.storage.epoch import EPOCH_NAME
from flexkv.storage.fsck import check_folder
from flexkv.storage.generations import MOST_OPENS, OPENS_NAME, opens_of, read_opens, write_opens
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_trouble import DamagedIndexError, OtherVersionError
from flexkv.storage.weights_name import WEIGHTS_NAME
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import DiskWorld, MakeDisks


def test_a_damaged_index_is_made_anew_from_the_slabs(make_disks: MakeDisks) -> None:
    slab, generations = filled(make_disks)
    index = slab.parent / "index.sqlite"
    index.write_bytes(b"no database at all" * 300)
    with pytest.raises(DamagedIndexError, match=r"index\.sqlite: file is not a database"):
        SlotIndex(index, [32])
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()
    assert (slab.parent / "index.damaged").exists()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_a_pipe_in_the_indexs_place_keeps_nobody_waiting(make_disks: MakeDisks, name: str) -> None:
    slab, _ = filled(make_disks)
    odd = slab.parent / name
    odd.unlink(missing_ok=True)
    os.mkfifo(odd)
    assert any(f"{name} is no file" in problem for problem in check_folder(slab.parent).problems)
    with pytest.raises(DamagedIndexError, match=f"{name} is no file"):
        SlotIndex(slab.parent / "index.sqlite", [32])
    world = make_disks()
    assert sorted(world.unit.rows(0).places.tolist()) == list(range(6))
    assert world.close()
    assert check_folder(slab.parent).clean


@pytest.mark.parametrize("name", [WEIGHTS_NAME, EPOCH_NAME, OPENS_NAME])
@pytest.mark.parametrize("has_writer", [False, True])
def test_a_pipe_in_place_of_a_small_file_keeps_nobody_waiting(
    make_disks: MakeDisks, name: str, has_writer: bool
) -> None:
    slab, _ = filled(make_disks)
    odd = slab.parent / name
    odd.unlink(missing_ok=True)
    os.mkfifo(odd)
    writer = os.open(odd, os.O_RDWR | os.O_NONBLOCK) if has_writer else -1
    assert any(str(odd) in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    assert sorted(world.unit.rows(0).places.tolist()) == list(range(6))
    assert world.close()
    if has_writer:
        os.close(writer)


def test_generations_of_an_open_that_left_no_page_are_not_given_again(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    world = make_disks()
    # the test acts as if a power cut had lost all pages written with these generations
    given = world.unit.next_generations(3)
    assert world.close()
    (slab.parent / "index.sqlite").write_bytes(b"no database at all" * 300)
    assert make_disks().unit.next_generations(1)[0] > given.max()


@pytest.mark.parametrize("lost", ["index", "opens", "both", "opens damaged", "opens damaged and index"])
@pytest.mark.parametrize("repair", [False, True])
def test_no_generation_is_given_twice_whatever_trace_is_lost(
    make_disks: MakeDisks, lost: str, repair: bool
) -> None:
    slab, _ = filled(make_disks)
    for _ in range(3):  # each opening writes no page
        world = make_disks()
        given = world.unit.next_generations(3)
        assert world.close()
    if lost in ("index", "both", "opens damaged and index"):
        (slab.parent / "index.sqlite").unlink()
    if lost in ("opens", "both"):
        (slab.parent / "opens").unlink()
    if "damaged" in lost:
        flip(slab.parent / "opens", 0)
    if repair:
        report = check_folder(slab.parent, repair=True)
        assert any("opens" in problem for problem in report.problems) == (lost != "index")
        assert check_folder(slab.parent).clean
    world = make_disks()
    next_given = world.unit.next_generations(1)
    assert next_given[0] > given.max()
    assert len(world.unit.rows(0)) == 6
    # The count of openings jumps only if the file `opens` is lost or damaged. The index contains a count of openings,
    # too, but that count may be older.
    jumped = opens_of(next_given) > opens_of(given) + 1
    assert jumped == (lost != "index")


def test_an_index_made_anew_needs_no_jump_of_the_count(make_disks: MakeDisks) -> None:
    """If only the index is lost, the count of openings does not jump. Each jump uses up many numbers, so jumps after
    every lost index would exhaust the count of a folder."""
    slab, _ = filled(make_disks)
    for _ in range(3):
        (slab.parent / "index.sqlite").unlink()
        world = make_disks()
        assert world.close()
    assert opens_of(make_disks().unit.next_generations(1)) == 5


@pytest.mark.parametrize("opens", ["kept", "damaged", "gone"])
@pytest.mark.parametrize("repair", [False, True])
def test_no_generation_is_given_twice_where_a_crash_has_lost_the_log(
    make_disks: MakeDisks, tmp_path: Path, opens: str, repair: bool
) -> None:
    """No generation is given twice even if a crash loses the database's log, so that the index contains an older count
    of openings. The copied files are those that such a crash leaves."""
    filled(make_disks)
    world = make_disks()
    _, written = world.write(range(6, 12), range(6, 12))
    world.wait_durable(range(6, 12), written)
    given = world.unit.next_generations(3)
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "disk0", left, ignore=shutil.ignore_patterns("*-wal"))
    assert world.close()
    (written_opens,) = left.rglob("opens")
    if opens == "damaged":
        flip(written_opens, 0)
    elif opens == "gone":
        written_opens.unlink()
    if repair:
        assert check_folder(written_opens.parent, repair=True).repaired
    crashed = DiskWorld([left])
    try:
        assert crashed.unit.next_generations(1)[0] > given.max()
        assert crashed.read_rows(crashed.unit.rows(0)) == {}
    finally:
        crashed.close()


def test_a_count_of_opens_that_is_used_up_is_refused(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    write_opens(slab.parent, MOST_OPENS - 1)
    world = make_disks()
    assert opens_of(world.unit.next_generations(1)) == MOST_OPENS
    assert world.close()
    for _ in range(2):
        with pytest.raises(CapacityError, match=rf"can be opened {MOST_OPENS} times.*flexkv disk drop"):
            make_disks()
    (slab.parent / "index.sqlite").unlink()
    with pytest.raises(CapacityError, match=rf"can be opened {MOST_OPENS} times"):
        make_disks()


def test_the_count_of_opens_is_durable_before_a_number_is_given(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, _ = filled(make_disks)

    def refuse(folder: Path, opens: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("flexkv.storage.index.write_opens", refuse)
    with pytest.raises(DiskError, match="the count of opens could not be written: Input/output error"):
        make_disks()
    assert read_opens(slab.parent) == 1


def test_a_locked_index_is_not_a_damaged_one(make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.storage.index_database.BUSY_S", 0.1)
    slab, _ = filled(make_disks)
    path = slab.parent / "index.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DiskError, match="locked"):
        make_disks()
    other.execute("ROLLBACK")
    other.close()
    assert not (slab.parent / "index.damaged").exists()
    world = make_disks()
    assert len(world.unit.rows(0)) == 6


def test_writes_recorded_at_the_last_moment_are_durable(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.write(range(8), range(8))
    assert world.close()
    assert len(make_disks().unit.rows(0)) == 8


@pytest.mark.parametrize(
    "lie",
    [
        "UPDATE meta SET value = 'x' WHERE name = 'epoch'",
        "UPDATE meta SET value = NULL WHERE name = 'opens'",
        "UPDATE meta SET value = -1 WHERE name = 'opens'",
        "UPDATE meta SET value = 16777215 WHERE name = 'opens'",
        "UPDATE meta SET value = 4294967296 WHERE name = 'epoch'",
        "UPDATE rows0 SET content = 5",
        "UPDATE rows0 SET content = 'text'",
    ],
)
def test_an_index_with_values_of_no_use_is_made_anew_from_the_slabs(make_disks: MakeDisks, lie: str) -> None:
    slab, generations = filled(make_disks)
    other = sqlite3.connect(slab.parent / "index.sqlite")
    with other:
        assert other.execute(lie).rowcount == 1
    other.close()
    assert any("index.sqlite: " in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_called_durable_in_an_index_that_has_no_name(
    make_disks: MakeDisks, name: str, replaced: bool
) -> None:
    world = make_disks(2)
    _, generations = world.write([1, 2], [0, 1])
    world.wait_durable([0, 1], generations)
    path = world.folder / name
    if replaced:
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    else:
        path.unlink()
    _, late = world.write([3], [2])
    world.until(lambda: not world.unit.alive[0], "it was not noticed")
    assert (2, int(late[0])) not in world.durable
    (lost,) = [lost for events in world.events for lost in events.lost]
    assert "deleted or replaced" in lost.reason
    _, more = world.write([4], [3])  # the unit's other disk is still in use
    world.wait_durable([3], more)


def of_version(folder: Path, version: int | None) -> None:
    other = sqlite3.connect(folder / "index.sqlite")
    with other:
        changed = other.execute("UPDATE meta SET value = ? WHERE name = 'version'", (version,))
        assert changed.rowcount == 1
    other.close()


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("repair", [False, True])
def test_an_index_of_another_version_is_made_anew_and_not_called_damaged(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture, version: int, repair: bool
) -> None:
    slab, _ = filled(make_disks)
    of_version(slab.parent, version)
    what = f"index format {version}; this version reads 2"
    with pytest.raises(OtherVersionError, match=what):
        SlotIndex(slab.parent / "index.sqlite", [32])
    (problem,) = check_folder(slab.parent, repair).problems
    assert what in problem
    caplog.set_level("INFO")
    world = make_disks()
    rows = world.unit.rows(0)
    assert len(rows) == 6
    assert world.read_rows(rows) == {}
    assert (slab.parent / "index.other").exists()
    assert not (slab.parent / "index.damaged").exists()
    if not repair:
        (level,) = {record.levelname for record in caplog.records if what in record.getMessage()}
        assert level == "INFO"


def test_an_index_without_a_version_is_a_damaged_one(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    of_version(slab.parent, None)
    assert len(make_disks().unit.rows(0)) == 6
    assert (slab.parent / "index.damaged").exists()
    assert not (slab.parent / "index.other").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_what_the_file_system_refuses_is_no_damage(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """If the file system is read-only, flexkv keeps the index. SQLite reports a flipped bit and a read-only file system
    with the same message, so flexkv must find out which one it is before it discards the index."""
    slab, _ = filled(make_disks)
    flip(slab.parent / "index.sqlite", 47)
    allocate = os.posix_fallocate

    def refuse(fd: int, offset: int, length: int) -> None:
        if "index.probe" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskError, match=f"unsupported file format: {os.strerror(code)}"):
        make_disks()
    assert not (slab.parent / "index.damaged").exists()
    monkeypatch.undo()
    world = make_disks()
    assert len(world.unit.rows(0)) == 6


def test_only_the_index_damaged_last_is_kept(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    for text in (b"no database at all", b"nor this"):
        (slab.parent / "index.sqlite").write_bytes(text * 300)
        assert make_disks().close()
    assert (slab.parent / "index.damaged").read_bytes() == b"nor this" * 300
    assert sorted(path.name for path in slab.parent.iterdir() if "damaged" in path.name) == ["index.damaged"]
