"""Shows how an engine's role, speculation and resets affect the pages that flexkv stores and promises."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))


def test_a_consumer_stores_nothing_and_a_producer_loads_nothing(make_engine: Make) -> None:
    consumer = make_engine(role=EngineRole(stores=False), **{"store.partial_blocks": True})
    consumer.run(make_request(PROMPT, "one"))
    assert consumer.unit.manager.cached_blocks() == 0
    producer = make_engine(role=EngineRole(loads=False))
    producer.run(make_request(PROMPT, "one"))
    assert producer.unit.manager.cached_blocks() == 5
    assert producer.run(make_request(PROMPT, "two")) == 0


def test_a_draft_model_gets_a_block_to_compute(make_engine: Make) -> None:
    engine = make_engine(role=EngineRole(drop_last_block=True), **{"store.partial_blocks": True})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 16
    engine.forget()
    assert engine.run(make_request(PROMPT[:5], "short")) == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_tokens_taken_without_a_promise_are_reported_as_failed(make_engine: Make, mode: str) -> None:
    engine = make_engine(**{"load.mode": mode})
    request = make_request(PROMPT, "one")
    engine.add(request)
    live = engine.live["one"]
    ids = [block.block_id for block in live.blocks]
    engine.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (ids,)), 8)
    request.num_computed_tokens, live.waiting_for_load = 8, mode == "async"
    engine.step({})
    assert engine.invalid == set(ids)
    assert request.num_computed_tokens == 0
    assert not live.waiting_for_load
    engine.step()
    engine.check("one")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_what_the_engine_kept_of_the_old_weights_is_not_stored(make_engine: Make, mode: str) -> None:
    engine = make_engine(blocks=14, **{"store.mode": mode, "store.max_reference_share": 1.0})
    first = make_request(PROMPT, "one")
    engine.add(first)
    engine.step()
    # The engine cannot reset its own cache while a request runs, so the request keeps its blocks. flexkv drops its
    # pages anyway.
    assert engine.side.reset()
    engine.adopt(make_request([*PROMPT[:8], *range(10)], "two"), engine.live["one"].blocks[:2])
    engine.step()
    engine.finish("one")
    engine.finish("two")
    for _ in range(3):
        engine.step({})
    engine.drain()
    assert engine.unit.manager.cached_blocks() == 0


def test_lazy_keeps_away_from_blocks_computed_from_a_failed_load(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=0, page=1, times=1))
    engine = make_engine(
        blocks=14,
        worker_class=worker,
        **{"load.mode": "sync", "store.mode": "lazy", "store.max_reference_share": 1.0},
    )
    engine.run(make_request(PROMPT[:12], "one"))
    engine.run(make_request(range(23), "filler"))
    engine.step({})
    engine.drain()
    engine.forget()
    assert engine.add(make_request(PROMPT, "two")) == 12
    engine.step()
    assert engine.invalid
    # The request ends before the engine computes the failed block again, so its wrong blocks go to the free queue with
    # their hashes.
    engine.finish("two")
    engine.step({})
    engine.drain()
    manager = engine.unit.manager
    keys = engine.keys_of(make_request(PROMPT, "three"))
    assert manager.match("probe", [keys], 0).blocks == 1
