"""Engines over one disk folder, one after the other, as an engine is restarted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.adapters.vllm.use import Use
from tests.unit.adapters.mini_engine import MiniEngine

Make = Callable[..., MiniEngine]
SLAB_BYTES = 4 << 20


def in_turn(make_engine: Make, folder: Path, **settings: object) -> Make:
    """Makes engines that recompute, with a disk tier in `folder` and `settings`; each ends the one before."""
    engines: list[MiniEngine] = []
    fixed = {
        "disk.folders": str(folder),
        "disk.bytes_per_folder": SLAB_BYTES,
        "use": Use(recomputes=True),
    }

    def make(**more: object) -> MiniEngine:
        if engines:
            engines.pop().close()
        engines.append(make_engine(**fixed | settings | more))
        return engines[-1]

    return make


def stop_disks(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, written or heard of from here on, until `monkeypatch.undo()`."""
    disk = engine.side.unit.disk
    assert disk is not None
    monkeypatch.setattr(disk._driver, "pump", lambda: None)
