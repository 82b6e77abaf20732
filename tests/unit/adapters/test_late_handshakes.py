"""Tests handshakes that arrive with the first step's report or never, and resets that come before any handshake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.handshakes import HANDSHAKE_STEPS
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.errors import ContractError
from tests.unit.adapters.disk_engines import PROMPT, Make, in_turn
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

LATE: dict[str, Any] = {"early_handshake": False}


class Mute(WorkerSide):
    """A worker that never makes a handshake, like a worker of another engine."""

    def handshake(self) -> None:
        return None


class HalfMute(WorkerSide):
    """A worker that makes no handshake if it is the second of two ranks."""

    def handshake(self) -> Any:
        return None if self.rank == 1 else super().handshake()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def steps(engine: MiniEngine, count: int) -> None:
    for _ in range(count):
        engine.step({})


@pytest.mark.parametrize(("worker", "ranks", "missing"), [(Mute, 1, "0 of 1"), (HalfMute, 2, "1 of 2")])
def test_ranks_that_do_not_shake_hands_are_named_once(
    make_engine: Make, said: pytest.LogCaptureFixture, worker: type[WorkerSide], ranks: int, missing: str
) -> None:
    engine = make_engine(worker_class=worker, ranks=ranks, remote=True, **LATE)
    steps(engine, HANDSHAKE_STEPS - 1)
    assert "no handshake from" not in said.text
    steps(engine, 2 * HANDSHAKE_STEPS)
    assert said.text.count("no handshake from") == 1
    assert f"no handshake from rank(s) {missing}" in said.text
    assert "nothing is stored and nothing is loaded" in said.text


def test_handshakes_with_the_first_report_are_in_time(
    make_engine: Make, said: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(ranks=2, remote=True, **LATE)
    steps(engine, 2 * HANDSHAKE_STEPS)
    assert "no handshake from" not in said.text
    assert engine.unit.usable


@pytest.fixture
def make_disk_engine(make_engine: Make, tmp_path: Path) -> Make:
    return in_turn(make_engine, tmp_path)


def restarted(make_disk_engine: Make, reset: bool) -> MiniEngine:
    """Returns an engine that finds an earlier engine's pages. With `reset`, the engine is reset before any rank's
    handshake.
    """
    make_disk_engine().run(make_request(PROMPT, "before"))
    engine = make_disk_engine(**LATE)
    if reset:
        assert engine.side.reset()
    steps(engine, 1)
    assert engine.unit.usable
    return engine


@pytest.mark.parametrize(("reset", "tokens"), [(False, 20), (True, 0)])
def test_a_reset_before_the_handshake_makes_what_is_on_disk_a_miss(
    make_disk_engine: Make, reset: bool, tokens: int
) -> None:
    engine = restarted(make_disk_engine, reset)
    assert engine.run(make_request(PROMPT, "after")) == tokens
    assert engine.counters.data.get("flexkv_resets_total", {}) == ({"": 1.0} if reset else {})
    # Pages computed with the new weights are valid only in this run, because a later run starts with the weights in the
    # model's files.
    engine.forget()
    assert engine.run(make_request(PROMPT, "again")) == 20
    assert make_disk_engine().run(make_request(PROMPT, "later")) == tokens


def test_kv_computed_before_such_a_reset_is_not_stored(make_engine: Callable[..., MiniEngine]) -> None:
    engine = make_engine(blocks=14, **LATE, **{"store.max_reference_share": 1.0})
    engine.add(make_request(PROMPT, "one"))
    reports = engine.hold_reports()
    engine.step()
    # The engine cannot reset its own cache while the request runs, so the request keeps its blocks.
    assert engine.side.reset()
    reports()
    assert engine.unit.usable
    engine.adopt(make_request([*PROMPT[:8], *range(10)], "two"), engine.live["one"].blocks[:2])
    engine.step()
    engine.finish("one")
    engine.finish("two")
    steps(engine, 3)
    engine.drain()
    assert engine.unit.manager.cached_blocks() == 0
    engine.forget()
    engine.run(make_request(PROMPT, "three"))
    assert engine.unit.manager.cached_blocks() == 5


@pytest.mark.parametrize("same", [True, False])
def test_a_rank_shakes_hands_for_one_pool(
    make_engine: Make, said: pytest.LogCaptureFixture, same: bool
) -> None:
    """Once a rank has made a handshake, another handshake for this rank is refused if it names another pool. Otherwise
    a worker of another engine with the same name could be taken for the rank. As a control, a rank may repeat its own
    handshake, once at the start and once in the first step's report.
    """
    engine = make_engine(ranks=2, remote=True, **LATE)
    other = engine if same else make_engine(ranks=2, remote=True, **LATE)
    first, second = engine.workers[0].handshake(), other.workers[0].handshake()
    assert first is not None
    assert second is not None
    engine.side.take_handshake({0: first})
    if same:
        engine.side.take_handshake({0: second})
    else:
        with pytest.raises(
            ContractError, match=f"for KV pool {first.pool_id.hex()} .* {second.pool_id.hex()}"
        ):
            engine.side.take_handshake({0: second})
    assert engine.side.handshakes.of_rank[0].pool_id == first.pool_id
    steps(engine, 2)
    assert engine.unit.pools == tuple(worker.pool_id for worker in engine.workers)
    assert "a rank has one pool" not in said.text


def test_a_handshake_of_another_engines_rank_is_dropped_from_a_report(
    make_engine: Make, said: pytest.LogCaptureFixture
) -> None:
    engine, other = (make_engine(ranks=2, remote=True, **LATE) for _ in range(2))
    reports = [(*engine.workers, other.workers[1])[number].take_metadata() for number in (0, 2, 1)]
    first = reports[0]
    assert first is not None
    for report in reports[1:]:
        assert report is not None
        first = first.aggregate(report)
    # The first handshake for a rank counts. In this report, it comes from the other engine's rank 1.
    engine.side.update(KVConnectorOutput(kv_connector_worker_meta=first))
    assert said.text.count("a rank has one pool") == 1
    assert "rank 1 has shaken hands for KV pool" in said.text
    counted = engine.side.take_counters()
    assert counted is not None
    assert counted["flexkv_refused_messages_total"] == {"reports": 1.0}
    # The engine's own rank 1 never attaches, so pages of the two pools are never mixed.
    steps(engine, 3)
    assert not engine.workers[1].attached
    assert engine.run(make_request(PROMPT, "one")) == 0
    assert engine.stored_pages == 0


@pytest.mark.parametrize("reset", [True, False])
def test_a_reset_before_the_block_pool_is_bound_is_carried_out(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reset: bool
) -> None:
    """If a reset comes before the block pool is bound, no older page is served. vLLM's MultiConnector forwards first
    the reset and then the block pool. In the control, without the reset, the pages are served.
    """
    make = in_turn(make_engine, tmp_path)
    make().run(make_request(PROMPT, "before"))
    with monkeypatch.context() as unbound:
        unbound.setattr(SchedulerSide, "bind_block_pool", lambda *_: None)
        engine = make(**LATE)
    multi, connector = MultiConnector.__new__(MultiConnector), FlexKVConnector.__new__(FlexKVConnector)
    connector.scheduler, multi._connectors = engine.side, [connector]
    if reset:
        assert multi.reset_cache()
    multi.bind_gpu_block_pool(engine.pool)
    steps(engine, 1)
    assert engine.run(make_request(PROMPT, "after")) == (0 if reset else 20)
