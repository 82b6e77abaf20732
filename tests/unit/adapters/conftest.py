"""Fixtures that make mini engines and close them after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.adapters.mini_engine import MiniEngine


@pytest.fixture
def make_engine() -> Iterator[Callable[..., MiniEngine]]:
    engines: list[MiniEngine] = []

    def make(**options: Any) -> MiniEngine:
        engines.append(MiniEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
