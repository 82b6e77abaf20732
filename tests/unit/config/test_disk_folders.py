"""`disk.folders` is one or more absolute paths, given as a list or as a text with colons or commas between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("relative/path", "absolute"),
        ("/a:/a", "twice"),
        ("/a,/a", "twice"),
        (7, "paths of folders"),
        ("/a,b", "absolute paths, got 'b'; a folder with ':' or ',' in its name is given in a list"),
        ("/a\udcff", "paths in UTF-8, got "),
        (["/a\0b"], "paths of folders, got "),
        (["/a", "b,c"], "absolute paths, got 'b,c'$"),
    ],
)
def test_folders_are_checked(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"disk.folders": value}, {})


def test_folders_are_joined_by_colons() -> None:
    assert load_config({"disk.folders": "/a:/b"}, {}).disk.folders == ("/a", "/b")
    assert load_config({"disk.folders": ["/a", "/b"]}, {}).disk.folders == ("/a", "/b")
    assert load_config({}, {"FLEXKV_DISK_FOLDERS": "/a"}).disk.folders == ("/a",)


def test_folders_are_joined_by_commas(tmp_path: Path) -> None:
    assert load_config({"disk.folders": "/a, /b"}, {}).disk.folders == ("/a", "/b")
    assert load_config({}, {"FLEXKV_DISK_FOLDERS": "/a,/b:/c"}).disk.folders == ("/a", "/b", "/c")
    file = tmp_path / "settings.yaml"
    file.write_text("disk:\n  folders: /a,/b\n")
    assert load_config({}, {"FLEXKV_CONFIG": str(file)}).disk.folders == ("/a", "/b")


def test_a_listed_folder_keeps_its_commas_and_colons(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("disk:\n  folders: ['/a,b', '/c:d']\n")
    assert load_config({}, {"FLEXKV_CONFIG": str(file)}).disk.folders == ("/a,b", "/c:d")
