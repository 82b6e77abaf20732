"""The folder of the weights table: only this user can write to it, and all ranks of a node use the same folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flexkv.weights import table_folder as module
from flexkv.weights.table_folder import node_name, table_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home"


@pytest.fixture
def temporary(home: Path) -> Path:
    """Replaces the home folder by a file, so that no folder can be made in it. Returns the private folder that flexkv
    uses instead."""
    home.write_bytes(b"")
    return home.parent / "temporary" / f"flexkv-{os.geteuid()}"


def test_it_lies_in_the_first_folder_of_the_disk_tier_that_is_there(tmp_path: Path) -> None:
    assert table_folder((str(tmp_path / "none"), str(tmp_path))) == tmp_path


def test_without_a_disk_tier_each_node_has_a_folder_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "id")
    for node in ("a" * 32, "b" * 32, "a" * 32):
        (tmp_path / "id").write_text(f"{node}\n")
        found.append(table_folder(()))
    assert found[0] == found[2] != found[1]
    assert {folder.parent for folder in found if folder} == {home / ".cache" / "flexkv"}


def test_a_machine_without_an_id_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = set()
    for content in (None, ""):
        if content is not None:
            (tmp_path / "id").write_text(content)
        monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "id")
        named.add(node_name())
    assert len(named) == 1


def test_a_folder_that_may_not_be_looked_at_is_left_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_dir = Path.is_dir

    def refused(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    assert table_folder((str(tmp_path / "closed"), str(tmp_path))) == tmp_path


def test_without_a_home_the_ranks_share_a_private_folder(temporary: Path) -> None:
    assert table_folder(()) == temporary
    assert table_folder(()) == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700


def test_a_home_that_nobody_writes_is_left_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert table_folder(()) == home.parent / "temporary" / f"flexkv-{os.geteuid()}"


def test_a_folder_of_another_user_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flexkv does not use a folder for its weights table that another user owns or can write to. Such a user could make
    these weights count as different ones."""
    temporary.mkdir(0o700)
    user = os.geteuid()
    (temporary.parent / f"flexkv-{user + 1}").mkdir(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        assert table_folder(()) is None
    temporary.chmod(0o770)
    assert table_folder(()) is None
    temporary.rmdir()
    temporary.symlink_to(temporary.parent)
    assert table_folder(()) is None
    assert len([r for r in caplog.records if "is no folder of this user alone" in r.message]) == 3
