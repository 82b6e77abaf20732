"""Tests of the name of an engine's weights: which changes of the weights change the name, when files are read again,
and how several processes share the reading.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.weights import check, digest, table
from flexkv.weights.check import WeightsCheck
from flexkv.weights.digest import DigestError
from flexkv.weights.files import FileState, WeightsContent
from flexkv.weights.fingerprint import sampled_identity
from flexkv.weights.table import LOCK_NAME, TABLE_NAME, WeightsTable
from tests.unit.weights.tensor_files import HIDDEN, WITHIN_S, change, settle, write_model

FILE = "model.safetensors"
ROOT = Path(__file__).resolve().parents[3]
LATER_NS = 3600 * 10**9


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of file names. A name is added when flexkv begins to digest the file."""
    read: list[str] = []
    digest_files = digest.digest_files

    def counted(files, stop, done):  # type: ignore[no-untyped-def]
        read.extend(path.name for path in files)
        digest_files(files, stop, done)

    monkeypatch.setattr(check, "digest_files", counted)
    monkeypatch.setattr(table, "YOUNG_NS", -LATER_NS)
    return read


def checked(*models: Path, folder: Path | None = None, since_ns: int | None = None) -> WeightsCheck:
    """Runs a check of the given models to its end, and returns the check. Unless `since_ns` is given, the engine's
    process seems to have started after every change on disk."""
    content = WeightsContent(tuple(map(str, models)))
    done = WeightsCheck(content, folder, time.time_ns() + LATER_NS if since_ns is None else since_ns)
    done.start(WITHIN_S)
    done.stop(WITHIN_S)
    assert not done.pending
    return done


def name(*models: Path, folder: Path | None = None) -> bytes:
    done = checked(*models, folder=folder)
    assert not done.failure
    return done.digest


def test_the_same_content_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    assert name(write_model(tmp_path / "a")) == name(write_model(tmp_path / "b"))
    assert len(name(tmp_path / "a")) == 32


def tuned_norm(folder: Path) -> None:
    change(folder / FILE, "model.norm.weight", 5)


def eight_rows(folder: Path) -> None:
    change(folder / FILE, "model.embed_tokens.weight", 1000 * HIDDEN, 8 * HIDDEN)


def one_value_of_a_matrix(folder: Path) -> None:
    change(folder / FILE, "model.layers.0.mlp.up_proj.weight", 700_000)


def another_file(folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"pickled")


EDITS = [tuned_norm, eight_rows, one_value_of_a_matrix, another_file]


@pytest.mark.parametrize("edit", EDITS)
def test_any_change_is_another_name(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    before = name(write_model(tmp_path / "a"))
    edit(tmp_path / "a")
    assert name(tmp_path / "a") != before


@pytest.mark.parametrize("edit", [eight_rows, one_value_of_a_matrix])
def test_control_samples_do_not_tell_them_apart(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    before = sampled_identity(write_model(tmp_path / "a"))
    edit(tmp_path / "a")
    assert sampled_identity(tmp_path / "a") == before


def test_a_drafts_weights_count(tmp_path: Path) -> None:
    model, draft = write_model(tmp_path / "a"), write_model(tmp_path / "draft", seed=1)
    before = name(model, draft)
    assert before != name(model)
    one_value_of_a_matrix(draft)
    assert name(model, draft) != before


def test_unchanged_files_are_read_once(tmp_path: Path, reads: list[str]) -> None:
    first = name(write_model(tmp_path / "a"), folder=tmp_path)
    assert reads == [FILE]
    assert name(tmp_path / "a", folder=tmp_path) == first
    assert reads == [FILE]


def test_a_new_file_is_read_and_no_other(tmp_path: Path, reads: list[str]) -> None:
    name(write_model(tmp_path / "a"), folder=tmp_path)
    another_file(tmp_path / "a")
    name(tmp_path / "a", folder=tmp_path)
    assert reads == [FILE, "model.pt"]


def test_a_change_that_keeps_the_time_of_content_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    file = write_model(tmp_path / "a") / FILE
    before, said = name(tmp_path / "a", folder=tmp_path), os.stat(file)
    settle(tmp_path)
    one_value_of_a_matrix(tmp_path / "a")
    os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))
    assert os.stat(file).st_mtime_ns == said.st_mtime_ns
    assert name(tmp_path / "a", folder=tmp_path) != before
    assert reads == [FILE, FILE]


def test_another_file_of_the_same_times_and_size_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    known = WeightsTable(tmp_path)
    file = write_model(tmp_path / "a") / FILE
    state = FileState.of(file)
    known.enter(file, state, "ab" * 32)
    assert known.known({file: state}) == {file: "ab" * 32}
    for field in ("size", "mtime_ns", "ctime_ns", "inode"):
        other = state._replace(**{field: getattr(state, field) + 1})
        assert known.known({file: other}) == {}, field


def test_a_file_that_was_mounted_anew_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    file = write_model(tmp_path / "a") / FILE
    known = WeightsTable(tmp_path)
    known.enter(file, FileState.of(file)._replace(device=1), "ab" * 32)
    assert known.known({file: FileState.of(file)}) == {file: "ab" * 32}


def test_a_file_that_changed_just_before_it_was_read_is_not_entered(tmp_path: Path) -> None:
    file = write_model(tmp_path / "a") / FILE
    state = FileState.of(file)._replace(ctime_ns=time.time_ns())
    WeightsTable(tmp_path).enter(file, state, "ab" * 32)
    assert not (tmp_path / TABLE_NAME).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": {"x": [[1, 2], "zz"], "y": 3}}',
    ],
)
def test_a_damaged_table_costs_the_reading_alone(tmp_path: Path, reads: list[str], content: bytes) -> None:
    (tmp_path / TABLE_NAME).write_bytes(content)
    first = name(write_model(tmp_path / "a"), folder=tmp_path)
    assert name(tmp_path / "a", folder=tmp_path) == first
    assert reads == [FILE]
    assert len(json.loads((tmp_path / TABLE_NAME).read_bytes())["files"]) == 1


def test_the_table_is_bounded_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_FILES", 2)
    monkeypatch.setattr(table, "YOUNG_NS", -LATER_NS)
    known = WeightsTable(tmp_path)
    files = [tmp_path / f"{number}.bin" for number in range(3)]
    for file in files:
        file.write_bytes(b"x")
        known.enter(file, FileState.of(file), "ab" * 32)
    assert list(known.known({file: FileState.of(file) for file in files})) == files[1:]
    assert (tmp_path / TABLE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_file_that_changed_after_the_engines_start_names_nothing(tmp_path: Path) -> None:
    """If a file has changed after the engine's start, the weights get no name. The engine may have loaded the file's
    earlier content, so its content does not identify the weights."""
    write_model(tmp_path / "a")
    start_ns = settle(tmp_path)
    assert checked(tmp_path / "a", since_ns=start_ns).digest
    one_value_of_a_matrix(tmp_path / "a")
    done = checked(tmp_path / "a", since_ns=start_ns)
    assert not done.digest
    assert FILE in done.failure
    assert "changed after the engine's start" in done.failure


def test_a_file_that_changes_while_it_is_read_names_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "a")
    digest_files = digest.digest_files

    def and_changed(files, stop, done):  # type: ignore[no-untyped-def]
        digest_files(files, stop, done)
        settle(tmp_path)
        one_value_of_a_matrix(tmp_path / "a")

    monkeypatch.setattr(check, "digest_files", and_changed)
    done = checked(tmp_path / "a")
    assert not done.digest
    assert f"{FILE} changed while" in done.failure


def opened_to_all(folder: Path) -> None:
    (folder / FILE).chmod(0o644 if (folder / FILE).stat().st_mode & 0o777 == 0o600 else 0o600)


def linked(folder: Path) -> None:
    os.link(folder / FILE, folder.parent / f"link {time.monotonic_ns()}")


def disturbed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, edit: Callable[[Path], None], times: int
) -> None:
    """Makes the first `times` reads of a range of the file call `edit` meanwhile, so that the file changes while it is
    read."""
    digest_range, left = digest._digest_range, [None] * times

    def and_disturbed(*args):  # type: ignore[no-untyped-def]
        found = digest_range(*args)
        if left:
            left.pop()
            settle(folder.parent)
            edit(folder)
        return found

    monkeypatch.setattr(digest, "_digest_range", and_disturbed)


@pytest.mark.parametrize("edit", [opened_to_all, linked])
def test_a_file_whose_content_nobody_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Path], None]
) -> None:
    before = name(write_model(tmp_path / "a"))
    start_ns = settle(tmp_path)
    disturbed(monkeypatch, tmp_path / "a", edit, times=1)
    assert checked(tmp_path / "a", since_ns=start_ns).digest == before
    disturbed(monkeypatch, tmp_path / "a", edit, times=check.TRIES)
    done = checked(tmp_path / "a")
    assert not done.digest
    assert FILE in done.failure


def test_control_a_file_that_was_written_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "a")
    disturbed(monkeypatch, tmp_path / "a", one_value_of_a_matrix, times=1)
    done = checked(tmp_path / "a")
    assert not done.digest
    assert f"{FILE} changed while" in done.failure


def test_what_cannot_be_read_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "a")
    digest_files, failures = digest.digest_files, [DigestError(f"weights file {FILE}: Stale file handle")]

    def failing(files, stop, done):  # type: ignore[no-untyped-def]
        if failures:
            raise failures.pop()
        digest_files(files, stop, done)

    monkeypatch.setattr(check, "digest_files", failing)
    assert checked(tmp_path / "a").digest
    failures += [DigestError("once"), DigestError("twice")]
    done = checked(tmp_path / "a")
    assert not done.digest
    assert done.failure == "once"


def test_weights_that_nothing_names_say_so() -> None:
    done = WeightsCheck(WeightsContent(unnamed="they may move"))
    done.start(WITHIN_S)
    assert (done.digest, done.failure, done.pending) == (b"", "they may move", False)
    done.stop(WITHIN_S)


def test_a_start_waits_for_what_comes_soon_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a unit waits only for weights that can be read soon. For a large model it returns at once, and the
    check continues in a thread."""
    write_model(tmp_path / "a")
    monkeypatch.setattr(check, "SOON_BYTES", 1000)
    may_read = threading.Event()
    digest_files = digest.digest_files

    def late(files, stop, done):  # type: ignore[no-untyped-def]
        assert may_read.wait(WITHIN_S)
        digest_files(files, stop, done)

    monkeypatch.setattr(check, "digest_files", late)
    done = WeightsCheck(WeightsContent((str(tmp_path / "a"),)), None, time.time_ns() + LATER_NS)
    done.start(WITHIN_S)
    assert done.pending
    may_read.set()
    done.stop(WITHIN_S)


HOLDER = """
import sys, threading
from pathlib import Path
from flexkv.weights.table import WeightsTable
folder = Path(sys.argv[1])
with WeightsTable(folder).reading([folder / "a" / "model.safetensors"], 30, threading.Event()):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process on the same node. It holds the table's lock for the file, as if it were reading the weights."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=WITHIN_S)


def test_a_second_process_takes_what_the_first_has_read(
    tmp_path: Path, reads: list[str], holder: subprocess.Popen[str]
) -> None:
    file = write_model(tmp_path / "a") / FILE
    waiting = WeightsCheck(WeightsContent((str(tmp_path / "a"),)), tmp_path, time.time_ns() + LATER_NS)
    try:
        waiting.start(0.3)
        assert waiting.pending
        # The test enters the result into the table, as the other process would do.
        WeightsTable(tmp_path).enter(file, FileState.of(file), "ab" * 32)
    finally:
        holder.communicate("\n", timeout=WITHIN_S)
    until(lambda: not waiting.pending)
    assert reads == []
    assert waiting.digest == name(tmp_path / "a", folder=tmp_path)


def until(done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_the_next_process_goes_on_where_one_was_killed(
    tmp_path: Path, reads: list[str], holder: subprocess.Popen[str]
) -> None:
    write_model(tmp_path / "a")
    waiting = WeightsCheck(WeightsContent((str(tmp_path / "a"),)), tmp_path, time.time_ns() + LATER_NS)
    waiting.start(0.3)
    assert waiting.pending
    holder.send_signal(signal.SIGKILL)
    ended(holder)
    until(lambda: not waiting.pending)
    assert waiting.digest
    assert reads == [FILE]


def test_a_wait_for_another_process_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: subprocess.Popen[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_model(tmp_path / "a")
    monkeypatch.setattr(check, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(check, "LOCK_BYTES_PER_S", 10**12)
    try:
        done = checked(tmp_path / "a", folder=tmp_path)
    finally:
        ended(holder)
    assert done.digest == name(tmp_path / "a"), "it is read here too"
    assert "another process has been reading the same weights for 0 s" in caplog.text


def test_nobody_waits_for_the_reading_of_another_model(
    tmp_path: Path, reads: list[str], holder: subprocess.Popen[str]
) -> None:
    write_model(tmp_path / "b")
    try:
        assert checked(tmp_path / "b", folder=tmp_path).digest
        assert holder.poll() is None
        assert reads == [FILE]
        assert WeightsTable(tmp_path).known({tmp_path / "b" / FILE: FileState.of(tmp_path / "b" / FILE)})
    finally:
        ended(holder)


def test_control_the_same_model_waits(
    tmp_path: Path, reads: list[str], holder: subprocess.Popen[str]
) -> None:
    """A control: a process that wants to read the same file waits, even if it reads the file through another path."""
    write_model(tmp_path / "a")
    (tmp_path / "other").symlink_to(tmp_path / "a")
    waiting = WeightsCheck(WeightsContent((str(tmp_path / "other"),)), tmp_path, time.time_ns() + LATER_NS)
    try:
        waiting.start(0.3)
        assert waiting.pending
        waiting.stop(WITHIN_S)
    finally:
        ended(holder)
    assert reads == []


def test_a_table_in_use_costs_the_next_start_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    monkeypatch.setattr(table, "TABLE_LOCK_WAIT_S", 0.0)
    write_model(tmp_path / "a")
    with (tmp_path / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = name(tmp_path / "a", folder=tmp_path)
    assert name(tmp_path / "a", folder=tmp_path) == first
    assert reads == [FILE, FILE]


def test_a_folder_that_cannot_be_written_costs_table_and_lock_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    (tmp_path / "file").write_bytes(b"")
    assert name(tmp_path / "a", folder=tmp_path / "file" / "below") == name(tmp_path / "a")
