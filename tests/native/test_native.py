"""The C++ tests."""

from __future__ import annotations

import re

import pytest

from tests.beside import Ended
from tests.soak import soak_factor

BUILD_AND_RUN_S = 1800 * soak_factor()


@pytest.mark.soak
@pytest.mark.timeout(BUILD_AND_RUN_S)
@pytest.mark.beside("-m", "tests.native.run")
def test_native(beside: Ended) -> None:
    assert beside.code == 0, beside.output[-20_000:]
    assert "0 failed" in beside.output


@pytest.mark.timeout(BUILD_AND_RUN_S)
@pytest.mark.beside("-m", "tests.native.run", "--case", "runs that share bytes of the pool*")
def test_one_case_runs_alone(beside: Ended) -> None:
    assert beside.code == 0, beside.output[-20_000:]
    assert re.search(r"test cases:\s+1 \|\s+1 passed", beside.output), beside.output[-20_000:]


@pytest.mark.timeout(BUILD_AND_RUN_S)
@pytest.mark.beside("-m", "tests.native.run", "--case", "no such case")
def test_a_pattern_that_fits_no_case_is_an_error(beside: Ended) -> None:
    assert beside.code == 1
    assert "--case no such case: no test case has such a name" in beside.output
