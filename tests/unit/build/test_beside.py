"""Programs beside the tests: how they ended is told, and none outlives the session."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.beside import ROOT, Beside, Ended

DEADLINE_S = 120.0
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import *
"""
TESTS = """
import pytest

@pytest.mark.beside("-m", "platform")
def test_waits(beside):
    assert beside.code == 0 and "Linux" in beside.output

@pytest.mark.beside("-m", "no_such_module")
def test_sees_a_failure(beside):
    assert beside.code == 0

def test_waits_for_nothing():
    pass
"""


def test_an_end_is_told_with_what_was_said() -> None:
    good, bad = ("-c", "print('said')"), ("-c", "raise SystemExit('wrong')")
    running = Beside([good, bad, good], alone=False)
    try:
        assert running.ended(bad) == Ended(1, "wrong\n")
        assert running.ended(good) == Ended(0, "said\n")
    finally:
        running.close()


def test_close_ends_what_runs_with_all_that_it_started_and_begins_nothing(tmp_path: Path) -> None:
    pid, late = tmp_path / "pid", tmp_path / "late"
    sleeper = (
        "import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid)); child.wait()"
    )
    running = Beside([("-c", sleeper), ("-c", f"open({str(late)!r}, 'w')")], alone=False)
    ends_s = time.monotonic() + DEADLINE_S
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    running.close()
    # A process closes its output a moment before it has ended.
    while not has_ended(pid.read_text()):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    assert not late.exists()


def has_ended(pid: str) -> bool:
    """Whether there is no such process, or one that nobody has reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_a_session_starts_them_and_puts_their_tests_last(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    order = [
        line.split("::")[1].split()[:2]
        for line in done.stdout.splitlines()
        if line.startswith("test_some.py::")
    ]
    assert order == [
        ["test_waits_for_nothing", "PASSED"],
        ["test_waits", "PASSED"],
        ["test_sees_a_failure", "FAILED"],
    ], done.stdout
