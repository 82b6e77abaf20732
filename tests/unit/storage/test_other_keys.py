"""At its start a unit logs the name and size of each folder whose pages belong to the same model but have other keys.
It does not log folders that another unit may need.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexkv.cli.disk_command import command
from flexkv.cli.info_facts import folder_hints
from flexkv.config import DiskConfig
from flexkv.storage.base import DiskIdentity
from flexkv.storage.other_keys import older_units, units_of_other_keys
from tests.unit.storage.disk_world import IDENTITY, DiskWorld

OLD = replace(IDENTITY, fingerprint=bytes(range(1, 33)))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def left_by(root: Path, identity: DiskIdentity, used_s: int = 0) -> Path:
    """Runs a unit that writes pages, and closes it. Returns the unit's folder. If `used_s` is given, sets the time of
    the folder's files to it, in seconds since 1970."""
    world = DiskWorld([root], identity=identity)
    world.write(range(4), range(4))
    folder = world.folder
    assert world.close()
    if used_s:
        for path in folder.iterdir():
            os.utime(path, (used_s, used_s))
    return folder


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "under other keys" in record.getMessage()]


def test_a_start_names_the_folder_that_it_no_longer_reads(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    old = left_by(tmp_path, OLD)
    assert lines(said) == [], "the control: the first keys have none beside them"
    left_by(tmp_path, IDENTITY)
    (line,) = lines(said)
    name = f"{old.parent.name}/{old.name}"
    assert line.levelno == logging.WARNING
    assert f"{name} (" in line.getMessage()
    assert f"flexkv disk drop {tmp_path} NAME" in line.getMessage()
    said.clear()
    left_by(tmp_path, IDENTITY)
    assert [line.levelno for line in lines(said)] == [logging.INFO], "it has pages of its own now"
    done = CliRunner().invoke(command, ["drop", str(tmp_path), name, "--yes"])
    assert done.exit_code == 0, done.output
    said.clear()
    left_by(tmp_path, IDENTITY)
    assert lines(said) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(OLD, model="another/model"),
        replace(OLD, unit="dp7"),
        replace(IDENTITY, unit="dp7"),
    ],
    ids=["another model", "another unit of other keys", "another unit"],
)
def test_what_is_no_older_folder_of_this_unit_is_not_named(
    tmp_path: Path, said: pytest.LogCaptureFixture, other: DiskIdentity
) -> None:
    left_by(tmp_path, other)
    left_by(tmp_path, IDENTITY)
    assert lines(said) == []


def test_a_folder_in_use_is_not_named(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    world = DiskWorld([tmp_path], identity=OLD)
    folder = left_by(tmp_path, IDENTITY)
    assert lines(said) == []
    assert world.close()
    assert [unit.folder for unit in units_of_other_keys(folder)] == [world.folder]


def test_flexkv_info_names_what_was_used_before_later_pages_of_its_model(tmp_path: Path) -> None:
    disk = DiskConfig(folders=(str(tmp_path),))
    old = left_by(tmp_path, OLD, used_s=1_000_000)
    assert not [hint for hint in folder_hints(disk) if "other keys" in hint]
    new = left_by(tmp_path, IDENTITY)
    (hint,) = [hint for hint in folder_hints(disk) if "other keys" in hint]
    assert old.parent.name in hint
    assert new.parent.name not in hint
    assert "flexkv disk drop" in hint
    assert [unit.folder for unit in older_units(tmp_path)] == [old]
