"""The connector's reports to the engine's scheduler: the work that is left, and blocks that were added and removed."""

from __future__ import annotations

import json

import pytest

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt


@pytest.fixture
def session(engines: Engines) -> EngineSession:
    rules = [{"action": "stall", "kind": "store", "nth_op": 0}]
    return engines.get(
        connector(FAULTY, transfer__stuck_s=60),
        {"FAULT_RULES": json.dumps(rules)},
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )


def test_a_store_in_flight_is_work_and_holds_no_block(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(200, stream, max_tokens=1)
    session.check_one(prompt)
    assert [rank["stalled"] for rank in session.call("faults")["ranks"]] == [1]
    in_flight = session.call("connector_says")
    # A cache may lose a store, so preempted output counts; and no block has to wait for the copy.
    assert in_flight == {
        "requires_kv_delivery": False,
        "pending_block_frees": False,
        "pending_push_work": True,
    }
    assert session.call("pool")["held"] == 0
    session.call("release")
    session.settle()
    assert session.call("connector_says") == in_flight | {"pending_push_work": False}


def test_events_name_blocks_as_the_engine_does(session: EngineSession, stream: int) -> None:
    session.call("release")
    session.forget()
    session.call("watch_events")
    prompt = Prompt.of(3 * BLOCK_TOKENS + 10, stream, max_tokens=2)
    session.check_one(prompt)
    session.settle()
    events = session.call("seen_events")["events"]
    own = [event for event in events if event["kind"] == "BlockStored" and event["medium"] != "CPU"]
    named = [block_hash for event in own for block_hash in event["hashes"]]
    ours = [event for event in events if event["medium"] == "CPU"]
    assert [event["kind"] for event in ours] == ["BlockStored"] * 3
    assert [event["hashes"] for event in ours] == [[block_hash] for block_hash in named[:3]]
    assert [event["parent"] for event in ours] == [None, *named[:2]]
    first = [number * BLOCK_TOKENS for number in range(3)]
    assert [event["tokens"] for event in ours] == [list(prompt.ids[at : at + BLOCK_TOKENS]) for at in first]
    session.call("watch_events")
    assert session.call("reset", connector=True)["done"]
    session.check_one(Prompt.of(5, stream + 1, max_tokens=2))
    cleared = [event["kind"] for event in session.call("seen_events")["events"]]
    assert cleared.count("AllBlocksCleared") == 2, "the engine's own cache, and ours"
