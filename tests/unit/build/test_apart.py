"""Tests in a session of their own are reported as if they had run here, and those it did not come to have failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beside import ROOT

DEADLINE_S = 120.0
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tests.apart, tests.beside
tests.apart.FOLDER = tests.apart.Path("tests", "elsewhere")
tests.apart.WAIT_S = 5
tests.beside.ROOT = {{folder!r}}
from tests.conftest import *
"""
INI = """
[pytest]
testpaths = tests
addopts = -ra
markers =
    beside: x
    long: x
"""
HERE = """
import os, pytest
def test_here(): open("here", "w").write(str(os.getpid()))
@pytest.mark.beside("-m", "platform")
def test_last(beside): assert beside.code == 0
"""
ELSEWHERE = """
import os, pytest
def test_good(): assert str(os.getpid()) != open("here").read()
def test_bad(): assert 1 == 2, "its own words"
def test_skipped(): pytest.skip("for a reason")
@pytest.fixture
def left(): yield; raise ValueError("at its end")
def test_ends_badly(left): pass
@pytest.mark.long
def test_long(): pass
"""
DIES = """
import os, sys
def test_dies():
    open(sys.argv[sys.argv.index("--reports") + 1], "a").write('{"half a')
    os._exit(7)
"""
HANGS = """
import time
def test_quick(): pass
def test_hangs(): time.sleep(1000)
def test_after_it(): pass
"""


def run(
    folder: Path, elsewhere: dict[str, str], *asked: str, inside: str = ".", options: str = ""
) -> tuple[list[list[str]], str]:
    """How tests ended, in their order, and all that the session said."""
    (folder / "tests" / "elsewhere").mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST.format(folder=str(folder)))
    (folder / "pytest.ini").write_text(INI)
    (folder / "tests" / "test_here.py").write_text(HERE)
    for name, text in elsewhere.items():
        (folder / "tests" / "elsewhere" / f"test_{name}.py").write_text(text)
    (folder / "temporary").mkdir()
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temporary"), "PYTEST_ADDOPTS": options}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *asked],
        cwd=folder / inside,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=DEADLINE_S,
    )
    said = done.stdout + done.stderr
    assert not list((folder / "temporary").glob("flexkv-apart-*")), "what it reported is left"
    lines = [line for line in said.splitlines() if re.match(r"\S+::.*%\]$", line)]
    return [line.partition("::")[2].split()[:2] for line in lines], said


def test_results_are_those_of_the_other_session(tmp_path: Path) -> None:
    ended, said = run(tmp_path, {"a": ELSEWHERE, "b": DIES})
    assert ended == [
        ["test_here", "PASSED"],
        ["test_good", "PASSED"],
        ["test_bad", "FAILED"],
        ["test_skipped", "SKIPPED"],
        ["test_ends_badly", "PASSED"],
        ["test_ends_badly", "ERROR"],
        ["test_dies", "FAILED"],
        ["test_last", "PASSED"],
    ], said
    for words in ("its own words", "for a reason", "at its end", "ended with 7 before this test did"):
        assert words in said
    assert "2 failed, 4 passed, 1 skipped, 1 deselected, 1 error" in said.splitlines()[-1]


def test_a_session_that_hangs_is_ended_and_what_it_had_reported_counts(tmp_path: Path) -> None:
    _, said = run(tmp_path, {"a": HANGS}, "-rA")
    # A timeout prints in the middle of lines; the summary is whole.
    ended = dict(reversed(found) for found in re.findall(r"^(PASSED|FAILED) \S+::(\w+)", said, re.MULTILINE))
    wanted = {"here": "PASSED", "quick": "PASSED", "hangs": "FAILED", "after_it": "FAILED", "last": "PASSED"}
    assert ended == {f"test_{name}": end for name, end in wanted.items()}, said
    assert "Timeout (>5.0s)" in said
    assert "before this test did" in said


@pytest.mark.parametrize(
    ("asked", "inside"),
    [
        (["tests"], "."),
        (["-k", "here or good"], "."),
        (["-m", "not long"], "."),
        (["--lf"], "."),
        ([], "tests/elsewhere"),
        (["--collect-only"], "."),
    ],
)
def test_a_run_of_less_has_one_session(asked: list[str], inside: str, tmp_path: Path) -> None:
    _, said = run(
        tmp_path,
        {"a": "import sys\ndef test_one(): assert '--reports' not in sys.argv\n"},
        *asked,
        inside=inside,
    )
    assert not re.search("failed|error", said.splitlines()[-1]), said


def test_options_of_the_environment_are_this_sessions(tmp_path: Path) -> None:
    ended, said = run(tmp_path, {"a": "def test_one(): pass\n"}, options="--ff")
    assert ["test_one", "PASSED"] in ended, said
