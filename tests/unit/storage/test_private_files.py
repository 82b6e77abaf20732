"""Only the engine's own user may read the disk tier's files and enter its folders, because pages contain users'
prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.storage.folder_share import bytes_per_folder, own_bytes
from flexkv.storage.index import SlotIndex
from flexkv.storage.private_files import keep_private
from tests.unit.storage.disk_world import IDENTITY, DiskWorld, MakeDisks, make_group

OTHERS = 0o077


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def readable_by_others(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root.parent)): oct(mode)
        for path in (root, *root.rglob("*"))
        if (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS
    }


def used(world: DiskWorld) -> None:
    """Makes the tier write all of its files: slab, index, the index's log, and epoch."""
    world.unit.reset(world.unit.epoch + 2)
    _, generations = world.write([1, 2], [0, 1])
    world.wait_durable([0, 1], generations)
    assert (world.folder / "index.sqlite-wal").exists()


def test_nobody_else_can_read_what_the_tier_makes(tmp_path: Path) -> None:
    root = tmp_path / "mount" / "kv"
    world = DiskWorld([root])
    used(world)
    assert readable_by_others(tmp_path / "mount") == {}
    assert world.close()
    # flexkv keeps a damaged index under another name. That file and the new index must be private, too.
    (world.folder / "index.sqlite").write_bytes(b"no database at all" * 300)
    world = DiskWorld([root])
    used(world)
    assert (world.folder / "index.damaged").exists()
    assert readable_by_others(tmp_path / "mount") == {}
    assert world.close()


def test_a_file_made_by_the_umask_alone_is_seen(tmp_path: Path) -> None:
    """As a control, makes a file and a folder with the umask's default permissions: the check of the other tests finds
    them."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "group0.slab").touch()
    assert readable_by_others(tmp_path / "kv") == {"kv": "0o755", "kv/group0.slab": "0o644"}


def test_an_index_made_anew_while_it_is_used_is_private(tmp_path: Path) -> None:
    index = SlotIndex(tmp_path / "index.sqlite", [80])
    index.adopt([5])
    index.begin_use(1, 0)
    index.remake()
    assert not stat.S_IMODE((tmp_path / "index.sqlite").stat().st_mode) & OTHERS
    index.close()


def test_files_of_a_former_run_are_closed_to_others_when_their_owner_opens_them(
    make_disks: MakeDisks,
) -> None:
    world = make_disks()
    used(world)
    assert world.close()
    root = world.folders[0]
    root.chmod(0o755)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    world = make_disks()
    assert len(world.unit.rows(0)) == 2
    # The configured root folder keeps the mode that the user gave it.
    assert readable_by_others(root) == {"disk0": "0o755"}


def test_files_of_another_user_stay_as_they_are_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "group0.slab").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    keep_private(tmp_path)
    assert readable_by_others(tmp_path)
    assert "group0.slab" in caplog.text
    assert "can be read by other users" in caplog.text


def test_folders_that_are_made_for_their_size_are_private(tmp_path: Path) -> None:
    config = load_config({"disk.folders": str(tmp_path / "new" / "kv")}, {})
    bytes_per_folder(config.disk, 1, own_bytes(IDENTITY, make_group()))
    assert readable_by_others(tmp_path / "new") == {}
