"""The Python tests of the native core are clean on an extension built with a sanitizer."""

from __future__ import annotations

import pytest

from tests.beside import Ended
from tests.sanitizers.run import FOLDERS

RUN_S = 3600


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize(
    "sanitizer",
    [pytest.param(name, marks=pytest.mark.beside("-m", "tests.sanitizers.run", name)) for name in FOLDERS],
)
def test_python_tests_are_clean(sanitizer: str, beside: Ended) -> None:
    assert beside.code == 0, beside.output[-20_000:]
    assert " passed" in beside.output
