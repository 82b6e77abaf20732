"""Runs the C++ tests, compiled as in users' builds. `make test` runs them with sanitizers instead."""

from __future__ import annotations

import pytest

from tests.programs import run_module
from tests.soak import soak_factor

BUILD_AND_RUN_S = 1800 * soak_factor()


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.timeout(BUILD_AND_RUN_S)
def test_native() -> None:
    done = run_module("tests.native.run")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "0 failed" in done.stdout
