"""Builds the C++ tests and runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_support.native_tests import build
from build_support.ninja_file import Variant
from tests.soak import soak_factor

BUILD_AND_RUN_S = 900 * soak_factor()


@pytest.mark.soak
@pytest.mark.timeout(BUILD_AND_RUN_S + 60)
def test_native(tmp_path: Path) -> None:
    program = build(Variant.from_environment())
    done = subprocess.run([program], capture_output=True, text=True, cwd=tmp_path, timeout=BUILD_AND_RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
