"""Tests in a session of their own are reported as if they had run here, and those it did not come to have failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.beside import ROOT

DEADLINE_S = 120.0
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tests.apart, tests.beside
tests.apart.FOLDER = tests.apart.Path("tests", "elsewhere")
tests.beside.ROOT = {{folder!r}}
from tests.conftest import *
"""
HERE = """
import os, pytest
def test_here(): open("here", "w").write(str(os.getpid()))
@pytest.mark.beside("-m", "platform")
def test_last(beside): assert beside.code == 0
"""
ELSEWHERE = """
import os, pytest
def test_good(): assert str(os.getpid()) not in open("pids", "a+").read()
def test_bad(): assert 1 == 2, "its own words"
def test_skipped(): pytest.skip("for a reason")
@pytest.fixture
def left(): yield; raise ValueError("at its end")
def test_ends_badly(left): pass
"""
DIES = """
import os
def test_dies(): os._exit(7)
"""


def run(folder: Path, *asked: str) -> list[str]:
    """Lines that say how tests ended, in their order, and what the session said in short."""
    (folder / "tests" / "elsewhere").mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST.format(folder=str(folder)))
    (folder / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = -ra\nmarkers =\n    beside: x\n"
    )
    (folder / "tests" / "test_here.py").write_text(HERE)
    (folder / "tests" / "elsewhere" / "test_a.py").write_text(ELSEWHERE)
    (folder / "tests" / "elsewhere" / "test_b.py").write_text(DIES)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *asked]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environ, timeout=DEADLINE_S
    )
    return (done.stdout + done.stderr).splitlines()


def test_results_are_those_of_the_other_session(tmp_path: Path) -> None:
    said = run(tmp_path)
    ended = [line.partition("::")[2].split()[:2] for line in said if re.match(r"tests/\S+::.*%\]$", line)]
    assert ended == [
        ["test_here", "PASSED"],
        ["test_good", "PASSED"],
        ["test_bad", "FAILED"],
        ["test_skipped", "SKIPPED"],
        ["test_ends_badly", "PASSED"],
        ["test_ends_badly", "ERROR"],
        ["test_dies", "FAILED"],
        ["test_last", "PASSED"],
    ], "\n".join(said)
    text = "\n".join(said)
    for words in ("its own words", "for a reason", "at its end", "ended with 7 before this test did"):
        assert words in text
    assert "2 failed, 4 passed, 1 skipped, 1 error" in said[-1]
