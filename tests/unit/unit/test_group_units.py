"""Units with several KV groups: all groups use the same host slots, and the same slabs on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.plan import disk_traffic
from flexkv.cache.tiers.plan import UnitFacts
from flexkv.config import load_config
from flexkv.errors import GeometryError
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.ranks import GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.unit.base import CacheRole
from flexkv.unit.build import build_unit
from flexkv.unit.capacity import PromptLimit, TierCapacity
from flexkv.unit.live_unit import LiveUnit

OWNER = UnitOwner("a model", b"n" * 32, "unit0")
GROUPS = (KvGroup(4, signature=b"full"), KvGroup(4, Rule.WINDOW, 2, b"window"))
STRIPES = (8192, 4096)
"""Bytes of a stripe in each KV group. The stripe of the window group is smaller, because that group has half as many
layers as the full group."""
DEADLINE_S = 30.0
Build = Callable[..., LiveUnit]


def facts(rank: int = 0) -> RankFacts:
    groups = [GroupFacts(size, np.array([[0, size, 0]], np.int64), f"format {size}") for size in STRIPES]
    return RankFacts(rank, 0, 8, tuple(groups))


def keys(group: int) -> Keys:
    return np.random.default_rng(group).integers(0, 256, (3, 16), dtype=np.uint8)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    units: list[LiveUnit] = []

    def make(**settings: object) -> LiveUnit:
        small = {
            "host.bytes": 1 << 20,
            "host.huge_pages": "off",
            "disk.folders": str(tmp_path / "disk"),
            "disk.bytes_per_folder": "1MiB",
        }
        config = load_config(small | {key.replace("__", "."): value for key, value in settings.items()}, {})
        unit = build_unit(config, GROUPS, {0: facts()}, OWNER, CacheRole(recomputes=True))
        units.append(unit)
        unit.grow()
        return unit

    yield make
    for unit in units:
        unit.close()
        unit.manager.check_integrity()


def store(unit: LiveUnit, group: int) -> None:
    plan = unit.manager.begin_store("store", group, keys(group), np.arange(3, dtype=np.int32), 0)
    assert plan.graph is not None
    (op,) = plan.graph.ops
    unit.manager.complete(0, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32), ""))


def test_a_slot_holds_a_page_of_any_group(build: Build) -> None:
    unit = build()
    assert unit.pool.slot_bytes >= STRIPES[0]
    assert [len(places) for places in unit.places] == [2]
    for group in range(2):
        store(unit, group)
    index = unit.manager.hub.index
    slots = [slot for group in range(2) for slot in index.slots_of(index.find(group, keys(group))).tolist()]
    assert len(set(slots)) == 6
    assert unit.manager.free_slots(0) == unit.manager.free_slots(1) == unit.slots - 6


def test_pages_of_all_groups_on_disk_outlive_the_unit(build: Build) -> None:
    unit = build()
    for group in range(2):
        store(unit, group)
    ends_s = time.monotonic() + DEADLINE_S
    while unit.busy:
        assert time.monotonic() < ends_s, "the pages were not written"
        unit.poll()
    assert unit.close()
    again = build()
    for group in range(2):
        assert again.manager.present(group, keys(group)).all()
        assert not again.manager.present(group, keys(1 - group)).any()
    assert again.manager.match("request", [keys(0), keys(1)], 0).reads > 0
    again.manager.check_integrity()


def test_ranks_with_other_groups_than_the_scheduler_are_refused() -> None:
    one = replace(facts(), groups=facts().groups[:1])
    with pytest.raises(GeometryError, match="rank 0 has a pool of 1 KV groups; the engine's scheduler has 2"):
        build_unit(load_config({"host.bytes": 1 << 20}, {}), GROUPS, {0: one}, OWNER)


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1]], ids=["two", "one"])
def test_what_is_for_one_group_is_off_for_several(
    groups: tuple[KvGroup, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"disk.folders": str(tmp_path), "disk.stream": True, "disk.gds": "on", "disk.gds_stores": True}
    traffic = disk_traffic(UnitFacts(load_config(asked, {}), groups, (facts(),), OWNER, recomputes=True))
    one = len(groups) == 1
    assert (traffic.gds_loads is GdsUse.ALWAYS) is one
    assert traffic.gds_stores is one
    assert traffic.facts.streams is one
    told = [record.message for record in caplog.records if "one KV group" in record.message]
    assert len(told) == (0 if one else 3)


def test_the_log_counts_pages_of_all_groups() -> None:
    limit = PromptLimit(400, "max_model_len")
    groups = (*GROUPS, KvGroup(8), KvGroup(4, Rule.CHUNK, 30), KvGroup(4, Rule.STATE))
    tier = TierCapacity("host tier", 200, groups, 4096, "host.bytes")
    assert tier.pages_of(400) == 100 + 2 + 50 + 8 + 1
    assert "200 pages of 5 KV groups" in tier.words(limit)
    assert "1.2 prompts" in tier.words(limit)
    assert tier.shortage(limit) == ""
    short = replace(tier, blocks=160)
    assert "holds 160 pages, less than one prompt" in short.shortage(limit)
    assert f"host.bytes to {161 * 4096} " in short.shortage(limit)


def test_of_windows_alone_a_prompt_takes_one_window() -> None:
    limit = PromptLimit(32_768, "max_model_len")
    tier = TierCapacity("host tier", 512, (KvGroup(16, Rule.WINDOW, 256, b"window"),), 4096, "host.bytes")
    assert tier.pages_of(limit.tokens) == 256
    assert "8192 tokens (512 blocks of 16 tokens, 2.0 MiB), 2.0 prompts" in tier.words(limit)
    assert tier.shortage(limit) == ""
    assert "holds 200 pages, less than one prompt" in replace(tier, blocks=200).shortage(limit)
