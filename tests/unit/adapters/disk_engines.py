"""Engines over one disk folder, one after the other, like an engine that is restarted."""

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
"""5 whole blocks of 4 tokens, and 3 more tokens."""
SLAB_BYTES = 4 << 20


def in_turn(make_engine: Make, folder: Path, **settings: object) -> Make:
    """Makes engines with a disk tier in `folder`. Failed loads are recomputed unless `settings` or those of a call say
    otherwise; each call closes the previous engine.
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
    """From now on nothing is submitted to the disks and no result is taken, until `monkeypatch.undo()`."""
    monkeypatch.setattr(engine.unit.driver, "poll", lambda: None)


def spoil(folder: Path, places: Sequence[int] | None = None) -> None:
    """Flips a bit in the page at each of `places` of the only slab, or in every page."""
    (slab,) = folder.rglob("*.slab")
    header = read_header(str(slab))
    if places is None:
        places = range((slab.stat().st_size - header.header_bytes) // header.slot_bytes)
    for place in places:
        flip(slab, header.header_bytes + place * header.slot_bytes + 8)


def fails_and_is_computed(engine: MiniEngine, name: str, blocks: int) -> None:
    """Ends the load that the request waits for; so many of its blocks failed, and the engine computes them."""
    engine.end_load(name)
    assert len(engine.invalid) == blocks
    engine.step()
    engine.check(name)
