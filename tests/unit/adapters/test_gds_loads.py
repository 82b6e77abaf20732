"""Tests loads from real slabs that bypass host memory (GDS), with the scheduler's and the worker's side of the
connector. The engine's pool is plain memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.adapters.common.rank_lanes import open_gds_lane
from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.slab_map import SlabMap
from tests.unit.adapters.disk_engines import PROMPT, Make, fails_and_is_computed, in_turn, spoil
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.cache.disk_world import disk_tier


@pytest.fixture
def make_gds(make_engine: Make, tmp_path: Path) -> Make:
    """Returns a function that makes engines with GDS loads from the test's folder. Each call first closes the engine
    that the previous call made.
    """
    return in_turn(make_engine, tmp_path, **{"disk.gds": "on"})


def gds_pages(engine: MiniEngine) -> float:
    return engine.counters.data.get("flexkv_disk_gds_pages_total", {}).get("read", 0)


def read(engine: MiniEngine) -> float:
    return engine.counters.data.get("flexkv_disk_pages_total", {}).get("read", 0)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("ranks", "remote"), [(1, False), (1, True), (2, True), (2, False)])
def test_every_rank_loads_its_own_stripe(
    make_gds: Make, ranks: int, remote: bool, latent: bool, staged: bool
) -> None:
    settings = {"ranks": ranks, "remote": remote, "latent": latent, "gds.use_staged_transfer": staged}
    make_gds(**settings).run(make_request(PROMPT, "one"))
    engine = make_gds(**settings)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert gds_pages(engine) == 5
    assert read(engine) == 0, "nothing came up to host memory"
    assert "flexkv_disk_lookups_total" not in engine.counters.data, "nobody waited for a lookup"
    assert engine.invalid == set()


def test_host_pages_first_then_those_on_disk(make_gds: Make) -> None:
    """One load brings the first pages of the prefix from host memory, and the following pages from disk."""
    engine = make_gds()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    manager = engine.unit.manager
    keys = engine.keys_of(make_request(PROMPT, "two"))
    manager.hub.evict(0, 1000)
    manager.check_integrity()
    short = make_request(PROMPT[:9], "short")
    assert engine.run(short) == 8
    engine.forget()
    assert manager.hub.index.match_prefix(0, keys).size == 2, (
        "the load's blocks were stored in host memory again"
    )
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert gds_pages(engine) == 2 + 3
    assert engine.invalid == set()


def test_fewer_staging_slots_than_blocks(make_gds: Make) -> None:
    settings = {"gds.max_staging_blocks": 2}
    make_gds(**settings).run(make_request(PROMPT, "one"))
    engine = make_gds(**settings)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert gds_pages(engine) == 5


@pytest.mark.parametrize(
    "settings",
    [{"role": EngineRole()}, {"disk.gds": "off"}],
)
def test_who_cannot_compute_what_is_missing_waits(
    make_gds: Make, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    caplog.clear()
    engine = make_gds(**settings)
    assert engine.side.match(make_request(PROMPT, "two"), 0) == (None, False)
    assert ("or disk.gds_may_fail_requests" in caplog.text) == ("role" in settings)


def test_who_fails_requests_instead_may_ask_for_it(make_gds: Make) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    engine = make_gds(role=EngineRole(), **{"disk.gds_may_fail_requests": True})
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert gds_pages(engine) == 5
    assert engine.invalid == set()


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_loads_inside_the_step(make_gds: Make, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    engine = make_gds(**{"load.mode": mode})
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert "flexkv_disk_lookups_total" not in engine.counters.data, "nobody waited for a lookup"
    assert gds_pages(engine) == 5
    assert engine.invalid == set()
    # With `disk.gds` set to "auto", GDS is off in this load mode, because a step would wait for a disk.
    monkeypatch.setattr("flexkv.adapters.vllm.worker.WorkerSide._has_gpudirect", lambda self: True)
    assert make_gds(**{"load.mode": mode, "disk.gds": "auto"}).unit.slabs is None


@pytest.mark.parametrize("damaged", [False, True])
def test_by_layer_host_pages_and_those_on_disk_in_one_load(
    make_gds: Make, tmp_path: Path, damaged: bool
) -> None:
    """In a layerwise load, the forward pass waits at each layer for the pages from host memory and for those from
    disk.
    """
    layerwise = {"load.mode": "layerwise"}
    engine = make_gds(**layerwise)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    engine = make_gds(**layerwise)
    assert engine.run(make_request(PROMPT[:9], "short")) == 8
    engine.forget()
    if damaged:
        spoil(tmp_path)
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert gds_pages(engine) == 2 + (0 if damaged else 3)
    assert len(engine.invalid) == (3 if damaged else 0), "named within the step, and computed again"


def test_without_gpudirect_auto_goes_through_host_memory(make_gds: Make) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    engine = make_gds(**{"disk.gds": "auto"})
    assert engine.unit.slabs is None
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert (gds_pages(engine), read(engine)) == (0, 5)


def test_where_every_rank_has_gpudirect_auto_measures_both_ways(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.adapters.vllm.worker.WorkerSide._has_gpudirect", lambda self: self.rank < 2)
    make_gds(ranks=2).run(make_request(PROMPT, "one"))
    engine = make_gds(**{"disk.gds": "auto", "ranks": 2})
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert gds_pages(engine) == 5
    monkeypatch.setattr("flexkv.adapters.vllm.worker.WorkerSide._has_gpudirect", lambda self: self.rank < 1)
    assert make_gds(**{"disk.gds": "auto", "ranks": 2}).unit.slabs is None


def refuse_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Makes one rank fail when it opens the slabs."""

    def open_or_refuse(slabs: SlabMap, stripe: int, *args: object, **kwargs: object) -> c_ext.GdsLane:
        if stripe == rank:
            raise ConfigError("cannot open '/a/slab': Permission denied")
        return make_gds_lane(slabs, stripe, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("flexkv.adapters.common.rank_lanes.make_gds_lane", open_or_refuse)


@pytest.mark.parametrize("remote", [False, True])
def test_with_auto_a_rank_that_cannot_open_the_slabs_sends_all_loads_through_host_memory(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, remote: bool
) -> None:
    monkeypatch.setattr("flexkv.adapters.vllm.worker.WorkerSide._has_gpudirect", lambda self: True)
    settings = {"ranks": 2, "remote": remote}
    make_gds(**settings).run(make_request(PROMPT, "one"))
    refuse_rank(monkeypatch, 1)
    caplog.clear()
    engine = make_gds(**settings, **{"disk.gds": "auto"})
    # The first load may be planned before the ranks have reported. In that case the engine computes the load's blocks,
    # and no page is dropped.
    engine.run(make_request(PROMPT, "two"))
    assert gds_pages(engine) == 0
    assert disk_tier(engine.unit.manager).counts.failed_reads == 0
    said = [r.getMessage() for r in caplog.records if "disk.gds=auto" in r.getMessage()]
    assert len(said) == 1
    assert "rank 1" in said[0]
    assert "Permission denied" in said[0]
    engine = make_gds(**settings, **{"disk.gds": "auto"})
    engine.run(make_request([99] * 4, "other"))
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert (gds_pages(engine), read(engine)) == (0, 5)
    assert engine.invalid == set()


def test_with_on_a_rank_that_cannot_open_the_slabs_is_an_error(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_rank(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"disk.gds=on: cannot open '/a/slab'.*allowed here are 'auto'"):
        make_gds()
    engine = make_gds(remote=True)
    engine.run(make_request(PROMPT, "one"))
    assert not engine.unit.usable


def test_staging_that_cannot_be_had_is_an_error_at_the_start(make_gds: Make) -> None:
    short = {"gds.max_staging_bytes": 4096}
    with pytest.raises(
        ConfigError, match=r"disk.gds=on: one block needs \d+ bytes of staging.* raise gds.max_st"
    ):
        make_gds(**short)


def test_damaged_pages_are_named_and_computed(make_gds: Make, tmp_path: Path) -> None:
    engine = make_gds()
    engine.run(make_request(PROMPT, "one"))
    engine.close()
    spoil(tmp_path)
    engine = make_gds()
    assert engine.run(make_request(PROMPT, "two")) == 20, "promised; what came of it was checked"
    assert len(engine.invalid) == 5
    assert gds_pages(engine) == 0
    assert engine.counters.data["flexkv_disk_failed_pages_total"]["read"] == 5
    engine.forget()
    # The pages that the engine computed again were stored again, also on disk.
    engine = make_gds()
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert gds_pages(engine) == 5


def test_a_slab_that_ends_early_costs_its_last_pages(make_gds: Make, tmp_path: Path) -> None:
    engine = make_gds()
    engine.run(make_request(PROMPT, "one"))
    (row,) = engine.unit.slabs.disks[0]
    engine = make_gds()
    assert engine.add(make_request(PROMPT, "two")) == 20
    # The slab is truncated after the start, because a start replaces a slab that is too short.
    os.truncate(row.path, row.header_bytes + 2 * row.slot_bytes)
    engine.end_load("two")
    assert 0 < len(engine.invalid) <= 3
    engine.step()
    engine.check("two")


def test_a_place_that_holds_another_page_by_now_is_a_miss(make_gds: Make) -> None:
    engine = make_gds()
    engine.run(make_request(PROMPT, "one"))
    engine = make_gds()
    index = disk_tier(engine.unit.manager)
    index._tags[0]["generation"] += 1
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert len(engine.invalid) == 5
    assert gds_pages(engine) == 0


def test_a_request_that_ends_while_its_pages_are_loaded(make_gds: Make) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    engine = make_gds()
    engine.add(make_request(PROMPT, "two"))
    engine.step({})
    loading = engine.live["two"].waiting_for_load  # False if the load has ended within the step
    blocks = engine.finish("two")
    engine.until(lambda: engine.unit.manager.inflight_ops() == 0)
    if loading:
        engine.pool.free_blocks(reversed(blocks))
    engine.drain()
    engine.unit.manager.check_integrity()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_new_weights_while_a_load_waits_for_its_lane(make_gds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gds().run(make_request(PROMPT, "one"))
    engine = make_gds()
    monkeypatch.setattr(engine.workers[0]._ops.engine, "submit", lambda graph, after: None)
    engine.add(make_request(PROMPT, "two"))
    engine.step({})
    assert not engine.side.reset(), "a load is in flight"
    monkeypatch.undo()
    fails_and_is_computed(engine, "two", 5)
    engine.finish("two")
    engine.drain()
    engine.forget()
    assert gds_pages(engine) == 0


def test_a_slab_that_a_rank_cannot_open_is_said_at_start(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StripedSlabs.slab_map

    def elsewhere(self: StripedSlabs) -> SlabMap:
        slabs = real(self)
        disks = tuple(tuple(row._replace(path="/nowhere/0.slab") for row in disk) for disk in slabs.disks)
        return SlabMap(slabs.groups, disks)

    monkeypatch.setattr(StripedSlabs, "slab_map", elsewhere)
    with pytest.raises(ConfigError, match=r"/nowhere/0\.slab"):
        make_gds()


@pytest.mark.parametrize("refusal", ["", "cuFile in compatibility mode (no GPUDirect Storage)"])
def test_with_auto_slabs_that_nothing_reaches_straight_are_left(
    monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """With `disk.gds` set to "auto", flexkv does not use slabs that the rank cannot read with direct I/O. A machine may
    seem to offer direct I/O that its disks do not support.
    """
    lane: Any = SimpleNamespace(direct_refusal=refusal, close=lambda: closed.append(True))
    closed: list[bool] = []
    monkeypatch.setattr("flexkv.adapters.common.rank_lanes.cuda_device_of", lambda tensors: 0)
    monkeypatch.setattr("flexkv.adapters.common.rank_lanes.make_gds_lane", lambda *_, **__: lane)
    opened = {
        mode: open_gds_lane(load_config({"disk.gds": mode}, {}), SlabMap((), ()), 0, [], [])
        for mode in ("auto", "on")
    }
    assert opened["on"] == (lane, "")
    assert opened["auto"] == ((None, refusal) if refusal else (lane, ""))
    assert len(closed) == bool(refusal)
