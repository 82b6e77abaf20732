"""Tests `flexkv disk` and `flexkv fsck` on slabs that a disk tier has written."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from flexkv.cli.main import main
from flexkv.storage.folder import folder_at_rest, held_bytes
from flexkv.storage.header import read_header
from flexkv.storage.weights_name import write_weights
from tests.unit.storage.disk_world import (
    BLOCK_TOKENS,
    IDENTITY,
    DiskWorld,
    ids,
    keys_of,
    sharing_groups,
)


class Usage(NamedTuple):
    """Replaces the result of `shutil.disk_usage`; all values are bytes."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Makes a slab with four pages of one model, closes its unit, and returns the slab's path."""
    world = DiskWorld([tmp_path])
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    assert world.close()
    return world.folder / "group0.slab"


def damage(slab: Path, slot: int) -> None:
    header = read_header(str(slab))
    with open(slab, "r+b") as file:
        file.seek(header.header_bytes + slot * header.slot_bytes + 64)
        file.write(b"64 bytes of something else".ljust(64, b"!"))


def test_ls_shows_models_sizes_and_ages(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_weights(slab.parent, b"\xab" * 32, 0)
    other = DiskWorld([tmp_path], identity=replace(IDENTITY, model="another", fingerprint=bytes(32)))
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    entries = {entry["model"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(entries) == {IDENTITY.model, "another"}
    assert entries["another"]["in_use"]
    assert not entries[IDENTITY.model]["in_use"]
    assert entries[IDENTITY.model]["weights"] == "ab" * 32
    assert entries["another"]["weights"] == ""
    assert entries[IDENTITY.model]["bytes"] >= slab.stat().st_size
    for age in ("created", "last_used"):
        assert abs(time.time() - entries[IDENTITY.model][age]) < 3600
    assert main(["disk", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "a/model" in shown
    assert f" {'ab' * 8} " in shown
    assert "in use" in shown
    assert "0.0 h ago" in shown
    assert other.close()
    # The files get times two days back, as if the command ran two days after the last write.
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    assert main(["disk", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("2.0 d ago") == 2


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Makes slabs that three KV groups share, with two, one and three pages. Their unit is closed."""
    first, *more = sharing_groups()
    world = DiskWorld([tmp_path], first, more=more)
    for of, numbers, places in ((0, [1, 2], [0, 1]), (1, [3], [2]), (2, [4, 5, 6], [3, 4, 5])):
        _, generations = world.write(numbers, places, of=of)
        world.wait_durable(places, generations)
    assert world.close()
    return world.folder


RULES = ["full", "window of 2 pages", "state"]


def test_ls_shows_groups_with_their_rules_and_counts_their_pages_where_asked(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert [(group["group"], group["rule"]) for group in entry["groups"]] == list(enumerate(RULES))
    assert not any("pages" in group for group in entry["groups"])
    before = {path: path.read_bytes() for path in several.iterdir()}
    assert main(["disk", "ls", str(tmp_path), "--pages", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert [group["pages"] for group in entry["groups"]] == [2, 1, 3]
    assert {path: path.read_bytes() for path in several.iterdir()} == before
    assert main(["disk", "ls", str(tmp_path), "--pages"]) == 0
    assert "full: 2 pages; window of 2 pages: 1 pages; state: 3 pages" in capsys.readouterr().out


def test_ls_counts_no_pages_of_a_folder_in_use_and_says_so(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["disk", "ls", str(tmp_path), "--pages", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert [group["pages"] for group in entry["groups"]] == [4]
    world = DiskWorld([tmp_path])
    assert main(["disk", "ls", str(tmp_path), "--pages", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert "pages" not in entry["groups"][0]
    assert "its pages cannot be counted: " in entry["damage"]
    assert "in use by process" in entry["damage"]
    assert world.close()


def test_ls_names_a_damaged_index_by_its_own_path(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = slab.parent / "index.sqlite"
    index.write_bytes(b"?" * 10_000)
    assert main(["disk", "ls", str(tmp_path), "--pages", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert f"its pages cannot be counted: {index}: " in entry["damage"]


def test_a_pipe_in_place_of_the_lock_ends_no_command_with_a_traceback(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = slab.parent / "lock"
    lock.unlink()
    os.mkfifo(lock)
    for more in ([], ["--pages"]):
        assert main(["disk", "ls", str(tmp_path), *more]) == 0
    capsys.readouterr()
    assert main(["fsck", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {lock}: Illegal seek\n"


def test_fsck_counts_the_pages_of_each_group(
    several: Path, slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fsck", str(several)]) == 0
    shown = capsys.readouterr().out
    assert "6 good, 26 empty" in shown
    for number, (rule, pages) in enumerate(zip(RULES, (2, 1, 3), strict=True)):
        assert f"    group {number} ({rule}, test{['', ' window', ' state'][number]}): {pages} good" in shown
    assert main(["fsck", str(slab.parent)]) == 0
    assert "    group" not in capsys.readouterr().out, "one group is its slab"
    assert main(["fsck", str(several), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [group["good"] for group in report["slabs"][0]["groups"]] == [2, 1, 3]


def test_ls_says_that_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", "ls", str(tmp_path)]) == 0
    assert f"{tmp_path}: nothing of the disk tier" in capsys.readouterr().out
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_drop_deletes_a_unit_and_no_other(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = DiskWorld([tmp_path], identity=replace(IDENTITY, model="another", fingerprint=bytes(32)))
    kept = other.folder
    assert other.close()
    name = str(slab.parent.relative_to(tmp_path))
    assert main(["disk", "drop", str(tmp_path), name, "--yes"]) == 0
    assert "1.3 MiB freed" in capsys.readouterr().out
    assert not slab.parent.exists()
    assert not slab.parent.parent.exists()
    assert (kept / "group0.slab").exists()


def test_drop_refuses_what_is_in_use_or_not_there(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(slab.parent.relative_to(tmp_path))
    world = DiskWorld([tmp_path])
    assert main(["disk", "drop", str(tmp_path), name, "--yes"]) == 2
    said = capsys.readouterr().err
    assert "in use by process" in said
    assert "end that first\n" in said
    assert slab.exists()
    assert world.close()
    assert main(["disk", "drop", str(tmp_path), "nothing", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "no unit of" in said
    assert "unit0" in said, "those that are there are named"


@pytest.mark.parametrize(
    ("answer", "exit_code", "words"),
    [("n\n", 1, "kept, nothing of it was deleted"), ("", 130, "kept: no answer (--yes deletes")],
)
def test_drop_keeps_a_unit_without_a_yes_and_prints_that(
    slab: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    exit_code: int,
    words: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["disk", "drop", str(tmp_path), str(slab.parent.relative_to(tmp_path))]) == exit_code
    printed = capsys.readouterr()
    assert f"{slab.parent}: {words}" in printed.out + printed.err
    assert slab.exists()


def test_drop_deletes_after_a_yes(slab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["disk", "drop", str(tmp_path), str(slab.parent.relative_to(tmp_path))]) == 0
    assert not slab.exists()


def test_fsck_says_what_is_clean(slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsck", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert ": clean" in shown
    assert "4 good, 28 empty" in shown


def test_fsck_names_damage_and_repairs_the_index(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(slab, 2)
    assert main(["fsck", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "NOT CLEAN" in shown
    assert "slot 2: damaged run 0 (layer 0)" in shown
    assert "missing: 2" in shown
    assert "damaged: the slot does not contain the page" in shown
    assert "missing: the index lists a page" in shown
    assert main(["fsck", str(tmp_path), "--json"]) == 1, "the control: looking repairs nothing"
    capsys.readouterr()
    assert main(["fsck", str(tmp_path), "--repair", "--json"]) == 1, "it was not clean before"
    (report,) = json.loads(capsys.readouterr().out)
    assert report["repaired"]
    assert main(["fsck", str(tmp_path), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    [repaired] = report["slabs"]
    assert (repaired["good"], repaired["empty"]) == (3, 29)
    assert (repaired["missing"], repaired["damaged"]) == ([], [])


def test_a_damaged_header_is_a_state_of_its_unit(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(slab, "r+b") as file:
        file.seek(16)
        file.write(b"!" * 64)
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["model"] == "a/model"
    assert entry["damage"] == "group0.slab: damaged slab header (there is a whole one beside it)"
    slab.with_suffix(".header").unlink()
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["model"], entry["damage"]) == ("?", "group0.slab: damaged slab header")
    assert main(["disk", "ls", str(tmp_path)]) == 0
    assert "group0.slab: damaged slab header" in capsys.readouterr().out
    assert main(["fsck", str(tmp_path)]) == 1
    assert "the next start replaces it" in capsys.readouterr().out


def test_repair_of_what_was_never_written_leaves_a_clean_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = DiskWorld([tmp_path])
    tokens = np.array([BLOCK_TOKENS], np.int32)
    assert world.unit.record_publish(0, keys_of([1]), ids([3]), world.unit.next_generations(1), tokens)
    assert world.close()
    assert main(["fsck", str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().out
    main(["fsck", str(tmp_path), "--repair"])
    assert main(["fsck", str(tmp_path)]) == 0


def test_fsck_of_a_folder_in_use_is_an_error(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = DiskWorld([tmp_path])
    assert main(["fsck", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "in use by process" in said
    assert "end that first\n" in said
    assert world.close()


def test_nothing_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`flexkv fsck` fails for a folder without slabs, so that a mistyped folder is not reported as free of errors."""
    assert main(["fsck", str(tmp_path)]) == 2
    assert "no slabs" in capsys.readouterr().err
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_ls_goes_on_where_a_file_is_gone_before_it_is_looked_at(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def with_one_that_is_gone(self: Path) -> Iterator[Path]:
        yield from listed(self)
        if self == slab.parent:
            yield self / "index.sqlite-wal"

    monkeypatch.setattr(Path, "iterdir", with_one_that_is_gone)
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["last_used"] > 0


def test_ls_goes_on_where_a_unit_is_gone_before_it_is_looked_at(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def gone(self: Path) -> Iterator[Path]:
        if self == slab.parent:
            raise FileNotFoundError(str(self))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", gone)
    assert main(["disk", "ls", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["last_used"] == 0


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """Makes a folder to which every user has access, unlike pytest's temporary folders."""
    made = Path(tempfile.mkdtemp(prefix="flexkv-ls-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@contextmanager
def without_rights() -> Iterator[None]:
    """In the `with` block, the process has an unprivileged user's rights, because root could read every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def readable_units(root: Path) -> list[Path]:
    folders = []
    for unit in ("unit0", "unit1"):
        world = DiskWorld([root], identity=replace(IDENTITY, unit=unit))
        assert world.close()
        folders.append(world.folder)
    for path in (*folders, folders[0].parent):
        path.chmod(0o755)
    for folder in folders:
        for file in folder.iterdir():
            file.chmod(0o644)
    return folders


def test_ls_lists_the_others_where_one_lock_cannot_be_read(
    open_to_all: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = readable_units(open_to_all)
    (first / "lock").chmod(0)
    with without_rights():
        assert main(["disk", "ls", str(open_to_all), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [Path(entry["folder"]).name for entry in entries] == ["unit0", "unit1"]
    assert [entry["damage"] for entry in entries] == [
        "lock: Permission denied: whether it is in use is not known",
        "",
    ]


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_ls_and_fsck_name_folders_that_cannot_be_looked_into(
    open_to_all: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    first, second = readable_units(open_to_all)
    for folder in (first, second):
        folder.chmod(mode)
    with without_rights():
        assert main(["disk", "ls", str(open_to_all)]) == 1
        said = capsys.readouterr().err
        assert f"{first}: Permission denied" in said
        assert f"{second}: Permission denied" in said
        assert main(["fsck", str(open_to_all)]) != 0
    assert "Permission denied" in capsys.readouterr().err
    for folder in (first, second):
        folder.chmod(0o755)
    assert main(["disk", "ls", str(open_to_all)]) == 0


@pytest.mark.parametrize(("more", "problems"), [(-1, 0), (0, 1)], ids=["less than a slot", "control"])
def test_info_counts_whole_slots_on_a_disk_that_others_have_filled(
    slab: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: int,
    problems: int,
) -> None:
    slot, held = read_header(str(slab)).slot_bytes, held_bytes(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda root: Usage(held, held, 0))
    monkeypatch.setenv("FLEXKV_DISK_FOLDERS", str(tmp_path))
    monkeypatch.setenv("FLEXKV_DISK_BYTES_PER_FOLDER", str((held // slot + 1) * slot + more))
    assert main(["info", "--json"]) == (1 if problems else 0)
    found = json.loads(capsys.readouterr().out)["problems"]
    assert len([problem for problem in found if "bytes_per_folder" in problem]) == problems


def test_fsck_checks_the_other_units_beside_one_in_use(
    slab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "a-used" / "unit"
    shutil.copytree(slab.parent, used)
    with folder_at_rest(used):
        assert main(["fsck", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert f"{slab.parent}: clean" in printed.out
    assert f"not checked: {used} is in use by process" in printed.err
    assert main(["fsck", str(tmp_path)]) == 0, "the control"
