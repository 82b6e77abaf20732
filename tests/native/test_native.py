"""The C++ tests."""

from __future__ import annotations

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
