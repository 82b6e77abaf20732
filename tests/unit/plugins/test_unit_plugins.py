"""A unit that runs plugins holds only the expected resources, and none of them remains after the unit was closed. The
tests need no engine.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from flexkv.cache.base import HUB
from flexkv.errors import PluginCallError
from flexkv.plugins.client import CachedPages, connect
from flexkv.plugins.unit_socket import socket_name
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.plugin_calls import PluginCalls
from tests.unit.plugins.plugin_folders import DEADLINE_S, Held, Lines, plugin, processes_of, wait_for
from tests.unit.plugins.plugin_units import (
    KEYS,
    PAGES,
    PROMPT,
    STORED,
    Build,
    drive,
    store_prompt,
)


def test_pages_are_written_before_a_unit_waits_for_its_plugins(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that closes writes its pages before it waits for its plugins. An engine that ends may have only seconds
    left, and a plugin that ignores the request to end would use them up."""
    plugin(tmp_path / "plugins", "all_a")
    order: list[str] = []
    made = build()
    assert made.plugins is not None

    def noted(owner: Any, name: str, words: str) -> None:
        real = getattr(owner, name)

        def note(*arguments: Any) -> Any:
            order.append(words)
            return real(*arguments)

        monkeypatch.setattr(owner, name, note)

    noted(made.plugins, "begin_close", "begin_close")
    noted(made.driver, "close", "the tiers' close")
    noted(made.plugins, "close", "the plugins' close")
    made.close()
    assert order == ["begin_close", "the tiers' close", "the plugins' close"]


def test_a_unit_that_has_ended_is_named(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "all_sleeps")
    unit = build()
    plugins_end = connect(socket_name(unit.unit_id), DEADLINE_S)
    assert plugins_end.status()["state"] == "usable"
    unit.close()
    with pytest.raises(PluginCallError, match="status: "):
        plugins_end.status()
    with pytest.raises(PluginCallError, match="no unit listens at flexkv-unit-"):
        connect(socket_name(unit.unit_id))


def test_a_process_that_is_no_plugin_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXKV_PLUGIN_SOCKET", raising=False)
    with pytest.raises(PluginCallError, match="FLEXKV_PLUGIN_SOCKET is not set"):
        connect()


# --- plugins in processes of their own, and their calls to the unit ---

ASKS = """
from flexkv.plugins.client import connect
with connect(deadline_s=60) as unit:
    print("state", unit.status()["state"])
    print("lookup", unit.lookup(list(range(24))))
"""


def test_a_plugin_asks_its_unit(build: Build, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "scheduler_asks.py", ASKS)
    unit = build()
    drive(unit, lambda: log.count("ended with 0, and is not started again"))
    assert log.count("state usable") == 1
    assert log.count(f"lookup {[CachedPages(PAGES, 0, 0, 0)]}") == 1


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "scheduler_warm_cache.py"


@pytest.mark.parametrize("prompts", [1, 0], ids=["a prompt", "control: no prompt"])
def test_the_example_warms_the_cache(prompts: int, build: Build, log: Lines, tmp_path: Path) -> None:
    """The example plugin makes a unit read the pages of its prompts to host memory. After a restart, these pages are
    only on disk."""
    disk = {"disk__folders": str(tmp_path / "disk"), "disk__bytes_per_folder": "16MiB"}
    (tmp_path / "disk").mkdir()
    store_prompt(first := build(None, **disk))
    assert first.close()
    shutil.copy(EXAMPLE, plugin(tmp_path / "plugins", EXAMPLE.name))
    plugin(tmp_path / "plugins", "prompts.jsonl", f"{PROMPT}\n\n" * prompts)
    unit = build(**disk)
    drive(unit, lambda: log.count("ended with 0, and is not started again"))
    pages = STORED * prompts
    assert log.count(f"warmed {prompts} prompts: {pages} pages of them are in host memory") == 1
    assert int(unit.manager.tiers[HUB].present(0, KEYS).sum()) == pages


# --- resources that a unit holds ---


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_without_a_folder_nothing_is_started(build: Build) -> None:
    before = threads()
    unit = build(None)
    assert unit.plugins is None
    assert not {"flexkv-plugins", "flexkv-unit-api"} & (threads() - before)
    with pytest.raises(PluginCallError, match="no unit listens"):
        connect(socket_name(unit.unit_id))


def test_control_with_a_plugin_threads_are_started(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    before = threads()
    build()
    assert threads() - before >= {"flexkv-plugins", "flexkv-unit-api"}


@pytest.mark.parametrize("name", ["nowhere", "empty", "refused"])
def test_a_folder_without_plugins_starts_nothing_and_is_named(
    name: str, build: Build, log: Lines, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    plugin(tmp_path / "refused", "all_stranger", mode=0o4755)
    unit = build(tmp_path / name)
    assert unit.plugins is None
    assert unit.usable
    assert log.count(f"plugins.folder: {tmp_path / name} has no plugins that may run") == 1
    assert log.count("all_stranger is not run: it runs as another user") == (name == "refused")


def test_plugins_of_workers_alone_find_the_units_socket(build: Build, tmp_path: Path) -> None:
    plugin(tmp_path / "plugins", "worker_0_sleeps")
    unit = build()
    assert "flexkv-plugins" not in threads()
    with connect(socket_name(unit.unit_id), DEADLINE_S) as plugins_end:
        assert plugins_end.status()["state"] == "usable"


def test_a_socket_that_cannot_be_had_costs_the_calls_alone(
    build: Build, log: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", no_descriptor)
    plugin(tmp_path / "plugins", "all_tells", "#!/bin/sh\necho here\n")
    assert build().usable
    log.wait_for("all_tells: here")
    assert log.count("plugins run without the unit's socket: [Errno 24] Too many open files") == 1


def test_control_a_unit_that_forgets_its_plugins_is_seen(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path / "plugins", "scheduler_sleeps")
    before = Held()
    unit = build()
    plugins, unit.plugins = unit.plugins, None
    unit.close()
    assert plugins is not None
    assert Held() != before
    wait_for(lambda: processes_of(tmp_path / "plugins"), "they run on")
    plugins.close()
    assert Held() == before


def test_nothing_is_asked_where_no_call_waits(unit: LiveUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no call of a plugin waits, a step only looks at the clock."""
    assert unit.plugins is not None
    monkeypatch.setattr("flexkv.unit.plugin_calls.STATUS_EVERY_S", 1e9)
    monkeypatch.setattr(PluginCalls, "_attempt", None)
    monkeypatch.setattr(type(unit), "status", None)
    unit.plugins.calls.run()
