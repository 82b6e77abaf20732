"""The C++ tests."""

from __future__ import annotations

import re

import pytest

from tests.programs import run_module
from tests.soak import soak_factor

BUILD_AND_RUN_S = 1800 * soak_factor()


@pytest.mark.soak
@pytest.mark.timeout(BUILD_AND_RUN_S)
def test_native() -> None:
    done = run_module("tests.native.run")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "0 failed" in done.stdout


@pytest.mark.timeout(BUILD_AND_RUN_S)
def test_one_case_runs_alone() -> None:
    done = run_module("tests.native.run", "--case", "runs that share bytes of the pool*")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert re.search(r"test cases:\s+1 \|\s+1 passed", done.stdout), done.stdout[-20_000:]


@pytest.mark.timeout(BUILD_AND_RUN_S)
def test_a_pattern_that_fits_no_case_is_an_error() -> None:
    done = run_module("tests.native.run", "--case", "no such case")
    assert done.returncode == 1
    assert "--case no such case: no test case has such a name" in done.stdout
