"""`make test` shares files among workers: longest folders first; files that share a build or an engine stay
together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from build_support.ninja_file import ROOT
from tests.conftest import LONGEST_FIRST, TOGETHER

TEST = """
import os, time
def test_one(): time.sleep(0.2); print("worker", os.environ["PYTEST_XDIST_WORKER"])
def test_two(): test_one()
"""
FILES = ("unit/test_a.py", "unit/test_b.py", "native/test_c.py", "native/test_d.py", "engines/test_e.py")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    for name in FILES:
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-rP"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_belongs_together_runs_on_one_worker(said: str) -> None:
    workers: dict[str, set[str]] = {}
    for line in said.splitlines():
        if " PASSED " in line:
            worker, name = line.split("]")[0], line.split()[-1].partition("::")[0]
            workers.setdefault(name, set()).add(worker)
    assert set(workers) == {f"tests/{name}" for name in FILES}
    assert all(len(found) == 1 for found in workers.values()), workers
    assert workers["tests/native/test_c.py"] == workers["tests/native/test_d.py"]
    assert len(set.union(*workers.values())) == 2


def test_the_longest_folders_begin(said: str) -> None:
    begun = [line.split("/")[1] for line in said.splitlines() if line.startswith("tests/")]
    assert set(begun[:2]) == {"native", "engines"}
    assert begun[-1] == "unit"


def test_every_folder_has_its_place() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert folders == set(LONGEST_FIRST)
    assert set(TOGETHER) <= set(LONGEST_FIRST)


def test_the_makefile_asks_for_it() -> None:
    done = subprocess.run(["make", "-n", "test"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "-m pytest -n 3" in done.stdout
