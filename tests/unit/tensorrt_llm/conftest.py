"""Makes engines of one rank and closes them after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.tensorrt_llm.world import World, settings


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(environment: dict[str, str] | None = None, **options: Any) -> World:
        for name, value in settings(**(environment or {})).items():
            monkeypatch.setenv(name, value)
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
