"""A real SGLang engine with flexkv as its external linker. Every answer equals that of an engine without flexkv."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.sglang_process import PAGE_TOKENS
from tests.engines_sglang.asked import seen_to_be_damaged, whole
from tests.engines_sglang.conftest import PROMPTS, Judge, starting_by
from tests.engines_sglang.metrics_page import all_series, grown, series, settled
from tests.engines_sglang.spied import Spied, wait_until_durable
from tests.unit.plugins.asking_plugin import ASKS, TELLS
from tests.unit.plugins.plugin_folders import plugin, processes_of, wait_for

UNIT = "dp0.pp0of1.tp0of1"
"""Name of the unit of the engine's only rank."""


@pytest.fixture(scope="module")
def spied(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    folder = tmp_path_factory.mktemp("linker") / "first"
    plugins = folder.parent / "plugins"
    plugin(plugins, "scheduler_asks.py", ASKS)
    plugin(plugins, "worker_0_tells.py", TELLS)
    (plugins / "prompt.json").write_text(json.dumps(PROMPTS["a"]))
    spied = Spied(model, folder, disk, arguments={"enable_metrics": True}, plugins__folder=str(plugins))
    yield spied
    spied.engine.close()
    assert processes_of(plugins) == set(), "no plugin outlives the engine"


def test_a_cold_prompt_is_computed_and_stored(spied: Spied, judge: Judge) -> None:
    answer = spied.ask_one("a")
    judge("a", answer)
    assert answer["cached"] == 0
    spied.settle()
    assert all(note["stored"] for note in spied.notes("stored"))


def test_plugins_ask_for_what_it_stored(spied: Spied) -> None:
    plugins = spied.folder.parent / "plugins"
    wait_for(lambda: (plugins / "asked.json").exists(), "the plugin has found the prompt")
    asked, pages = json.loads((plugins / "asked.json").read_text()), whole("a") // PAGE_TOKENS
    assert (asked["state"], asked["pages"], asked["cached"]) == ("usable", pages, pages)
    assert asked["pinned"] == asked["unpinned"] > 0
    assert json.loads((plugins / "told.json").read_text()) == ["worker", "0"]


def test_after_a_flush_it_is_loaded_to_other_pages(spied: Spied, judge: Judge) -> None:
    spied.loads_to_other_pages(judge)


def test_the_engines_metrics_page_has_what_was_loaded(spied: Spied) -> None:
    spied.ask("a")
    spied.forget()
    before = settled(spied.engine)
    assert set(before) == all_series(UNIT)
    served = spied.served(spied.ask_one("a"))
    assert served == whole("a")
    more = grown(spied.engine, before, series("flexkv_transfer_seconds_count", direction="load", unit=UNIT))
    assert more[series("flexkv_hit_tokens_total", unit=UNIT)] == served
    assert more[series("flexkv_moved_pages_total", direction="load", unit=UNIT)] == served // PAGE_TOKENS
    failed = {name: value for name, value in more.items() if "failed" in name[0] and value}
    assert not failed


def test_after_eviction_by_pressure_it_is_loaded(spied: Spied, judge: Judge) -> None:
    spied.serves_what_was_evicted(judge)


def test_another_tenant_is_not_served(spied: Spied, judge: Judge) -> None:
    spied.keeps_tenants_apart(judge)


def test_requests_that_share_a_prefix_load_it_at_once(spied: Spied, judge: Judge) -> None:
    spied.serves_a_shared_prefix_at_once(judge)


def test_an_aborted_request_harms_nobody(spied: Spied, judge: Judge) -> None:
    spied.outlives_an_abort(judge)


def test_schedulers_killed_in_a_load_and_in_a_store_leave_a_folder_that_serves(
    spied: Spied, model: Path, disk: Path, judge: Judge
) -> None:
    """If schedulers are killed during a load and during a store, their folder still serves its pages. Each engine takes
    over the folder of the engine that was killed before it. This is one test because engines start slowly.
    """
    spied.ask("a")
    spied.settle()
    wait_until_durable(disk)
    spied.forget()
    spied.order("die-0", "load")
    with pytest.raises(RuntimeError, match="ended"):
        spied.ask("a", "b")
    # The next engine can lock the folder, and the durable pages are still there.
    with starting_by("fork"):
        again = Spied(model, spied.folder.parent / "second", disk)
    with again.engine:
        assert again.notes("start")[0]["cached"] == 0, "host memory is empty at the start"
        answer = again.ask_one("a")
        judge("a", answer)
        assert answer["host"] == whole("a"), "served from disk"
        assert again.notes("lookup")[0]["prefetched"] == whole("a") // PAGE_TOKENS, "read while it was queued"
        again.order("corrupt-0")
        again.forget()
        assert again.notes("corrupt")[-1]["slots"] > 0
        seen_to_be_damaged(judge, "a", again.ask_one("a"))
        again.order("die-0", "offload")
        with pytest.raises(RuntimeError, match="ended"):
            again.ask("late")
    with starting_by("fork"):
        third = Spied(model, spied.folder.parent / "third", disk)
    with third.engine:
        third.order("no-prefetch-0")
        answer = third.ask_one("a")
        judge("a", answer)
        assert answer["host"] == whole("a")
        assert third.notes("lookup")[0]["prefetched"] == 0, (
            "the control: without the hook reads begin with the lookup"
        )
        judge("late", third.ask_one("late"))
        # After an update of the weights, even to equal weights, no earlier page may be a hit.
        assert third.engine.call("update_weights", path=str(model))
        recomputed = third.ask_one("a")
        judge("a", recomputed)
        assert recomputed["cached"] == 0
    assert not [entry.name for entry in Path("/dev/shm").iterdir() if "flexkv" in entry.name]
