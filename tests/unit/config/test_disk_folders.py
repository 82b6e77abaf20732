"""`disk.folders`: one or more absolute paths, joined by colons or as a list."""

from __future__ import annotations

import pytest

from flexkv.config import load_config
from flexkv.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "message"),
    [("relative/path", "absolute"), ("/a:/a", "twice"), (7, "paths of folders")],
)
def test_folders_are_checked(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"disk.folders": value}, {})


def test_folders_are_joined_by_colons() -> None:
    assert load_config({"disk.folders": "/a:/b"}, {}).disk.folders == ("/a", "/b")
    assert load_config({"disk.folders": ["/a", "/b"]}, {}).disk.folders == ("/a", "/b")
    assert load_config({}, {"FLEXKV_DISK_FOLDERS": "/a"}).disk.folders == ("/a",)
