"""Checks that a sanitizer finds nothing in the Python tests of the native core."""

from __future__ import annotations

import pytest

from tests.programs import run_module
from tests.sanitizers.run import FOLDERS

RUN_S = 3600


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize(
    ("sanitizer", "options"),
    [
        pytest.param("address", ("--short",), id="address-short"),
        *(pytest.param(name, (), id=name, marks=pytest.mark.long) for name in FOLDERS),
    ],
)
def test_python_tests_are_clean(sanitizer: str, options: tuple[str, ...]) -> None:
    done = run_module("tests.sanitizers.run", sanitizer, *options)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout
