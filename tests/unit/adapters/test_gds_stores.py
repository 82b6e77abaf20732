"""Tests stores to real slabs that bypass host memory (GDS), with the scheduler's and the worker's side of the
connector. The engine's pool is plain memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.simulation.world import DISK
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.graph import OpKind
from tests.unit.adapters.disk_engines import PROMPT, Make, in_turn, stop_disks
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request
from tests.unit.cache.disk_world import disk_tier


@pytest.fixture
def make_gds(make_engine: Make, tmp_path: Path) -> Make:
    """Returns a function that makes engines with GDS stores to the test's folder. Each call first closes the engine
    that the previous call made.
    """
    return in_turn(make_engine, tmp_path, **{"disk.gds": "on", "disk.gds_stores": True})


def gds_pages(engine: MiniEngine, direction: str) -> float:
    return engine.counters.data.get("flexkv_disk_gds_pages_total", {}).get(direction, 0)


def sealed_apart(engine: MiniEngine) -> bool:
    volumes = disk_tier(engine.unit.manager).volumes
    assert isinstance(volumes, StripedSlabs)
    return volumes._options.sealed_apart


def on_disk(engine: MiniEngine) -> int:
    return len(disk_tier(engine.unit.manager))


def found_on_disk(engine: MiniEngine) -> int:
    """Returns how many of PROMPT's blocks a lookup would find on disk."""
    return len(disk_tier(engine.unit.manager).leading(0, engine.keys_of(make_request(PROMPT, "x"))))


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("ranks", "remote"), [(1, False), (1, True), (2, True), (2, False)])
def test_every_rank_stores_its_own_stripe(
    make_gds: Make, ranks: int, remote: bool, latent: bool, staged: bool
) -> None:
    settings = {"ranks": ranks, "remote": remote, "latent": latent, "gds.use_staged_transfer": staged}
    engine = make_gds(**settings)
    engine.run(make_request(PROMPT, "one"))
    assert gds_pages(engine, "write") == 5
    assert engine.unit.manager.cached_blocks() == 0, "nothing is in host memory"
    engine.unit.manager.check_integrity()
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    # The next engine also finds these pages. So does an engine that reads through host memory.
    engine = make_gds(**settings)
    assert engine.run(make_request(PROMPT, "three")) == 20
    assert gds_pages(engine, "read") == 5
    engine = make_gds(**settings, **{"disk.gds_stores": False, "disk.gds": "off"})
    assert engine.run(make_request(PROMPT, "four")) == 20
    assert engine.counters.data["flexkv_disk_pages_total"]["read"] == 5
    assert engine.invalid == set()


def test_a_page_is_there_when_it_is_sealed_and_not_before(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_gds()
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    stop_disks(engine, monkeypatch)
    engine.until(lambda: engine.unit.manager.inflight_ops() == 0)
    assert on_disk(engine) == 5, "its places are taken"
    assert found_on_disk(engine) == 0
    monkeypatch.undo()
    engine.drain()
    assert found_on_disk(engine) == 5


def test_a_seal_that_the_lane_does_not_take_leaves_nothing(
    make_gds: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_gds()
    monkeypatch.setattr(engine.unit.driver._planes[DISK], "submit", lambda graph: None)
    engine.run(make_request(PROMPT, "one"))
    assert on_disk(engine) == 0
    engine.unit.manager.check_integrity()
    monkeypatch.undo()
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 0
    assert on_disk(engine) == 5


def test_new_weights_between_stripes_and_seal(make_gds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_gds()
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    stop_disks(engine, monkeypatch)
    engine.until(lambda: engine.unit.manager.inflight_ops() == 0)
    engine.side.reset()
    monkeypatch.undo()
    engine.finish("one")
    engine.drain()
    engine.unit.manager.check_integrity()
    engine.forget()
    assert found_on_disk(engine) == 0


def test_a_store_that_was_barred_is_not_sealed(make_gds: Make) -> None:
    engine = make_gds()
    tell = engine.hold_reports()
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert engine.unit.manager.discard_from("one", 2 * BLOCK_TOKENS) == 3
    tell()
    engine.finish("one")
    engine.drain()
    engine.unit.manager.check_integrity()
    assert on_disk(engine) == 2


def test_pages_of_a_slab_that_was_cut_off_are_computed_and_stored_again(make_gds: Make) -> None:
    """Pages of a truncated slab are computed and stored again. A failed read on a rank counts as a failure of the
    source, so the manager's lane reads the pages next, and fails too. The new stores extend the file, and their bytes
    are correct.
    """
    engine = make_gds()
    engine.run(make_request(PROMPT, "one"))
    (row,) = engine.unit.slabs.disks[0]
    with open(row.path, "r+b") as slab:
        slab.truncate(row.header_bytes)
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20, "promised; what came of it was checked"
    assert len(engine.invalid) == 5
    assert gds_pages(engine, "read") == 0
    engine.invalid.clear()
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 0, "the manager's lane could not read them either"
    assert gds_pages(engine, "write") == 10
    engine.forget()
    assert engine.run(make_request(PROMPT, "four")) == 20
    assert engine.invalid == set()


def test_an_engine_that_cannot_recompute_stores_in_host_memory(make_gds: Make) -> None:
    engine = make_gds(role=EngineRole())
    engine.run(make_request(PROMPT, "one"))
    assert engine.unit.manager.cached_blocks() == 5
    assert gds_pages(engine, "write") == 0
    assert not sealed_apart(engine), "free slots are cleared ahead, as ever"
    assert sealed_apart(make_gds())


def test_only_gds_writes_are_ordered(make_gds: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_gds()
    kinds: list[OpKind] = []
    submit = engine.workers[0]._ops.engine.submit

    def noted(graph, **options):  # type: ignore[no-untyped-def]
        kinds.extend(op.kind for op in graph.ops)
        return submit(graph, **options)

    monkeypatch.setattr(engine.workers[0]._ops.engine, "submit", noted)
    engine.run(make_request(PROMPT, "one"))
    assert set(kinds) == {OpKind.GDS_WRITE}
