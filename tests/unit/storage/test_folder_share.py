"""How much of a file system a unit's folder may take."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexkv.config import load_config
from flexkv.errors import DiskError
from flexkv.storage.folder import held_bytes, unit_folder
from flexkv.storage.folder_share import (
    bytes_per_folder,
    folder_faults,
    own_bytes,
    room_beside,
    share_bytes,
    shared_file_systems,
    whole_slots,
)
from flexkv.storage.header import slot_bytes_of_all
from tests.read_only_mount import make_read_only
from tests.unit.storage.disk_world import IDENTITY, make_group


@pytest.fixture(autouse=True)
def _disk_of_a_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a file system of 1 GiB that only this test fills. The free space of a real one changes while the test
    runs, because other programs use it."""
    monkeypatch.setattr(
        "shutil.disk_usage", lambda root: SimpleNamespace(free=(1 << 30) - held_bytes(tmp_path))
    )


def test_the_size_of_a_folder(tmp_path: Path) -> None:
    group = make_group()
    own = own_bytes(IDENTITY, group)
    fixed = load_config({"disk.folders": str(tmp_path), "disk.bytes_per_folder": "3MiB"}, {})
    assert bytes_per_folder(fixed.disk, 1, own) == 3 << 20
    half = load_config({"disk.folders": str(tmp_path), "host.units_per_node": 2}, {})
    before = bytes_per_folder(half.disk, half.host.units_per_node, own)
    assert before == int(half.disk.space_share * (1 << 30) / 2)
    # The unit's existing files count as free, so that a full cache keeps its size over restarts.
    folder = unit_folder(tmp_path, IDENTITY, [group])
    folder.mkdir(parents=True)
    (folder / "group0.slab").write_bytes(b"x" * (1 << 20))
    assert bytes_per_folder(half.disk, half.host.units_per_node, own) == before


def test_a_folder_that_cannot_be_used_has_no_say_in_the_size(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "file" / "folder"
    (tmp_path / "file").touch()

    def size(*folders: Path) -> int:
        config = load_config({"disk.folders": ":".join(map(str, folders))}, {})
        return bytes_per_folder(config.disk, 1, own_bytes(IDENTITY, make_group()))

    assert size(bad, good) == size(good)
    # Two folders on one file system share the size that a single folder would have.
    assert size(good, tmp_path / "beside") == size(good) // 2
    with pytest.raises(
        DiskError, match=rf"no disk can be used: {re.escape(str(bad))}: Not a directory; disk.folders "
    ):
        size(bad)


def test_a_file_system_that_cannot_be_asked_costs_its_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the free space of a folder's file system cannot be read, only this folder is unusable. A stale network mount
    behaves like this: making and checking a folder on it succeeds, but reading its free space fails."""
    good, stale = tmp_path / "good", tmp_path / "stale"
    usage, group = shutil.disk_usage, make_group()

    def refuse(root: Path) -> SimpleNamespace:
        if Path(root) == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return usage(root)  # type: ignore[return-value]

    def size(*folders: Path) -> int:
        config = load_config({"disk.folders": ":".join(map(str, folders))}, {})
        return bytes_per_folder(config.disk, 1, own_bytes(IDENTITY, group))

    alone = size(good)
    monkeypatch.setattr("shutil.disk_usage", refuse)
    assert size(stale, good) == alone
    with pytest.raises(DiskError, match=rf"no disk can be used: {re.escape(str(stale))}: Stale file handle"):
        size(stale)
    for settings in ({}, {"disk.bytes_per_folder": "1MiB"}):
        config = load_config({"disk.folders": [str(stale), str(good)], **settings}, {})
        found = folder_faults(config, own_bytes(IDENTITY, group))
        assert found == {str(stale): f"{stale}: Stale file handle"}


def test_folders_of_a_file_system_that_cannot_be_asked_are_not_called_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("first", "stale", "third")]
    for folder in folders:
        folder.mkdir()
    config = load_config({"disk.folders": ":".join(map(str, folders))}, {})
    assert shared_file_systems(config.disk) == [folders]
    stat = Path.stat

    def refuse(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == folders[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    assert shared_file_systems(config.disk) == [[folders[0], folders[2]]]


def test_the_folder_that_cuts_the_others_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    free = {small: 1 << 30, large: 4 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda root: SimpleNamespace(free=free[root]))
    monkeypatch.setattr(
        "flexkv.storage.folder_share.by_file_system", lambda roots: [[root] for root in roots]
    )
    config = load_config({"disk.folders": f"{small}:{large}"}, {})
    caplog.set_level("INFO")

    def lines() -> list[str]:
        caplog.clear()
        bytes_per_folder(config.disk, 1, own_bytes(IDENTITY, make_group()))
        return [record.message for record in caplog.records]

    (line,) = lines()
    assert line.startswith(f"{small} has room for 512.0 MiB by disk.space_share, others for up to 2.0 GiB")
    assert "disk.bytes_per_folder" in line
    free[large] = (1 << 30) + 4096
    assert lines() == []


@pytest.mark.parametrize(
    ("folders", "asked", "reasons"),
    [
        (["a"], "990MiB", {}),
        (
            ["a"],
            "900TiB",
            {
                "a": "asks for 900.0 TiB in each folder, and 992.0 MiB can be had beside headers and index: "
                "set it to 1040187392 or"
            },
        ),
        (["a", "b"], "400MiB", {}),
        (
            ["a", "b"],
            "600MiB",
            {
                "b": "of 2 on one file system, and 992.0 MiB can be had beside headers and index: "
                "set it to 520093696 or less"
            },
        ),
        (["a", "b"], "2GiB", {"a": "set it to 520093696 or", "b": "set it to 520093696 or"}),
        (["a"], "1GiB", {"a": "beside headers and index"}),
        (["file/x", "a"], "990MiB", {"file/x": "file is no folder"}),
        (["file/x", "a"], "none", {"file/x": "file is no folder"}),
    ],
)
def test_folders_that_cannot_be_used_are_named_with_what_to_set(
    tmp_path: Path, folders: list[str], asked: str, reasons: dict[str, str]
) -> None:
    (tmp_path / "file").touch()
    there = [str(tmp_path / folder) for folder in folders]
    config = load_config({"disk.folders": there, "disk.bytes_per_folder": asked}, {})
    found = folder_faults(config, own_bytes(IDENTITY, make_group()))
    assert list(found) == [str(tmp_path / folder) for folder in reasons]
    for folder, reason in reasons.items():
        assert reason in found[str(tmp_path / folder)]
    assert not (tmp_path / "a").exists()
    assert [len(roots) for roots in shared_file_systems(config.disk)] == ([2] if len(folders) == 2 else [])


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("dangling", "dangling is a symbolic link that leads nowhere"),
        ("dangling/in", "dangling is a symbolic link that leads nowhere"),
        ("loop", "loop is a symbolic link that leads nowhere"),
        ("loop/in", "loop is a symbolic link that leads nowhere"),
        ("a" * 300, "has 300 bytes; a name here has 255 at most"),
        ("in/" + "a" * 300, "has 300 bytes; a name here has 255 at most"),
    ],
)
def test_folder_that_cannot_be_made_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    there = str(tmp_path / folder)
    for settings in ({}, {"disk.bytes_per_folder": "1MiB"}):
        config = load_config({"disk.folders": [there, str(tmp_path / "link" / "new")], **settings}, {})
        found = folder_faults(config, lambda root: 0)
        assert list(found) == [there]
        assert reason in found[there]
    with pytest.raises(DiskError):
        bytes_per_folder(load_config({"disk.folders": [there]}, {}).disk, 1, lambda root: 0)


def test_folder_without_a_free_byte_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda root: SimpleNamespace(free=0))
    config = load_config({"disk.folders": str(tmp_path)}, {})
    assert "no byte is free" in folder_faults(config, lambda root: 0)[str(tmp_path)]
    assert folder_faults(config, lambda root: 1 << 20) == {}, "it is full of the unit's own pages"


def test_what_a_unit_holds_already_it_can_have_again(tmp_path: Path) -> None:
    group = make_group()
    folder = unit_folder(tmp_path, IDENTITY, [group])
    folder.mkdir(parents=True)
    (folder / "group0.slab").write_bytes(b"x" * (100 << 20))
    config = load_config({"disk.folders": str(tmp_path), "disk.bytes_per_folder": "990MiB"}, {})
    assert folder_faults(config, own_bytes(IDENTITY, group)) == {}
    assert "can be had" in folder_faults(config, lambda root: 0)[str(tmp_path)]


def test_slabs_of_whole_slots_suffice_on_a_disk_that_others_have_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, existing slabs suffice although they are up to one slot smaller than the configured size, because
    they have a whole number of slots. As a control, slabs with one slot less are too small.
    """
    group = make_group()
    slot = slot_bytes_of_all([group])
    folder = unit_folder(tmp_path, IDENTITY, [group])
    folder.mkdir(parents=True)
    slab = folder / "group0.slab"
    config = load_config({"disk.folders": str(tmp_path), "disk.bytes_per_folder": 100 * slot - 1}, {})
    own, whole = own_bytes(IDENTITY, group), whole_slots(group)
    monkeypatch.setattr("shutil.disk_usage", lambda root: SimpleNamespace(free=0))
    slab.write_bytes(bytes(99 * slot))
    assert folder_faults(config, own, whole) == {}
    os.truncate(slab, 98 * slot)
    assert "can be had" in folder_faults(config, own, whole)[str(tmp_path)]


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_engines_of_one_folder_take_what_the_others_leave(share: float) -> None:
    disk, held = 1000, {"first": 0, "second": 0, "third": 0}

    def start(name: str) -> int:
        free = disk - sum(held.values())
        others = sum(held.values()) - held[name]
        size = share_bytes(free, held[name], others, share, 1)
        assert size <= free + held[name], "there is no such room"
        held[name] = size
        return size

    sizes = [start(name) for name in held]
    assert sizes[0] == min(share * disk, disk - room_beside(disk))
    assert all(sizes)
    assert [start(name) for name in held] == sizes, "a size shrank or grew with a restart"
    # Four units are configured (the last argument), so each gets the same share, whichever unit starts first.
    assert share_bytes(disk, 0, 0, share, 4) == share_bytes(disk - 225, 0, 225, share, 4)


def test_a_read_only_file_system_is_called_so(small_disk: Path) -> None:
    config = load_config({"disk.folders": str(small_disk / "flexkv")}, {})
    own = own_bytes(IDENTITY, make_group())
    assert folder_faults(config, own) == {}, "the control"
    make_read_only(small_disk)
    assert folder_faults(config, own) == {
        str(small_disk / "flexkv"): f"the file system of {small_disk} is read-only"
    }
