"""The tests that `make soak` runs for longer exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import SOAK_VARIABLE, soak_factor

ROOT = Path(__file__).resolve().parents[3]

STRETCHED = (
    "unit/cache/test_simulation.py::test_no_rule_is_broken",
    "unit/cache/test_disk_simulation.py::test_no_rule_is_broken",
    "faults/test_power_cut.py::test_what_was_durable_survives_and_nothing_is_wrong",
    "faults/test_kill.py::test_what_was_durable_is_served_after_every_kill",
    "native/test_native.py::test_native",
    "sanitizers/test_native_sanitizers.py::test_native_tests_are_clean",
    "engines/test_pressure.py::test_preempted_requests_resume_right",
    "engines/test_pressure.py::test_conversations_that_exceed_the_engines_pool",
)


def collect(factor: str) -> subprocess.CompletedProcess[str]:
    # Only these files are collected. Other files import engines when pytest collects them, which takes long.
    files = sorted({f"tests/{name.partition('::')[0]}" for name in STRETCHED})
    options = ["-m", "soak", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environ = {**os.environ, SOAK_VARIABLE: factor}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=280)


def selected(factor: str) -> list[str]:
    done = collect(factor)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_kind_of_long_run_is_selected_and_grows() -> None:
    usual, long = selected("1"), selected("3")
    for name in STRETCHED:
        assert any(name in line for line in usual), name
    for name in (name for name in STRETCHED if "native" not in name):
        counts = [sum(name in line for line in lines) for lines in (usual, long)]
        assert counts[1] == 3 * counts[0], name
    assert not any("test_native_sanitizers.py::test_the_sanitizer_would" in line for line in usual)


def test_the_makefile_asks_for_it() -> None:
    done = subprocess.run(["make", "-n", "soak"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "FLEXKV_SOAK=${FLEXKV_SOAK:-5}" in done.stdout
    assert '-m "soak or long"' in done.stdout


LEFT_OUT = """
import pytest
@pytest.mark.long
def test_long(): pass
def test_short(): pass
"""


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        ([], {"short"}),
        (["test_one.py"], {"short"}),
        (["-m", "soak or long"], {"long"}),
        (["-m", ""], {"short", "long"}),
    ],
)
def test_long_tests_run_where_they_are_asked_for(asked: list[str], run: set[str], tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(LEFT_OUT)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *settings, *(asked or ["."])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    passed = {name for name in ("short", "long") if f"test_{name} PASSED" in done.stdout}
    assert passed == run, done.stdout + done.stderr
    assert ("1 deselected" in done.stdout) == (len(run) == 1)


@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5", "²"])
def test_a_bad_factor_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOAK_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{SOAK_VARIABLE}={text!r}: expected a whole number from 1"):
        soak_factor()


def test_a_bad_factor_ends_the_run() -> None:
    done = collect("0")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{SOAK_VARIABLE}='0'" in done.stderr
