"""flexkv reports KV events and metrics to vLLM."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from flexkv.adapters.vllm import FlexKVConnector
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.metadata import StepReport, WorkerMetadata
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.adapters.vllm.stats import FlexKVPromMetrics, FlexKVStats
from flexkv.adapters.vllm.stored_block import StoredBlock, token_array, unpacked
from flexkv.cache.base import StorePlan
from flexkv.observe import METRICS, Counters
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from flexkv.unit.live_unit import LiveUnit
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import image, make_request
from tests.unit.cache.disk_world import chain

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 112))


def taken(engine: MiniEngine) -> list[Any]:
    """Returns the KV cache events since the last call of this function."""
    assert engine.side.events is not None
    return engine.take_events()


def test_a_stored_block_is_announced_with_its_parent_and_tokens(make_engine: Make) -> None:
    engine = make_engine(with_events=True)
    request = make_request(PROMPT, "one", cache_salt="s", mm_features=[image("cat", 5, 2)])
    engine.run(request)
    names = list(map(maybe_convert_block_hash, request.block_hashes))
    events = taken(engine)
    assert [type(event) for event in events] == [BlockStored] * 3
    assert [event.block_hashes for event in events] == [[h] for h in names]
    assert [event.parent_block_hash for event in events] == [None, *names[:2]]
    assert [event.token_ids for event in events] == [PROMPT[:4], PROMPT[4:8], PROMPT[8:]]
    assert {(event.medium, event.block_size) for event in events} == {("CPU", 4)}
    assert [event.extra_keys for event in events] == [[("s",)], [(("cat", 1),)], None]
    assert taken(engine) == []


def test_the_session_that_stored_a_block_is_announced_by_this_process_alone() -> None:
    block = StoredBlock(0, bytes(32), None, token_array(range(4)), 4, session_id="one")
    next_one = unpacked(block.packed())
    assert [each.event("CPU").session_id for each in (block, next_one)] == ["one", None]
    assert [each.event("CPU").token_ids for each in (block, next_one)] == [[0, 1, 2, 3]] * 2


def test_an_evicted_block_is_announced(make_engine: Make) -> None:
    engine = make_engine(with_events=True, **{"host.bytes": 4 * 4096})
    first = make_request(PROMPT, "one")
    engine.run(first)
    engine.run(make_request(range(8), "two"))
    removed = [event for event in taken(engine) if isinstance(event, BlockRemoved)]
    assert removed
    assert {event.medium for event in removed} == {"CPU"}
    assert {h for event in removed for h in event.block_hashes} <= set(
        map(maybe_convert_block_hash, first.block_hashes)
    )


def test_a_reset_is_announced(make_engine: Make) -> None:
    engine = make_engine(with_events=True)
    engine.run(make_request(PROMPT, "one"))
    engine.side.reset()
    assert isinstance(taken(engine)[-1], AllBlocksCleared)


def test_without_subscribers_nothing_is_collected(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.side.reset()
    assert engine.side.events is None
    assert isinstance(engine.side.unit, LiveUnit)
    assert engine.side.unit.manager.hub.listeners == []


def test_lazy_stores_are_announced_by_hash(make_engine: Make) -> None:
    engine = make_engine(
        with_events=True, blocks=9, **{"store.mode": "lazy", "store.max_reference_share": 1.0}
    )
    request = make_request(PROMPT, "one")
    engine.run(request)
    engine.step({})
    engine.drain()
    announced = [event.block_hashes[0] for event in taken(engine)]
    assert sorted(announced) == sorted(map(maybe_convert_block_hash, request.block_hashes))


def test_each_way_of_a_store_announces_its_own_blocks() -> None:
    """A store may have one op that writes to disk and one that copies to host memory. When pages are published in host
    memory, only the blocks of the op that copies there are announced.
    """
    geometry = PoolGeometry((BlockGeometry(4, 4, 16, ("layer",)),), 4)
    host: Any = SimpleNamespace(in_use=True)
    log, keys = EventLog(geometry, bytes(32), host), chain(4)
    hashes = [BlockHash(bytes(key)) for key in keys]
    slots = np.arange(2, dtype=np.int32)
    ops = [
        TransferOp(OpId(number), kind, 0, Priority.STORE, slots, slots, places=slots)
        for number, kind in enumerate((OpKind.GDS_WRITE, OpKind.D2H), start=1)
    ]
    plan = StorePlan(TransferGraph(tuple(ops)), np.array([2, 3, 0, 1], np.int32), 0, 0)
    log.planned_by_hash(plan, keys, hashes)
    log.ended(ops[0].op_id)
    log.on_publish(0, keys)
    announced = [event.block_hashes[0] for event in log.take_events() if isinstance(event, BlockStored)]
    assert announced == list(map(maybe_convert_block_hash, hashes[:2]))


def test_counters_of_ranks_and_scheduler_add_up(make_engine: Make) -> None:
    engine = make_engine(ranks=2, remote=True)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    engine.run(make_request(PROMPT, "two"))
    stats = FlexKVStats(data=engine.counters.data)
    for worker in engine.workers:
        stats = stats.aggregate(FlexKVStats(data=worker.counters.take()))
    reduced = stats.reduce()
    assert reduced["moved_pages[store]"] == 2 * 3
    assert reduced["moved_pages[load]"] == 2 * 3
    assert reduced["hit_tokens"] == 11
    rebuilt = FlexKVConnector.build_kv_connector_stats(pickle.loads(pickle.dumps(stats.to_dict())))
    assert rebuilt.reduce() == reduced
    assert not rebuilt.is_empty()
    assert engine.side.take_counters() is None


def test_the_gauges_show_the_end_of_the_last_copy(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    assert not engine.side.has_work
    assert engine.counters.value("flexkv_host_slots_used") == 3
    slots = engine.counters.value("flexkv_host_slots")
    assert engine.counters.value("flexkv_host_capacity_tokens") == 4 * slots > 0
    assert engine.counters.value("flexkv_inflight_ops") == 0


def registered(engines: dict[int, list[object]]) -> tuple[CollectorRegistry, FlexKVPromMetrics]:
    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return lambda **fields: kind(
            registry=registry, **{k: v for k, v in fields.items() if k != "multiprocess_mode"}
        )

    types = {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return registry, FlexKVPromMetrics(config, types, ["model", "engine"], engines)


def test_prometheus_gets_every_series() -> None:
    registry, metrics = registered({0: ["m", "0"]})
    counters = Counters()
    counters.add("flexkv_moved_pages_total", 3, direction="load")
    counters.observe("flexkv_transfer_seconds", 0.01, direction="load")
    counters.set("flexkv_host_slots", 7)
    metrics.observe(counters.data)
    metrics.observe(counters.data)
    labels = {"model": "m", "engine": "0"}
    value = registry.get_sample_value
    assert value("vllm:flexkv_moved_pages_total", labels | {"direction": "load"}) == 6
    assert value("vllm:flexkv_transfer_seconds_count", labels | {"direction": "load"}) == 2
    assert value("vllm:flexkv_host_slots", labels) == 7


def test_every_series_is_exported_at_zero_before_anything_happens() -> None:
    registry, metrics = registered({0: ["m", "0"], 1: ["m", "1"]})
    exported = {
        (sample.name.removesuffix("_count"), frozenset(sample.labels.items()))
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum", "_created")) and sample.value == 0
    }
    for metric in METRICS.values():
        names = [name for name, _ in metric.labels]
        for engine in ("0", "1"):
            for values in itertools.product(*(values for _, values in metric.labels)):
                labels = {"model": "m", "engine": engine, **dict(zip(names, values, strict=True))}
                assert (f"vllm:{metric.name}", frozenset(labels.items())) in exported
    # Later counts are added to the existing series, so no series appears twice.
    counters = Counters()
    counters.add("flexkv_failed_pages_total", 2, direction="store", reason="deadline")
    metrics.observe(counters.data, 1)
    labels = {"model": "m", "engine": "1", "direction": "store", "reason": "deadline"}
    assert registry.get_sample_value("vllm:flexkv_failed_pages_total", labels) == 2


def test_the_tiers_sizes_are_reported_before_anything_moves(make_engine: Make) -> None:
    engine = make_engine()
    assert engine.side.has_work, "the engine takes a step that reports them"
    engine.step({})
    assert engine.counters.value("flexkv_host_slots") == engine.unit.slots
    assert not engine.side.has_work


def test_reports_of_ranks_join() -> None:
    first, second = StepReport(0, ready=5), StepReport(1, ready=3, error="x")
    assert WorkerMetadata([first]).aggregate(WorkerMetadata([second])).reports == [first, second]


def test_a_rank_without_news_sends_no_report(make_engine: Make) -> None:
    engine = make_engine(remote=True)
    (worker,) = engine.workers
    handshake = worker.take_metadata()
    assert handshake is not None
    engine.run(make_request(PROMPT, "one"))
    assert worker.take_metadata() is None
