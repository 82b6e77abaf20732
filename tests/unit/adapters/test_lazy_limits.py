"""What a lazy store must leave alone although a free block carries its hash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
LAZY = {"store.mode": "lazy", "store.max_reference_share": 1.0}


def stored_after_pressure(engine: MiniEngine) -> int:
    """Pages stored once the engine's free queue begins with the blocks of the requests before."""
    filler = make_request([*range(23)], "filler", extra_args={"flexkv.skip_save": True})
    engine.add(filler)
    engine.step()
    engine.finish("filler")
    engine.step({})
    engine.drain()
    return int(engine.side.unit.manager.stats().stored_pages)


@pytest.mark.parametrize(("skip", "pages"), [(True, 0), (False, 5)])
def test_what_a_caller_wants_kept_out_stays_out(make_engine: Make, skip: bool, pages: int) -> None:
    engine = make_engine(blocks=13, **LAZY)
    engine.run(make_request(PROMPT, "one", extra_args={"flexkv.skip_save": skip}))
    assert stored_after_pressure(engine) == pages


@pytest.mark.parametrize(("computed", "pages"), [(None, 5), (8, 2), (3, 0)])
def test_a_preempted_request_leaves_only_what_was_computed(
    make_engine: Make, computed: int | None, pages: int
) -> None:
    engine = make_engine(blocks=13, **LAZY)
    request = make_request(PROMPT, "one")
    engine.add(request)  # all of its blocks carry their hash from here on
    engine.step({"one": computed or request.num_tokens})
    live = engine.live.pop("one")
    request.num_computed_tokens = 0
    engine.pool.free_blocks(reversed(live.blocks))
    output_of = engine._output

    def output_with_preemption(scheduled: dict[str, int]) -> SchedulerOutput:
        output = output_of(scheduled)
        output.preempted_req_ids = {"one"}
        return output

    engine._output = output_with_preemption  # type: ignore[method-assign]
    engine.step({})
    engine._output = output_of  # type: ignore[method-assign]
    assert stored_after_pressure(engine) == pages


def test_a_store_that_failed_is_offered_again(make_engine: Make) -> None:
    engine = make_engine(blocks=13, **LAZY)
    engine.run(make_request(PROMPT, "one"))
    lazy = engine.side.parts.stores
    lazy._offered = {block.block_id: block.block_hash for block in engine.pool.blocks if block.block_hash}
    offered = np.array(sorted(lazy._offered), dtype=np.int32)
    assert stored_after_pressure(engine) == 0
    lazy.unpublished(offered)
    engine.step({})
    engine.drain()
    assert engine.side.unit.manager.stats().stored_pages > 0


def test_waiting_for_room_counts_one_lookup(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    engine.side.take_counters()
    for _ in range(3):
        assert engine.side.match(request, 0) == (20, True)
    counters = engine.side.take_counters()
    assert counters is not None
    assert counters.value("flexkv_lookup_tokens_total") == len(PROMPT) - 1
    assert counters.value("flexkv_hit_tokens_total") == 0
