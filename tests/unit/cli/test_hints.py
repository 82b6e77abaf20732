"""`flexkv info` suggests improvements to a machine, with a command for each. If nothing can be improved, it suggests
nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexkv.cli import info_facts
from flexkv.cli.hints import Machine, gpu_driver_is_loaded, hints
from flexkv.config import DiskConfig

WELL = Machine(
    private_pages="madvise",
    shared_pages="advise",
    huge_page_bytes=2 << 20,
    huge_pages_free=0,
    host_bytes=1 << 30,
    uring_refusal="",
    has_gpu=False,
    with_cuda=False,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"private_pages": "always"},
        {"shared_pages": "never"},
        {"shared_pages": "deny", "huge_pages_free": 512},
        {"shared_pages": "deny", "huge_page_bytes": 0},
        {"has_gpu": True, "with_cuda": True},
    ],
)
def test_where_all_is_well_nothing_is_said(change: dict[str, Any]) -> None:
    assert hints(replace(WELL, **change)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"private_pages": "never"}, ["transparent_hugepage/enabled", "echo madvise"]),
        ({"shared_pages": "deny"}, ["sudo sysctl vm.nr_hugepages=512", "shmem_enabled"]),
        ({"shared_pages": "deny", "huge_pages_free": 511}, ["sudo sysctl vm.nr_hugepages=512"]),
        ({"uring_refusal": "EPERM"}, ["EPERM", "sudo sysctl kernel.io_uring_disabled=0"]),
        ({"has_gpu": True}, ["FLEXKV_CUDA=1 make build"]),
    ],
)
def test_each_lack_is_named_with_its_command(change: dict[str, Any], words: list[str]) -> None:
    [hint] = hints(replace(WELL, **change))
    assert all(word in hint for word in words), hint


def test_a_gpus_driver_is_found(tmp_path: Path) -> None:
    assert not gpu_driver_is_loaded(tmp_path)
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.touch()
    assert gpu_driver_is_loaded(tmp_path)


@pytest.mark.parametrize(
    ("made", "mounted", "asked"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_a_folder_that_would_lie_on_the_root_file_system_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool, mounted: bool, asked: bool
) -> None:
    folder = tmp_path / "mnt"
    if made:
        folder.mkdir()
    root = os.stat("/").st_dev
    monkeypatch.setattr(info_facts, "device_of", lambda path: root + mounted)
    found = info_facts.folder_hints(DiskConfig(folders=str(folder)))
    assert any("is its disk mounted?" in hint for hint in found) is asked


def test_folders_of_one_file_system_are_named(tmp_path: Path) -> None:
    found = info_facts.folder_hints(DiskConfig(folders=f"{tmp_path / 'a'}:{tmp_path / 'b'}"))
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'} lie on one file system" in found[0]
