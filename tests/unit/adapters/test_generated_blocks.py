"""flexkv offers the blocks of generated tokens to the tiers several at a time. It records the length at which a
request's next blocks are due, and steps skip the request until it has this length. flexkv deletes the record when
blocks must be offered again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.cache.stores.eager import EagerStores
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.test_request_fields import Session
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 100 + 2 * BLOCK_TOKENS))


def stored_pages(engine: MiniEngine) -> int:
    engine.drain()
    return engine.unit.manager.stats().stored_pages


def tracker_of_a_prompt(engine: MiniEngine) -> RequestTracker:
    """Runs a request until its prompt has been stored. Returns the request's tracker, which holds the planner's
    state.
    """
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    tracker = engine.side.requests.live["one"]
    assert stored_pages(engine) == 2
    assert tracker.next_offer == (2 + 4) * BLOCK_TOKENS
    return tracker


def test_a_step_looks_at_no_table_of_a_request_without_a_block_to_offer(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    tracker = tracker_of_a_prompt(engine)
    looks: list[Any] = []
    certain_end = EagerStores._certain_end

    def look(*args: Any) -> int:
        looks.append(args)
        return certain_end(*args)

    def decode() -> None:
        tracker.request.append_output_token_ids([7])
        engine.step({"one": 1})

    engine.live["one"].blocks += engine.pool.get_new_blocks(1)
    monkeypatch.setattr(EagerStores, "_certain_end", look)
    decode()
    assert not looks
    tracker.next_offer = 0  # the control: the request counts as long enough
    decode()
    assert looks


def test_a_longer_prompt_is_offered_at_once(make_engine: Make) -> None:
    engine = make_engine()
    session = Session(engine, PROMPT, None)
    assert stored_pages(engine) == 2
    session.go_on(range(500, 500 + BLOCK_TOKENS), None)
    assert stored_pages(engine) == 3


def test_blocks_that_a_failed_load_takes_back_are_offered_again(make_engine: Make) -> None:
    engine = make_engine()
    tracker = tracker_of_a_prompt(engine)
    engine.side._completions.take_failed_blocks({tracker.block_ids[1]})
    assert tracker.tables[0].cursor == 1
    assert tracker.next_offer == 0


def test_a_request_that_begins_again_offers_its_blocks_again(make_engine: Make) -> None:
    tracker = tracker_of_a_prompt(make_engine())
    tracker.restart()
    assert tracker.next_offer == 0
