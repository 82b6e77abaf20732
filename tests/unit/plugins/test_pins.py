"""Plugins can pin pages. The tests cover how many pages can be pinned, for how long, and what ends a pin."""

from __future__ import annotations

import time

import numpy as np
import pytest

from flexkv.cache.base import HUB
from flexkv.errors import PluginCallError
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.plugin_calls import PluginCalls
from tests.unit.plugins.plugin_units import (
    BLOCK_TOKENS,
    KEYS,
    PROMPT,
    STORED,
    Asking,
    drive,
)


def evicts_all(unit: LiveUnit) -> int:
    """Evicts all pages from host memory that can be evicted. Returns how many pages of PROMPT remain there."""
    unit.manager.hub.evict(0, 10_000)
    unit.manager.check_integrity()
    return int(np.count_nonzero(unit.manager.tiers[HUB].present(0, KEYS)))


def test_a_pinned_prompt_stays_in_host_memory_until_it_is_unpinned(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT[: 3 * BLOCK_TOKENS], 600) == 3
    assert unit.status()["pinned_pages"] == 3
    assert evicts_all(unit) == 3
    assert unit.manager.match("a request", [KEYS[:3]], 0).blocks == 3
    unit.manager.release("a request")
    assert ask("unpin") == 3
    assert evicts_all(unit) == 0, "the control: nothing keeps them any more"


def test_a_pin_ends_with_its_time(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT, 0.01) == STORED
    drive(unit, lambda: not unit.manager.kept_pages)
    assert evicts_all(unit) == 0


def test_a_pin_ends_with_its_plugin(unit: LiveUnit, ask: Asking) -> None:
    other = Asking(unit)
    assert other("pin", PROMPT, 600) == STORED
    assert ask("pin", PROMPT[:BLOCK_TOKENS], 600) == 1
    other.close()
    drive(unit, lambda: unit.manager.kept_pages == 1)
    assert evicts_all(unit) == 1, "the other plugin's pin goes on"


def test_control_a_pin_that_outlives_its_plugin_is_seen(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PluginCalls, "_end_pins", lambda self, ends: None)
    other = Asking(unit)
    other("pin", PROMPT, 600)
    other.close()
    ask("lookup", PROMPT)
    assert evicts_all(unit) == STORED
    monkeypatch.undo()


def test_pins_keep_a_share_of_host_memory_at_most(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = unit.manager.hub.index.up_slots(0)
    monkeypatch.setattr("flexkv.unit.plugin_calls.PIN_SHARE", slots // 3)
    assert ask("pin", PROMPT, 600) == 3
    assert ask("pin", PROMPT, 600) == 0
    assert unit.manager.kept_pages == 3
    monkeypatch.setattr("flexkv.unit.plugin_calls.MOST_PINS", 1)
    with pytest.raises(PluginCallError, match="1 pins are held already"):
        ask("pin", PROMPT, 600)


def test_a_reset_ends_pins(unit: LiveUnit, ask: Asking) -> None:
    ask("pin", PROMPT, 600)
    unit.manager.reset()
    unit.manager.check_integrity()
    assert unit.manager.kept_pages == 0
    assert ask("unpin") == 0


def test_a_pin_does_not_prolong_a_time_to_live(
    unit: LiveUnit, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("forget", PROMPT) == STORED
    plan = unit.manager.begin_store("store", 0, KEYS[:2], np.arange(2, dtype=np.int32), 0, ttl_s=60)
    assert plan.graph is not None
    unit.manager.complete(0, OpResult(plan.graph.ops[0].op_id, OpStatus.OK, np.empty(0, np.int32), ""))
    assert ask("pin", PROMPT, 600) == 2
    monkeypatch.setattr(unit.manager.tables, "unix_s", lambda: time.time() + 60)
    unit.manager.expire()
    assert not unit.manager.tiers[HUB].present(0, KEYS).any()
    ask("unpin")
    assert unit.manager.free_slots(0) == unit.manager.hub.index.up_slots(0)


def test_a_plan_that_breaks_off_leaves_pins(unit: LiveUnit, ask: Asking) -> None:
    assert ask("pin", PROMPT, 600) == STORED
    with pytest.raises(MemoryError), unit.manager._broken_plans:
        raise MemoryError
    assert evicts_all(unit) == STORED
