"""tests/steady.py repeats test files under load, and names the first file that fails a round."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import steady
from tests.steady import Plan, Progress, busy_loops, find_files, is_timed, plan, run, run_round

ROOT = Path(__file__).resolve().parents[3]

WAVERS = """
from pathlib import Path
def test_fails_the_third_time():
    counter = Path(__file__).with_suffix(".count")
    count = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(count + 1))
    assert count != 2, "the third time"
"""


@pytest.fixture
def rounds_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a root folder for test files. A round calls the test functions of a file directly, without starting
    pytest.
    """
    monkeypatch.setattr(steady, "ROOT", tmp_path)

    def execute(path: str, cwd: Path, environ: dict[str, str]) -> str | None:
        names: dict[str, object] = {"__file__": str(tmp_path / path)}
        exec((tmp_path / path).read_text(), names)
        try:
            for name, value in list(names.items()):
                if name.startswith("test_") and callable(value):
                    value()
        except AssertionError as error:
            return str(error)
        return None

    monkeypatch.setattr(steady, "run_round", execute)
    return tmp_path


def test_a_file_that_wavers_is_named_with_its_output(
    rounds_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rounds_of / "test_firm.py").write_text("def test_firm(): pass\n")
    (rounds_of / "test_loose.py").write_text(WAVERS)
    plans = [Plan("test_firm.py", 3, 0), Plan("test_loose.py", 5, 0)]
    assert run(plans, Progress(rounds_of / "state.json", "tree"), 60.0) == 1
    said = capsys.readouterr().out
    assert "passed: test_firm.py 3/3" in said
    assert "the third time" in said
    assert "wavers or fails: test_loose.py 3/5" in said


def test_the_next_call_goes_on_where_the_last_one_stopped(
    rounds_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rounds_of / "test_firm.py").write_text("def test_firm(): pass\n")
    plans = [Plan("test_firm.py", 4, 0)]
    state = rounds_of / "state.json"
    assert run(plans, Progress(state, "tree"), 0.0) == steady.STILL_TO_RUN
    assert "4 of 4 rounds are still to run" in capsys.readouterr().out
    Progress(state, "tree").add("test_firm.py 1/4")
    assert run(plans, Progress(state, "tree"), 60.0) == 0
    assert "1/4" not in capsys.readouterr().out
    assert run(plans, Progress(state, "tree"), 60.0) == 0
    assert "passed" not in capsys.readouterr().out
    # If the tree has changed since the last call, all rounds run again.
    assert run(plans, Progress(state, "another"), 60.0) == 0
    assert "passed: test_firm.py 1/4" in capsys.readouterr().out


def test_a_first_look_takes_fewer_rounds(rounds_of: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rounds_of / "test_firm.py").write_text("def test_firm(): pass\n")
    state = rounds_of / "state.json"
    assert run([Plan("test_firm.py", 4, 0)], Progress(state, "tree"), 60.0, most_rounds=3) == 0
    assert capsys.readouterr().out.count("passed") == 3
    assert run([Plan("test_firm.py", 4, 0)], Progress(state, "tree"), 60.0) == 0
    said = capsys.readouterr().out
    assert said.count("passed") == 1
    assert "passed: test_firm.py 4/4" in said


def test_a_folder_stands_for_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__)
    files = find_files([str(here), str(here.parent)])
    assert files[0] == here
    assert sorted(files) == sorted(here.parent.rglob("test_*.py"))
    for name in (here.parent / "no_test.py", ROOT / "flexkv", ROOT / "Makefile", ROOT / "tests/gone"):
        with pytest.raises(SystemExit):
            find_files([str(name)])
        assert f"{name}: expected a file" in capsys.readouterr().err


def test_a_round_is_a_run_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): assert False, 'named here'\n")
    output = run_round("test_one.py", tmp_path, dict(os.environ))
    assert output is not None
    assert "named here" in output


def test_a_round_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "ROUND_S", 0.2)
    (tmp_path / "test_one.py").write_text("import time\ndef test_one(): time.sleep(60)\n")
    output = run_round("test_one.py", tmp_path, dict(os.environ))
    assert output is not None
    assert "did not end within" in output


@pytest.mark.parametrize(
    ("imports", "timed"),
    [
        ("import json\n", False),
        ("import threading\n", True),
        ("from concurrent.futures import Future\n", True),
        ("from tests.helper import go\n", True),
        ("from tests import helper\n", True),
        ("import timeit\n", False),
    ],
)
def test_threads_clocks_and_processes_are_found_through_helpers(
    imports: str, timed: bool, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").write_text("import subprocess\nfrom tests import helper\n")
    path = tmp_path / "tests" / "test_it.py"
    path.write_text(imports)
    assert is_timed(path, tmp_path) is timed


def test_files_with_threads_run_more_often_and_under_the_sanitizer() -> None:
    assert plan(ROOT / "tests/unit/storage/test_journal.py") == Plan(
        "tests/unit/storage/test_journal.py", 20, 5
    )
    assert plan(ROOT / "tests/unit/build/test_steady.py") == Plan("tests/unit/build/test_steady.py", 20, 0)
    assert plan(ROOT / "tests/unit/build/test_variables.py").usual == 3


def test_busy_loops_end_with_the_block() -> None:
    with busy_loops(2):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        running = children.read_text().split()
        deadline_s = time.monotonic() + 30.0
        while not all(_cpu_ticks(pid) > 2 for pid in running[-2:]):
            assert time.monotonic() < deadline_s, "the loops do not compute"
            time.sleep(0.05)
    assert not set(running[-2:]) & set(children.read_text().split())


def _cpu_ticks(pid: str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])
