"""flexkv begins to read pages when a request enters vLLM's queue, before the scheduler looks the request up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.simulation.world import DISK
from tests.unit.adapters.disk_engines import PROMPT, Make, in_turn
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request


@pytest.fixture
def make_disk_engine(make_engine: Make, tmp_path: Path) -> Make:
    """Returns a function that makes engines with a disk tier in the test's folder. Each call first closes the engine
    that the previous call made.
    """
    return in_turn(make_engine, tmp_path, role=EngineRole())


def prefetched(engine: MiniEngine) -> int:
    """Returns the number of pages that flexkv began to read before the lookup."""
    return engine.unit.manager.tiers[DISK].counts.prefetched


def test_reads_begin_when_a_request_enters_the_queue(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    request = make_request(PROMPT, "two")
    engine.side.prefetch(request)
    assert prefetched(engine) == 5
    assert engine.unit.manager.stats().lookups == 0
    engine.drain()
    assert engine.side.match(request, 0) == (20, True), "at once"
    engine.side.finished(request)
    counts = engine.unit.manager.tiers[DISK].counts
    assert (counts.read, counts.waits) == (5, 0)


def test_control_without_the_hook_the_request_waits_for_the_disk(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    request = make_request(PROMPT, "two")
    engine.drain()
    assert engine.side.match(request, 0) == (None, False)
    assert prefetched(engine) == 0
    engine.side.finished(request)


def test_what_the_engine_has_itself_is_not_read(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    engine.run(make_request(PROMPT[:13], "short"))
    read = engine.unit.manager.tiers[DISK].counts.read
    engine.unit.manager.hub.evict(0, 100)
    engine.side.prefetch(make_request(PROMPT, "long"))
    assert (read, prefetched(engine)) == (3, 2), "three of five blocks are in the engine's own cache"


class Prefetched:
    """Records the calls of a manager's prefetch, each with its request, key bytes and start block."""

    def __init__(self, engine: MiniEngine) -> None:
        self.calls: list[tuple[str, list[bytes], int]] = []
        manager = engine.unit.manager
        prefetch = manager.prefetch

        def noted(
            request_id: str,
            keys: Sequence[Keys],
            start_tokens: int = 0,
            settings: RequestSettings = NO_SETTINGS,
        ) -> int:
            self.calls.append((request_id, [group.tobytes() for group in keys], start_tokens))
            return prefetch(request_id, keys, start_tokens, settings)

        manager.prefetch = noted  # type: ignore[method-assign]


def connector_of(engine: MiniEngine) -> FlexKVConnector:
    """Makes a scheduler's connector that uses the engine's scheduler side."""
    connector = FlexKVConnector.__new__(FlexKVConnector)
    connector.scheduler = engine.side
    return connector


def test_the_connector_prefetches_a_new_request_by_its_keys(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    request, asked = make_request(PROMPT, "two"), Prefetched(engine)
    connector_of(engine).on_new_request(request)
    assert asked.calls == [("two", [MiniEngine.keys_of(request).tobytes()], 0)]
    assert prefetched(engine) == 5


def test_control_a_connector_without_the_hook_prefetches_nothing(
    make_disk_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FlexKVConnector, "on_new_request")
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    asked = Prefetched(engine)
    connector_of(engine).on_new_request(make_request(PROMPT, "two"))
    assert (asked.calls, prefetched(engine)) == ([], 0)


@pytest.mark.parametrize("kind", ["reads no cache", "goes on", "engine loads nothing", "cache is disabled"])
def test_the_connector_prefetches_nothing_for_a_request_that_may_not_load(
    make_disk_engine: Make, kind: str
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine(role=EngineRole(loads=kind != "engine loads nothing"))
    request, asked = make_request(PROMPT, "two"), Prefetched(engine)
    request.skip_reading_prefix_cache = kind == "reads no cache"
    request.num_computed_tokens = 4 if kind == "goes on" else 0
    if kind == "cache is disabled":
        engine.unit.disable(0, "the rank cannot use the pool")
    connector_of(engine).on_new_request(request)
    assert (asked.calls, prefetched(engine)) == ([], 0)


@pytest.mark.parametrize("kind", ["limit", "producer", "skips", "no disk"])
def test_nothing_is_read_ahead_where_it_must_not_or_cannot(
    make_disk_engine: Make, make_engine: Make, kind: str
) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    if kind == "no disk":
        engine = make_engine()
    elif kind == "producer":
        engine = make_disk_engine(role=EngineRole(loads=False))
    else:
        engine = make_disk_engine(**({"disk.prefetch_requests": 0} if kind == "limit" else {}))
    request = make_request(PROMPT, "two")
    request.skip_reading_prefix_cache = kind == "skips"
    engine.side.prefetch(request)
    assert [tier.counts.prefetched for tier in engine.unit.manager.tiers] == [0] * (
        1 if kind == "no disk" else 2
    )


def test_a_request_that_is_aborted_in_the_queue_leaves_nothing(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    request = make_request(PROMPT, "two")
    engine.side.prefetch(request)
    engine.side.finished(request)
    engine.drain()
    manager = engine.unit.manager
    manager.check_integrity()
    assert manager.tables.requests.waits == {}
    assert len(engine.side.requests.live) == 0


def test_prefetched_pages_are_a_metric(make_disk_engine: Make) -> None:
    make_disk_engine().run(make_request(PROMPT, "one"))
    engine = make_disk_engine()
    engine.side.prefetch(make_request(PROMPT, "two"))
    engine.drain()
    assert sum(engine.counters.data["flexkv_disk_prefetched_pages_total"].values()) == 5
