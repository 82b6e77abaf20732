"""With streaming, flexkv promises blocks while it still reads them from disk. The tests use the scheduler's and the
worker's side of the connector, with real slabs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.simulation.world import DISK
from tests.unit.adapters.disk_engines import PROMPT, Make, fails_and_is_computed, in_turn, spoil, stop_disks
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.cache.disk_world import disk_tier

MODES = ("async", "sync", "layerwise")


@pytest.fixture
def make_streaming(make_engine: Make, tmp_path: Path) -> Make:
    """Returns a function that makes engines that stream from the test's folder. Each call first closes the engine that
    the previous call made.
    """
    return in_turn(make_engine, tmp_path, **{"disk.stream": True})


def streamed(engine: MiniEngine) -> float:
    return engine.counters.data["flexkv_disk_streamed_pages_total"].get("", 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("ranks", "remote"), [(1, False), (1, True), (2, True), (2, False)])
def test_every_rank_loads_what_comes_up(
    make_streaming: Make, ranks: int, remote: bool, verify: bool, mode: str
) -> None:
    settings = {"ranks": ranks, "remote": remote, "host.verify": verify, "load.mode": mode}
    make_streaming(**settings).run(make_request(PROMPT, "one"))
    engine = make_streaming(**settings)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert streamed(engine) == 5
    assert "flexkv_disk_lookups_total" not in engine.counters.data, "nobody waited for a lookup"
    assert engine.invalid == set()


def test_the_promise_is_made_before_the_disk_is_asked(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    engine = make_streaming()
    stop_disks(engine, monkeypatch)
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 20
    for _ in range(5):
        engine.step({})
    assert engine.live["two"].waiting_for_load, "its pages are not up"
    monkeypatch.undo()
    engine.end_load("two")
    engine.check("two")


@pytest.mark.parametrize("settings", [{"role": EngineRole()}, {"disk.stream": False}])
def test_who_cannot_compute_what_is_missing_waits(make_streaming: Make, settings: dict[str, object]) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    engine = make_streaming(**settings)
    assert engine.side.match(make_request(PROMPT, "two"), 0) == (None, False)


@pytest.mark.parametrize("mode", MODES)
def test_damaged_pages_are_named_and_computed(make_streaming: Make, tmp_path: Path, mode: str) -> None:
    engine = make_streaming()
    engine.run(make_request(PROMPT, "one"))
    engine.close()
    spoil(tmp_path)
    engine = make_streaming(**{"load.mode": mode})
    assert engine.add(make_request(PROMPT, "two")) == 20, "promised before anything was read"
    engine.end_load("two")
    if mode != "async":
        engine.step()
    assert len(engine.invalid) == 5
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    assert engine.counters.data["flexkv_disk_failed_pages_total"]["read"] == 5
    engine.forget()
    # The pages that the engine computed again were stored again.
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert len(engine.invalid) == 5


def test_a_request_that_ends_while_its_pages_come_up(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    engine = make_streaming()
    stop_disks(engine, monkeypatch)
    engine.add(make_request(PROMPT, "two"))
    engine.step({})
    blocks = engine.finish("two")
    engine.until(lambda: engine.unit.manager.inflight_ops() == 0)
    engine.pool.free_blocks(reversed(blocks))
    monkeypatch.undo()
    engine.drain()
    engine.unit.manager.check_integrity()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_takes_too_long_is_computed(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    engine = make_streaming(**{"load.deadline_s": 0.05, "load.mode": mode})
    stop_disks(engine, monkeypatch)
    assert engine.add(make_request(PROMPT, "two")) == 20
    engine.end_load("two")
    if mode != "async":
        engine.step()
    assert len(engine.invalid) == 5
    engine.step()
    engine.check("two")
    monkeypatch.undo()
    engine.finish("two")
    engine.drain()
    assert len(disk_tier(engine.unit.manager)) == 5, "nothing is wrong with the pages"


def test_a_read_that_the_lane_does_not_take_fails_its_load_at_once(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    # The load's deadline is an hour, so only the rejected read can end the load in this test.
    engine = make_streaming(**{"load.deadline_s": 3600})
    driver = engine.unit.driver
    monkeypatch.setattr(driver._planes[DISK], "submit", lambda graph: None)
    assert engine.add(make_request(PROMPT, "two")) == 20
    fails_and_is_computed(engine, "two", 5)


def test_new_weights_while_pages_come_up(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_streaming().run(make_request(PROMPT, "one"))
    engine = make_streaming()
    stop_disks(engine, monkeypatch)
    engine.add(make_request(PROMPT, "two"))
    engine.step({})
    assert not engine.side.reset(), "a load is in flight"
    monkeypatch.undo()
    fails_and_is_computed(engine, "two", 5)
    engine.finish("two")
    engine.drain()
    engine.forget()


def test_pages_of_another_units_folder_are_streamed_too(make_streaming: Make, tmp_path: Path) -> None:
    """With the common key scheme, flexkv also streams pages that it finds in another unit's folder. If such a page is
    damaged, flexkv reports its block as failed, and the engine computes the block.
    """
    common = {"keys.scheme": "common", "host.verify": True}
    make_streaming(**common).run(make_request(PROMPT, "one"))
    make_streaming(**common, **{"disk.folders": str(tmp_path / "elsewhere")})
    (folder,) = {slab.parent for slab in tmp_path.glob("*/*/*.slab")}
    folder.rename(folder.with_name("other"))
    engine = make_streaming(**common)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert streamed(engine) == 5
    assert engine.invalid == set()
    engine.close()
    (slab,) = (folder.with_name("other")).glob("*.slab")
    content = bytearray(slab.read_bytes())
    content[4096 + 8 :: 4096] = bytes(byte ^ 1 for byte in content[4096 + 8 :: 4096])
    slab.write_bytes(content)
    for own in tmp_path.glob("*/unit0"):
        shutil.rmtree(own)
    engine = make_streaming(**common)
    engine.add(make_request(PROMPT, "three"))
    engine.end_load("three")
    assert engine.invalid
