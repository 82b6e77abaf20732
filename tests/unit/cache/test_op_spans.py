"""A process with tracing emits one span per op. In these tests OpenTelemetry's own SDK receives the spans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flexkv.observe import OpSpans, spans
from flexkv.transfer.graph import OpStatus
from tests.unit.cache.disk_world import DiskWorld, chain, written
from tests.unit.cache.host_world import end, ids, keys, make


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Records the spans of this test's tracer provider. The provider is set only for this test, although a process can
    normally set one only once.
    """
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(spans.trace, "_TRACER_PROVIDER", provider)
    yield memory
    provider.shutdown()


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def test_nothing_is_made_where_nobody_traces() -> None:
    assert not OpSpans().wanted


def test_nothing_is_made_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "trace", None)
    assert not OpSpans().wanted
    manager = make()
    plan = manager.begin_store("w", 0, keys(1), ids(0), 0)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id)


def test_stores_and_loads_are_spans_with_their_requests(taken: InMemorySpanExporter) -> None:
    manager, hashes = make(ranks=2), keys(4)
    plan = manager.begin_store("w", 0, hashes, ids(0, 1, 2, 3), 0)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id, rank=0)
    assert not taken.get_finished_spans(), "an op ends when every rank has reported"
    end(manager, plan.graph.ops[0].op_id, rank=1)
    manager.match("r", [hashes], 0)
    graph = manager.begin_load("r", [ids(5, 6, 7, 8)])
    assert graph is not None
    end(manager, graph.ops[0].op_id, OpStatus.FAILED, ids(2), rank=0)
    end(manager, graph.ops[0].op_id, rank=1)
    store, load = taken.get_finished_spans()
    assert (store.name, load.name) == ("flexkv store to host memory", "flexkv load from host memory")
    assert store.attributes == {
        "flexkv.op_id": 1,
        "flexkv.group": 0,
        "flexkv.pages": 4,
        "flexkv.failed_pages": 0,
        "gen_ai.request.id": "w",
    }
    assert store.status.is_ok or store.status.is_unset
    assert attribute(load, "flexkv.failed_pages") == 1
    assert attribute(load, "gen_ai.request.id") == "r"
    assert (load.status.status_code.name, load.status.description) == ("ERROR", "rank 0: why")


def test_a_span_lasts_from_the_plan_to_the_end(taken: InMemorySpanExporter) -> None:
    world, hashes = DiskWorld(), chain(3)
    world.store(hashes)
    (write,) = world.take()
    taken.clear()
    world.now_s += 2.5
    world.end(write)
    (span,) = taken.get_finished_spans()
    assert span.name == "flexkv write from host memory to disk"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(2.5e9, rel=1e-6)


def test_a_read_names_the_requests_that_wait_for_it(taken: InMemorySpanExporter) -> None:
    hashes = chain(3)
    world = written(hashes)
    assert world.look(hashes, "r").reads
    world.run()
    span = taken.get_finished_spans()[-1]
    assert span.name == "flexkv read from disk to host memory"
    assert attribute(span, "gen_ai.request.ids") == ("r",)
    assert span.status.is_unset


def test_a_failed_read_says_why(taken: InMemorySpanExporter) -> None:
    hashes = chain(3)
    world = written(hashes)
    world.look(hashes)
    world.run(lambda page: page == 1)
    span = taken.get_finished_spans()[-1]
    assert (attribute(span, "flexkv.pages"), attribute(span, "flexkv.failed_pages")) == (3, 1)
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "why")
