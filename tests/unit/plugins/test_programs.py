"""The files in a plugins folder: which of them are plugins, which process of the engine runs each plugin, and which
files are refused.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.plugins import programs
from flexkv.plugins.base import Role
from flexkv.plugins.programs import MOST_PROGRAMS, find_programs
from tests.unit.plugins.plugin_folders import plugin

STRANGER = 65534


def names_at(folder: Path, role: Role, rank: int | None) -> list[str]:
    return [program.name for program in find_programs(str(folder)).at(role, rank)]


def test_a_name_says_where_a_plugin_runs(tmp_path: Path) -> None:
    for name in (
        "scheduler_a",
        "worker_0_b",
        "worker_12_c",
        "all_d",
        "notes.txt",
        "prompts.jsonl",
        "helper.py",
    ):
        plugin(tmp_path, name)
    assert names_at(tmp_path, Role.SCHEDULER, None) == ["all_d", "scheduler_a"]
    assert names_at(tmp_path, Role.WORKER, 0) == ["all_d", "worker_0_b"]
    assert names_at(tmp_path, Role.WORKER, 12) == ["all_d", "worker_12_c"]
    assert names_at(tmp_path, Role.WORKER, 1) == ["all_d"]
    assert find_programs(str(tmp_path)).refused == [], "files with other names are left alone"


def test_the_same_python_runs_python_and_others_run_by_themselves(tmp_path: Path) -> None:
    plugin(tmp_path, "all_a.py", mode=0o644)
    plugin(tmp_path, "all_b", mode=0o755)
    script, program = find_programs(str(tmp_path)).at(Role.SCHEDULER, None)
    assert script.command[0] == sys.executable
    assert script.command[-1] == str(tmp_path / "all_a.py")
    assert program.command == (str(tmp_path / "all_b"),)


def as_lost_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "another user's": ("all_a.py", lambda path: os.chown(path, STRANGER, -1), "belongs to user 65534"),
    "setuid": ("all_a", lambda path: path.chmod(0o4755), "runs as another user"),
    "setgid": ("all_a", lambda path: path.chmod(0o2755), "runs as another user or group"),
    "written by the group": ("all_a.py", lambda path: path.chmod(0o664), "others may write to it (mode 664)"),
    "written by all": ("all_a.py", lambda path: path.chmod(0o646), "others may write to it (mode 646)"),
    "not executable": ("all_a.sh", lambda path: path.chmod(0o644), "neither executable nor a .py file"),
    "without a rank": ("worker_a.py", lambda path: None, "its name says no rank; allowed are"),
    "a folder": ("all_a", as_folder, "no regular file"),
    "a link to nothing": ("all_a", as_lost_link, "No such file"),
}
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=ROOT_ONLY if case == "another user's" else ()) for case in REFUSED]
)
def test_a_program_that_is_not_trusted_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, spoil, reason = REFUSED[case]
    spoil(plugin(tmp_path, name))
    found = find_programs(str(tmp_path))
    assert found.places == []
    ((refused, why),) = found.refused
    assert refused == str(tmp_path / name)
    assert reason in why


def test_a_root_engine_runs_no_program_of_another_user_and_another_engine_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path, "all_a.py")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    trusted = find_programs(str(tmp_path)).places
    assert bool(trusted) is (owner == 0), "root's programs are anybody's, others' are their own"


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "all_a.py")
    (tmp_path / "plugins").chmod(mode)
    found = find_programs(str(tmp_path / "plugins"))
    assert found.places == []
    assert [name for name, _ in found.refused] == [str(tmp_path / "plugins")]


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = find_programs(str(tmp_path / name))
    assert found.places == []
    ((refused, why),) = found.refused
    assert (refused, bool(why)) == (str(tmp_path / name), True)


def test_a_module_that_others_may_write_to_is_refused_with_its_folder(tmp_path: Path) -> None:
    """A plugins folder is refused if it has a module that another user may write to. A plugin imports a module from its
    own folder before any other module of that name, so that user could change what the plugin runs."""
    plugin(tmp_path, "all_a.py")
    plugin(tmp_path, "helper.py", mode=0o664)
    found = find_programs(str(tmp_path))
    assert found.places == []
    assert [name for name, _ in found.refused] == [str(tmp_path)]
    assert "helper.py" in found.refused[0][1]
    (tmp_path / "helper.py").chmod(0o644)
    assert names_at(tmp_path, Role.SCHEDULER, None) == ["all_a.py"]


def test_a_folder_that_another_could_be_put_in_place_of_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "plugins"
    folder.mkdir(parents=True)
    plugin(folder, "all_a")
    (tmp_path / "above").chmod(0o777)
    (refused,) = find_programs(str(folder)).refused
    assert "above" in refused[1]
    (tmp_path / "above").chmod(0o1777)  # like /tmp: only the owner of an entry may rename it
    assert names_at(folder, Role.SCHEDULER, None) == ["all_a"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    plugin(tmp_path, os.fsdecode(b"all_\xe9.py"))
    plugin(tmp_path, "all_a")
    found = find_programs(str(tmp_path))
    assert [reason for _, reason in found.refused] == ["its name is no printable text"]
    assert all(name.isprintable() for name, _ in found.refused)
    assert names_at(tmp_path, Role.SCHEDULER, None) == ["all_a"]


def test_more_plugins_than_a_folder_may_have_are_refused(tmp_path: Path) -> None:
    for number in range(MOST_PROGRAMS + 2):
        plugin(tmp_path, f"all_{number:02}")
    found = find_programs(str(tmp_path))
    assert len(found.places) == MOST_PROGRAMS
    assert [name for name, _ in found.refused] == [str(tmp_path / "all_16"), str(tmp_path / "all_17")]


def test_control_without_the_look_at_owner_and_mode_all_of_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_distrusted", lambda status: "")
    plugin(tmp_path, "all_a", mode=0o4777)
    assert stat.S_IMODE((tmp_path / "all_a").stat().st_mode) & stat.S_ISUID
    assert len(find_programs(str(tmp_path)).places) == 1
