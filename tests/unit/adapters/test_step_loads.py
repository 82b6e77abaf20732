"""Tests loads that end within the step that needs them, either before its forward pass or layer by layer. If such a
load fails, flexkv reports its wrong blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexkv.errors import ClosedError
from tests import testing_ext
from tests.unit.adapters.faulty_worker import FaultyWorker, faulty_worker, release_when_given_up
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL, STALL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D = 0
WAYS = [("sync", None), ("layerwise", 0), ("layerwise", 1)]
"""Pairs of a load mode and the layer in which a copy fails. None as the layer means that the copy of the complete page
fails.
"""

either_way = pytest.mark.parametrize(("mode", "layer"), WAYS)


def stored(make_engine: Make, worker_class: type[FaultyWorker], mode: str, **settings: float) -> MiniEngine:
    """Returns an engine that has stored PROMPT's first 16 tokens and dropped its own copy of them."""
    return stored_engine(
        make_engine, PROMPT[:16], worker_class=worker_class, **{"load.mode": mode}, **settings
    )


@either_way
def test_nothing_computed_from_a_page_that_failed_is_published(
    make_engine: Make, mode: str, layer: int | None
) -> None:
    fails = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, layer=layer, times=1))
    engine = stored(make_engine, fails, mode)
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 16
    failed = engine.live["two"].blocks[2].block_id
    engine.step()
    assert engine.invalid == {failed}
    assert engine.wrong("two", 23) != []
    engine.drain()
    # The step computed block 4 from a block that had not arrived completely, so block 4 is not stored.
    assert engine.stored_pages == 4
    assert request.num_computed_tokens == 8
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    assert engine.stored_pages == 6
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


@either_way
def test_requests_that_share_the_failed_block_are_affected_too(
    make_engine: Make, mode: str, layer: int | None
) -> None:
    fails = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=1, layer=layer, times=1))
    engine = stored(make_engine, fails, mode)
    assert engine.add(make_request(PROMPT[:20], "two")) == 16
    # Request "three" gets the blocks of "two" from the engine's own prefix cache.
    sharing = make_request([*PROMPT[:8], *range(9)], "three")
    engine.adopt(sharing, engine.live["two"].blocks[:2])
    engine.step()
    engine.drain()
    assert engine.stored_pages == 4, "neither's blocks beyond the failed one"
    engine.step()
    engine.check("two")
    engine.check("three")


@either_way
def test_a_load_past_its_deadline_is_computed(make_engine: Make, mode: str, layer: int | None) -> None:
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, page=0, layer=layer, times=1))
    engine = stored(make_engine, slow, mode, **{"load.deadline_s": 0.02})
    assert engine.add(make_request(PROMPT, "two")) == 16
    release = release_when_given_up(engine.workers[0], slow.movers[0])
    engine.step()
    release.join()
    assert len(engine.invalid) == 4, "nobody waits for it any more, so none of its blocks may be used"
    engine.step()
    engine.check("two")


@either_way
def test_a_load_that_is_stuck_for_good_stops_the_worker(
    make_engine: Make, mode: str, layer: int | None
) -> None:
    stuck = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, layer=layer))
    short = {"load.deadline_s": 0.2, "transfer.stuck_s": 1.0, "transfer.close_s": 0.1}
    engine = stored(make_engine, stuck, mode, **short)
    engine.add(make_request(PROMPT, "two"))
    with pytest.raises(ClosedError, match=r"load\.deadline_s \(0\.2 s\).*twice transfer\.stuck_s \(2 s\)"):
        engine.step()
    stuck.movers[0].release()
