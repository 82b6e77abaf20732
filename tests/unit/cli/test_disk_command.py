"""`flexkv disk` and `flexkv fsck` over folders that the disk tier made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexkv.cli.main import main
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.unit import DiskUnit

Open = Callable[..., DiskUnit]


@pytest.fixture
def open_unit(tmp_path: Path) -> Open:
    def open_(model: str, number: int = 0) -> DiskUnit:
        group = DiskGroup("test", (4096,), (np.array([[0, 4096, 0]]),), 4)
        identity = DiskIdentity(model, bytes([number]) * 32, f"dp{number}")
        return DiskUnit.open([tmp_path], identity, [group], DiskOptions(1 << 20))

    return open_


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["disk", "ls", str(folder), "--json"]) == 0
    entries: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return entries


def test_models_sizes_and_ages_are_shown(
    open_unit: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, model in enumerate(("llama", "qwen")):
        assert open_unit(model, number).close(30.0)
    entries = listed(tmp_path, capsys)
    assert sorted(str(entry["model"]) for entry in entries) == ["llama", "qwen"]
    for entry in entries:
        assert int(str(entry["bytes"])) >= 1 << 20
        assert not entry["in_use"]
        for age in ("created", "last_used"):
            assert abs(time.time() - int(str(entry[age]))) < 3600
    # Somebody looks two days later.
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    assert main(["disk", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("2.0 d ago") == 2


def test_what_is_in_use_is_not_dropped(
    open_unit: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = open_unit("llama")
    (entry,) = listed(tmp_path, capsys)
    assert entry["in_use"]
    name = str(entry["folder"])
    assert main(["disk", "drop", str(tmp_path), name, "--yes"]) != 0
    assert unit.close(30.0)
    assert main(["disk", "drop", str(tmp_path), name, "--yes"]) == 0
    assert "1.0 MiB freed" in capsys.readouterr().out
    assert listed(tmp_path, capsys) == []
    assert not list(tmp_path.rglob("*.slab"))


def test_a_name_that_is_not_there_names_those_that_are(
    open_unit: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_unit("llama").close(30.0)
    assert main(["disk", "drop", str(tmp_path), "nothing", "--yes"]) != 0
    assert "dp0" in capsys.readouterr().err


def test_fsck_says_by_its_exit_code_whether_a_folder_is_clean(
    open_unit: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = open_unit("llama")
    # The index is told of a page that was never written.
    keys = np.arange(16, dtype=np.uint8).reshape(1, 16)
    tokens = np.array([4], np.int32)
    assert unit.record_publish(0, keys, np.array([3], np.int32), unit.next_generations(1), tokens)
    assert unit.close(30.0)
    assert main(["fsck", str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().out
    main(["fsck", str(tmp_path), "--repair"])
    assert main(["fsck", str(tmp_path)]) == 0
