"""A scheduler's side and its workers check each other's messages. Orders, reports and grants of another unit are
refused. Messages about a pool that the engine has replaced are refused too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import KVConnectorOutput

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.vllm import local_engines
from flexkv.adapters.vllm.foreign_steps import ForeignSteps
from flexkv.adapters.vllm.local_engines import OwnPools, check_agent
from flexkv.adapters.vllm.metadata import ConnectorMetadata, StepReport, WorkerMetadata
from flexkv.config import load_config
from flexkv.errors import ConfigError, ContractError
from flexkv.facts.ranks import NO_UNIT, PoolId, UnitId, random_id
from flexkv.observe import Counters
from flexkv.transfer.graph import NO_OPS, OpResult
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.mini_pools import make_caches
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., MiniEngine]
ONE, TWO = list(range(100, 123)), list(range(300, 323))
MODES = ["async", "sync", "layerwise"]
MESSAGES = "flexkv_refused_messages_total"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.ERROR)
    return caplog


def errors(logged: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in logged.records)


def refused(engine: MiniEngine, kind: str) -> float:
    return float(engine.counters.data.get(MESSAGES, {}).get(kind, 0))


def two_engines(make_engine: Make, **options: Any) -> tuple[MiniEngine, MiniEngine]:
    """Makes two engines, each of which has stored its own prompt. Both use the worker of the first engine, as two vLLM
    engines in one process do.
    """
    first, second = (stored_engine(make_engine, tokens, **options) for tokens in (ONE, TWO))
    second.workers = first.workers
    return first, second


def slots_of(engine: MiniEngine) -> Any:
    pool = engine.unit.pool
    return np.stack([pool.slot(slot).copy() for slot in range(pool.slots)])


# --- a worker gets orders of another unit ---


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_load_of_another_unit_is_refused_and_its_blocks_are_named(
    make_engine: Make, mode: str, remote: bool, logged: pytest.LogCaptureFixture
) -> None:
    first, second = two_engines(make_engine, remote=remote, **{"load.mode": mode})
    pools, kept = first.pools.caches[0]["layer.0"].clone(), slots_of(first)
    request = make_request(TWO, "two")
    steps, run = 0, second._run_worker

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(*arguments)

    second._run_worker = counted  # type: ignore[method-assign, assignment]
    assert second.add(request) == 20
    loaded = {block.block_id for block in second.live["two"].blocks[:5]}
    if mode == "async":
        second.end_load("two")
    else:
        second.step()
    assert second.invalid == loaded
    second.step()
    second.check("two")
    second.finish("two")
    assert second.unit.manager.inflight_ops() == 0, "ops of the refused step have ended"
    assert first.pools.caches[0]["layer.0"].equal(pools), "the other engine's pool was written"
    assert np.array_equal(slots_of(first), kept), "the other unit's host memory was written"
    assert errors(logged, "nothing of such steps is loaded or stored") == 1
    assert not second.unit.usable, "its scheduler goes on promising what no worker loads"
    assert first.workers[0].counters.data[MESSAGES]["orders"] == steps
    assert first.unit.usable
    assert first.run(make_request(ONE, "again")) == 20


@pytest.mark.parametrize("mode", MODES)
def test_without_the_check_the_other_engine_reads_wrong_kv(
    make_engine: Make, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a control, the worker accepts the orders of any unit. The second engine then gets the first engine's KV."""
    _, second = two_engines(make_engine, **{"load.mode": mode})
    # The second unit must also accept the worker's reports.
    monkeypatch.setattr(second.workers[0], "unit", second.unit.unit_id)
    second.add(make_request(TWO, "two"))
    second.end_load("two")
    second.step()
    assert second.wrong("two")


def test_stores_of_another_unit_are_refused_and_not_published(make_engine: Make) -> None:
    first, second = two_engines(make_engine)
    kept, stored = slots_of(first), second.stored_pages
    request = make_request(list(range(500, 523)), "three")
    second.add(request)
    second.step()
    second.finish("three")
    second.step({})
    assert second.unit.manager.inflight_ops() == 0
    assert second.stored_pages == stored
    assert np.array_equal(slots_of(first), kept)


def test_a_step_of_another_unit_takes_no_report_of_this_one(make_engine: Make) -> None:
    """When a worker runs a step of another unit, it does not report the results of its own unit's ops to that unit. The
    worker keeps the results for its own unit's scheduler.
    """
    first, second = two_engines(make_engine, remote=True)
    first.add(make_request(list(range(700, 723)), "new"))
    orders = first.side.build(first._output({"new": 23}))
    worker = first.workers[0]
    worker.before_forward(orders)
    worker.start_loads(orders)
    worker.submit_stores(orders)
    for _ in range(50):
        second.step({})
    while worker._ops._ops:
        worker.poll(idle=True)
    second.step({})
    assert first.unit.manager.inflight_ops() > 0
    first.step({})
    assert first.unit.manager.inflight_ops() == 0


def test_orders_from_before_a_unit_was_made_are_refused_by_a_rank_that_serves_one(make_engine: Make) -> None:
    engine = stored_engine(make_engine, ONE)
    worker = engine.workers[0]
    worker.before_forward(ConnectorMetadata())
    report = worker.take_metadata()
    assert report is not None
    assert report.reports[0].blend_disk is False, (
        "no engine steps on for disks of a rank that it does not reach"
    )
    assert worker._foreign.unit == NO_UNIT
    assert engine.run(make_request(ONE, "two")) == 20


# --- a scheduler's side gets reports of another unit ---


@pytest.mark.parametrize("own", [True, False])
def test_a_report_of_another_unit_frees_and_publishes_nothing(
    make_engine: Make, own: bool, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of another unit neither frees slots nor publishes pages. With `own`, the control, the same report comes
    from this unit. Then it frees the slots and publishes the pages.
    """
    engine = make_engine(remote=True)
    worker = engine.workers[0]
    with monkeypatch.context() as silent:
        silent.setattr(worker, "take_metadata", lambda: None)
        engine.add(make_request(ONE, "one"))
        engine.step()
    while worker._ops._ops:
        worker.poll(idle=True)
    report = worker.take_metadata()
    assert report is not None
    assert report.reports[0].results
    if not own:
        report = WorkerMetadata([replace(report.reports[0], unit=UnitId(random_id()), error="broken")])
        engine.side.update(KVConnectorOutput(kv_connector_worker_meta=report))
    engine.side.update(KVConnectorOutput(kv_connector_worker_meta=report))
    assert (engine.unit.manager.inflight_ops() == 0) is own
    assert (engine.stored_pages == 5) is own
    assert engine.unit.usable
    assert errors(logged, "reached the scheduler's side of unit") == (0 if own else 1)
    counters = engine.side.take_counters()
    assert counters is not None
    assert counters.get(MESSAGES, {}).get("reports", 0) == (0 if own else 2)


def test_reports_of_two_units_are_not_put_together(make_engine: Make) -> None:
    engine = make_engine()
    unit, other = engine.unit.unit_id, UnitId(random_id())
    strange = OpResult.cancelled(1, 1, "of another unit")  # type: ignore[arg-type]
    joined = WorkerMetadata([StepReport(0, unit, ready=5)])
    joined.aggregate(WorkerMetadata([StepReport(1, other, results=[strange])]))
    # This unit has no op in flight, so the report would be an error if it came from this unit.
    engine.side.update(KVConnectorOutput(kv_connector_worker_meta=joined))
    with pytest.raises(ContractError):  # the control
        engine.side.update(
            KVConnectorOutput(
                kv_connector_worker_meta=WorkerMetadata([StepReport(0, unit, results=[strange])])
            )
        )


# --- pools and grants ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("remote", [False, True])
def test_a_pool_that_replaced_another_is_not_written_by_loads_for_that(
    make_engine: Make, remote: bool, mode: str
) -> None:
    engine = stored_engine(make_engine, ONE, remote=remote, **{"load.mode": mode})
    request = make_request(ONE, "two")
    assert engine.add(request) == 20
    worker, caches = engine.workers[0], make_caches(engine.kv_config)
    before = worker.pool_id
    worker.register_kv_caches(caches, engine.kv_config)
    engine.pools.caches[0] = caches
    assert worker.pool_id != before
    loaded = {block.block_id for block in engine.live["two"].blocks[:5]}
    if mode == "async":
        engine.end_load("two")
    else:
        engine.step()
    assert engine.invalid >= loaded
    engine.step()
    engine.check("two")
    assert not engine.unit.usable
    assert engine.unit.manager.inflight_ops() == 0


def test_a_grant_for_another_pool_is_not_taken(make_engine: Make) -> None:
    engine = make_engine(remote=True)
    worker, grant = engine.workers[0], engine.unit.grant
    assert grant is not None
    worker.take_grant(replace(grant, pools=(PoolId(random_id()),)))
    worker.take_grant(replace(grant, pools=()))
    assert (worker.unit, worker.attached) == (NO_UNIT, False)
    worker.take_grant(grant)
    assert (worker.unit, worker.attached) == (engine.unit.unit_id, True)


def test_a_grant_of_another_unit_is_not_taken(make_engine: Make) -> None:
    engine = make_engine(remote=True)
    engine.step({})
    worker = engine.workers[0]
    unit, attached = worker.unit, worker._pool
    assert unit == engine.unit.unit_id
    other = make_engine(remote=True)
    worker.take_grant(replace(other.unit.make_grant(False), pools=(worker.pool_id,)))
    assert (worker.unit, worker._pool) == (unit, attached)
    with pytest.raises(ContractError, match=f"serves unit {unit.hex()}"):
        worker.attach(other.unit.unit_id, other.unit.pool, other.unit.places[0])


def test_a_worker_is_attached_once(make_engine: Make) -> None:
    """A worker refuses to be attached twice. A second attachment would make new lanes, and the ends of ops on the old
    lanes would never be reported.
    """
    engine = make_engine()
    worker, unit = engine.workers[0], engine.unit
    lanes = worker._ops.engine
    assert lanes is not None
    with pytest.raises(ContractError, match="asked twice to serve"):
        worker.attach(unit.unit_id, unit.pool, unit.places[0])
    assert worker._ops.engine is lanes


def test_two_units_and_two_pools_never_have_one_id(make_engine: Make) -> None:
    engines = [make_engine() for _ in range(3)]
    assert len({engine.unit.unit_id for engine in engines}) == 3
    assert len({engine.workers[0].pool_id for engine in engines}) == 3


# --- how the scheduler's side and the workers in one process find each other ---


def test_a_scheduler_takes_the_workers_here_whose_pools_its_handshakes_name(make_engine: Make) -> None:
    first, second = make_engine(ranks=2), make_engine(ranks=2)
    for engine in (first, second):
        assert list(engine.side.workers) == engine.workers
    pools = [first.workers[0].pool_id, second.workers[1].pool_id]
    assert local_engines.workers_of_pools(pools) == (first.workers[0], second.workers[1])
    assert local_engines.workers_of_pools([*pools, PoolId(random_id())]) == ()


def test_one_name_for_two_engines_pairs_nobody(make_engine: Make) -> None:
    """A scheduler's side and a worker are paired only if they were made with the same object. An equal but different
    object belongs to another engine with the same name.
    """
    engine = make_engine()
    mine, equal = ["cache config"], ["cache config"]
    local_engines.announce(engine.workers[0], mine)
    assert local_engines.worker_of_engine(mine) is engine.workers[0]
    assert local_engines.worker_of_engine(equal) is None


# --- a second engine in a process ---


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for vLLM's current configuration, which shows for which engine a worker is being set up. A test may
    replace `engine`.
    """
    state = SimpleNamespace(engine=object())
    monkeypatch.setattr(local_engines, "get_current_vllm_config_or_none", lambda: state.engine)
    return state


@pytest.mark.parametrize("knows", [True, False])
def test_another_engine_cannot_register_its_pool(current: SimpleNamespace, knows: bool) -> None:
    if not knows:
        current.engine = None
    pools = OwnPools()
    pools.check()
    current.engine = object() if knows else None
    with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        pools.check()


def test_the_same_engine_may_register_again(current: SimpleNamespace) -> None:
    pools = OwnPools()
    pools.check()
    pools.check()


def test_a_forked_engine_is_told_to_spawn(current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = OwnPools()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ConfigError, match="VLLM_WORKER_MULTIPROC_METHOD=spawn"):
        pools.check()


@pytest.mark.parametrize(
    ("agent", "backend", "announced", "allowed"),
    [
        (True, "uni", False, False),
        (True, "external_launcher", False, False),
        (True, "uni", True, True),
        (True, "mp", False, True),
        (False, "uni", False, True),
    ],
)
def test_a_scheduler_beside_the_worker_of_another_engine_is_refused(
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    agent: bool,
    backend: str,
    announced: bool,
    allowed: bool,
) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend), cache_config=object()
    )
    monkeypatch.setattr(local_engines, "has_kv_transfer_group", lambda: agent)
    if announced:
        local_engines.announce(make_engine().workers[0], config.cache_config)
    if allowed:
        check_agent(config)
    else:
        with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
            check_agent(config)


def test_steps_of_several_units_are_one_error_and_their_results_stay_apart(
    logged: pytest.LogCaptureFixture,
) -> None:
    """If several units run steps on the worker of another unit, flexkv logs one error, and the results of the units
    stay separate. If a step is interrupted, its results are not reported, and must not be reported later to the unit of
    the next step. As a control, between steps of the same unit no result is dropped.
    """
    own, one, two = (UnitId(random_id()) for _ in range(3))
    foreign = ForeignSteps(load_config({}, {}), 0, Counters())
    left = 0
    for unit in (one, one, two):
        left += unit == one
        loads = [LoadJob(f"load {left}", NO_OPS, False, lost=(left,))] if unit == one else []
        reports = foreign.refuse(ConnectorMetadata(unit, loads=loads), own)
        if unit == one:
            assert foreign.refuse(ConnectorMetadata(unit), own) is reports
            assert reports.failed_blocks == set(range(1, left + 1))
    assert reports.take_failed_blocks() == set()
    assert reports.take_finished() == set()
    assert two.hex() in foreign.reason
    foreign.refuse(ConnectorMetadata(one), own)
    assert errors(logged, "nothing of such steps is loaded or stored") == 1
