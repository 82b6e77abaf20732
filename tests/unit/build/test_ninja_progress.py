"""While a build runs, it reports its progress and shows the compiler's messages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from build_support import ninja_progress
from build_support.ninja_progress import run_ninja

NINJA = [sys.executable, "-m", "ninja"]


def write(folder: Path, *commands: str) -> list[str]:
    rules = [f"rule r{n}\n  command = {command}\nbuild out{n}: r{n}\n" for n, command in enumerate(commands)]
    (folder / "build.ninja").write_text("".join(rules))
    return [*NINJA, "-C", str(folder), "-j", "1"]


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, "touch out0", "touch out1", "touch out2")
    monkeypatch.setattr(ninja_progress, "EVERY_S", 0.0)
    run_ninja(command, "compiling x")
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"flexkv: compiling x: {done} of 3 files" for done in (1, 2, 3, 3)
    ]
    run_ninja(command, "compiling x")
    assert capfd.readouterr().out == "", "nothing was to be done"


def test_a_file_that_takes_long_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, "sleep 1 && touch out0", "sleep 1 && touch out1")
    monkeypatch.setattr(ninja_progress, "EVERY_S", 0.0)
    monkeypatch.setattr(ninja_progress, "SILENCE_S", 0.1)
    run_ninja(command, "compiling x")
    said = [line.partition(",")[0] for line in capfd.readouterr().out.splitlines()]
    first = "flexkv: compiling x: the first file"
    second = "flexkv: compiling x: 1 of 2 files"
    assert said.count(first) > 1, said
    assert said.count(second) > 1, said
    assert list(dict.fromkeys(said)) == [first, second, "flexkv: compiling x: 2 of 2 files"]


def test_warnings_and_errors_are_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = write(tmp_path, "echo a warning && touch out0", "echo an error && false")
    with pytest.raises(subprocess.CalledProcessError):
        run_ninja(command, "compiling x")
    said = capfd.readouterr().out
    assert "a warning\n" in said
    assert "an error\n" in said
    assert "FAILED" in said


def test_a_job_server_of_make_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -j2 --jobserver-auth=98,99")
    run_ninja(write(tmp_path, "touch out0"), "compiling x")
    assert re.fullmatch(r"flexkv: compiling x: 1 of 1 files, \d+ s\n", capfd.readouterr().out)
