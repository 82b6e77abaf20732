"""Fixtures that start the vLLM adapter's mini engines, and engines with several KV groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.adapters.conftest import make_engine
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.peers.group_engines import KINDS, Start, sharing

__all__ = ["make_engine", "start"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts an engine. All engines have the same model and run at the same time."""
    engines: list[ScheduledEngine] = []

    def make(kind: str, share: str = "host+disk", **settings: Any) -> ScheduledEngine:
        settings = {"blocks": 128} | sharing(tmp_path / "run", share) | settings
        settings.pop("role", None)  # only the mini engine has this setting
        engines.append(ScheduledEngine(tmp_path, KINDS[kind], **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
