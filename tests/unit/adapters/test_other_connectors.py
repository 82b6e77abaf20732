"""vLLM's MultiConnector can use another connector beside flexkv's. If the load of that other connector fails, flexkv
learns this only from the outcome of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
LAZY = {"store.mode": "lazy", "store.max_reference_share": 1.0}


def quiet(engine: MiniEngine) -> None:
    """Waits until the worker's copies have ended, and until all pages that need no report from the engine are
    published.
    """
    while engine.workers[0]._ops._ops:
        engine.workers[0].poll(idle=True)
    assert engine.side.match(make_request(range(9), "probe"), 0) == (0, False)


def run_beside_a_failed_load(engine: MiniEngine, between: Callable[[], object]) -> None:
    """Runs a step of a request. Its blocks from block 1 on come from another connector's failed load, or are computed
    from such blocks. Calls `between` before the failure is reported.
    """
    request = make_request(PROMPT, "one")
    engine.add(request)
    request.num_computed_tokens = 8  # these tokens came from the other connector
    blocks = [block.block_id for block in engine.live["one"].blocks]
    hear = engine.hold_reports()
    engine.step()
    quiet(engine)
    assert engine.stored_pages == 0, "published before the step's outcome was heard"
    between()
    quiet(engine)
    assert engine.stored_pages == 0, "published before the step's outcome was heard"
    engine.failed_by_another = {blocks[1]}
    hear()


def served(engine: MiniEngine) -> int:
    """Returns how many of the prompt's blocks a lookup would promise."""
    keys = engine.keys_of(make_request(PROMPT, "probe"))
    return int(engine.unit.manager.match("probe", [keys], 0).blocks)


def test_nothing_computed_from_another_connectors_failed_load_is_published(make_engine: Make) -> None:
    engine = make_engine()
    run_beside_a_failed_load(engine, lambda: None)
    engine.drain()
    assert (engine.stored_pages, served(engine)) == (1, 1)
    engine.live["one"].request.num_computed_tokens = 0
    engine.step()
    engine.check("one")
    engine.finish("one")
    engine.drain()
    assert served(engine) == 5


def test_what_went_well_is_published(make_engine: Make) -> None:
    """The control: if no load fails, all blocks of the step are published and served."""
    engine = make_engine()
    engine.add(make_request(PROMPT, "one"))
    hear = engine.hold_reports()
    engine.step()
    quiet(engine)
    hear()
    quiet(engine)
    assert served(engine) == 5


def test_an_abort_before_the_outcome_is_heard_publishes_nothing_of_it(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    run_beside_a_failed_load(engine, lambda: engine.finish("one"))
    engine.drain()
    assert served(engine) == 1


def test_a_preemption_before_the_outcome_is_heard_publishes_nothing_of_it(make_engine: Make) -> None:
    engine = make_engine()
    run_beside_a_failed_load(engine, lambda: engine.preempt("one"))
    engine.drain()
    assert served(engine) == 1


@pytest.mark.parametrize("leave", [lambda engine: engine.finish("one"), lambda engine: engine.preempt("one")])
def test_lazy_stores_hear_of_it_after_the_request_has_gone(
    make_engine: Make, leave: Callable[[MiniEngine], object]
) -> None:
    engine = make_engine(blocks=13, **LAZY)

    def leave_and_press() -> None:
        leave(engine)
        # The request's blocks are now at the head of the free queue.
        engine.pool.get_new_blocks(6)
        engine.step({})

    run_beside_a_failed_load(engine, leave_and_press)
    for _ in range(3):
        engine.step({})
    engine.drain()
    assert served(engine) <= 1


def test_the_lost_table_of_a_request_resumed_in_the_same_step_is_remembered(make_engine: Make) -> None:
    """flexkv remembers the lost block table of a request that is preempted and resumed in the same step. A reset under
    running requests preempts a request and looks it up again before the engine's next step reports the preemption.
    """
    engine = make_engine(blocks=64)
    engine.run(make_request(PROMPT[:8], "short"))
    engine.forget()
    before = engine.stored_pages
    request = make_request(PROMPT, "one")
    assert engine.add(request) == 8
    engine.end_load("one")
    request.num_computed_tokens = 16  # blocks 2 and 3 came from the other connector
    blocks = [block.block_id for block in engine.live["one"].blocks]
    hear = engine.hold_reports()
    engine.step()
    assert engine.preempt_and_resume("one") == 8, "the control of this test: the resumed request has a hit"
    quiet(engine)
    assert engine.stored_pages == before, "published before the step's outcome was heard"
    engine.failed_by_another = {blocks[2]}
    hear()
    engine.end_load("one")
    engine.drain()
    assert (engine.stored_pages - before, served(engine)) == (0, 2)
    engine.step()
    engine.check("one")
    engine.finish("one")
    engine.drain()
    assert served(engine) == 5


def test_a_table_resumed_in_the_same_step_without_a_failure_is_published(make_engine: Make) -> None:
    """The control: if no block failed, the blocks of a request that is preempted and resumed in the same step are
    published.
    """
    engine = make_engine(blocks=64)
    engine.run(make_request(PROMPT[:8], "short"))
    engine.forget()
    assert engine.add(make_request(PROMPT, "one")) == 8
    engine.end_load("one")
    hear = engine.hold_reports()
    engine.step()
    assert engine.preempt_and_resume("one") == 8
    hear()
    engine.end_load("one")
    engine.drain()
    assert served(engine) == 5
