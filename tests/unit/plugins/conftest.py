"""Fixtures for tests of plugins: a handler that keeps their log, and units that run plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.config import load_config
from flexkv.facts.ranks import GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.plugins import server
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from tests.unit.plugins.plugin_folders import DEADLINE_S, Held, Lines, plugin, processes_of
from tests.unit.plugins.plugin_units import (
    BLOCK_TOKENS,
    STRIPE,
    Asking,
    Build,
    keys_of,
    store_prompt,
)


@pytest.fixture
def log() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("flexkv")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(before)


@pytest.fixture
def build(tmp_path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    monkeypatch.setattr(server, "CLOSE_S", DEADLINE_S)
    before = Held()
    units: list[LiveUnit] = []

    def make(folder: Path | str | None = tmp_path / "plugins", **settings: object) -> LiveUnit:
        given: dict[str, object] = {"host.bytes": 1 << 20, "host.huge_pages": "off", "index.policy": "lru"}
        if folder is not None:
            given["plugins.folder"] = str(folder)
        config = load_config(given | {key.replace("__", "."): value for key, value in settings.items()}, {})
        run = np.array([[0, STRIPE, 0]], np.int64)
        ranks = {0: RankFacts(0, 0, 8, (GroupFacts(STRIPE, run, "a format"),))}
        owner = UnitOwner("a model", b"n" * 32, "unit0")
        units.append(build_unit(config, [KvGroup(BLOCK_TOKENS)], ranks, owner, prompt_keys=keys_of))
        units[-1].grow()
        return units[-1]

    yield make
    has_disks = any(unit.has_tiers for unit in units)
    while units:
        units[-1].close()
        units.pop().manager.check_integrity()
    assert processes_of(tmp_path / "plugins") == set()
    after = Held()
    # fewer threads are allowed, because a thread of an earlier test may have ended since
    assert after.threads <= before.threads
    # Units without disks hold exactly the resources as before. With disks, the native core's lane keeps a descriptor
    # until the last reference to the unit is gone, which happens only after this check.
    assert has_disks or after == before


@pytest.fixture
def unit(build: Build, tmp_path: Path) -> LiveUnit:
    """A unit with a plugin and a disk tier. The first pages of PROMPT are in host memory and on the disk."""
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    (tmp_path / "disk").mkdir()
    made = build(disk__folders=str(tmp_path / "disk"), disk__bytes_per_folder="16MiB")
    store_prompt(made)
    return made


@pytest.fixture
def ask(unit: LiveUnit) -> Iterator[Asking]:
    asking = Asking(unit)
    yield asking
    asking.close()
