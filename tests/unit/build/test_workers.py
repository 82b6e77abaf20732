"""`make test` distributes test files to workers. The folders that take longest are started first, and files that share
a build or an engine run on the same worker.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_support.ninja_file import ROOT
from tests.conftest import LONGEST_FIRST, TOGETHER

TEST = """
import os, time
def test_one(): time.sleep(0.2); print("worker", os.environ["PYTEST_XDIST_WORKER"])
def test_two(): test_one()
"""
FILES = ("unit/test_a.py", "unit/test_b.py", "native/test_c.py", "native/test_d.py", "engines/test_e.py")


def run_files(folder: Path, workers: int) -> str:
    """Runs FILES with this number of workers, in the order of the suite's conftest. Returns pytest's output."""
    for name in FILES:
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "-v", "-rP"]
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


def test_what_belongs_together_runs_on_one_worker(tmp_path: Path) -> None:
    workers: dict[str, set[str]] = {}
    for line in run_files(tmp_path, 2).splitlines():
        if " PASSED " in line:
            worker, name = line.split("]")[0], line.split()[-1].partition("::")[0]
            workers.setdefault(name, set()).add(worker)
    assert set(workers) == {f"tests/{name}" for name in FILES}
    assert all(len(found) == 1 for found in workers.values()), workers
    assert workers["tests/native/test_c.py"] == workers["tests/native/test_d.py"]
    assert len(set.union(*workers.values())) == 2


def test_the_longest_folders_begin(tmp_path: Path) -> None:
    """The folders that take longest are started first. The test has only one worker, so its output shows the order in
    which folders begin.
    """
    lines = run_files(tmp_path, 1).splitlines()
    begun = [line.split("/")[1] for line in lines if line.startswith("tests/")]
    order = [folder for at, folder in enumerate(begun) if folder not in begun[:at]]
    assert order == [folder for folder in LONGEST_FIRST if folder in {"engines", "native", "unit"}]
    assert begun == sorted(begun, key=order.index), "a folder's files begin one after the other"


def test_every_folder_has_its_place() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert folders == set(LONGEST_FIRST)
    assert set(TOGETHER) <= set(LONGEST_FIRST)


def test_the_makefile_asks_for_it() -> None:
    done = subprocess.run(["make", "-n", "test"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "-m pytest -n 3" in done.stdout
