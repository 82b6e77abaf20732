"""Makes mini engines that use one disk folder one after another, as when an engine is restarted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.storage.header import read_header
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.storage.damage import flip

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
"""23 tokens: 5 full blocks of 4, and a partial tail of 3."""
SLAB_BYTES = 4 << 20


def in_turn(make_engine: Make, folder: Path, **settings: object) -> Make:
    """Returns a function that makes engines with a disk tier in `folder`. Each call first closes the engine that the
    previous call made. Engines compute the blocks of failed loads again, unless `settings` or the settings of the call
    give another `role`.
    """
    engines: list[MiniEngine] = []
    fixed = {
        "disk.folders": str(folder),
        "disk.bytes_per_folder": SLAB_BYTES,
        "role": EngineRole(recomputes=True),
    }

    def make(**more: object) -> MiniEngine:
        if engines:
            engines.pop().close()
        engines.append(make_engine(**fixed | settings | more))
        return engines[-1]

    return make


def stop_disks(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the disk tier until `monkeypatch.undo()`: reads and writes are not submitted, and results are not
    collected.
    """
    monkeypatch.setattr(engine.unit.driver, "poll", lambda: None)


def spoil(folder: Path, places: Sequence[int] | None = None) -> None:
    """Flips one bit in each page listed in `places`, or in every page if `places` is None. The folder has one slab."""
    (slab,) = folder.rglob("*.slab")
    header = read_header(str(slab))
    if places is None:
        places = range((slab.stat().st_size - header.header_bytes) // header.slot_bytes)
    for place in places:
        flip(slab, header.header_bytes + place * header.slot_bytes + 8)


def fails_and_is_computed(engine: MiniEngine, name: str, blocks: int) -> None:
    """Waits until the request's load has ended. Checks that `blocks` of its blocks failed, and that the engine then
    computes their KV correctly.
    """
    engine.end_load(name)
    assert len(engine.invalid) == blocks
    engine.step()
    engine.check(name)
