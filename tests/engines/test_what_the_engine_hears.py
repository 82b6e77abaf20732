"""The connector's reports to the engine's scheduler: whether work is left, and which blocks were stored and removed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt

WITHIN_S = 60.0
WRITTEN = "vllm:flexkv_disk_pages_total{direction=write}"
DURABLE = "vllm:flexkv_disk_durable_pages_total"


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
    # The engine must keep stepping until the store has ended. But the store may be lost: vLLM need not recompute a
    # preempted request for it, and no block has to wait for the copy.
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


EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}

Announced = list[tuple[Any, ...]]
"""Content of an event: for each event, the block's hashes, its parent's hash, and its tokens."""


def on_disk(engines: Engines, folder: Path, **environment: str) -> EngineSession:
    """Starts an engine that uses the folder, after the previous engine has ended. Its events are recorded from its
    first step on.
    """
    session = engines.get(
        connector(disk__folders=str(folder), disk__bytes_per_folder="64MiB"),
        environment,
        kv_events_config=EVENTS,
    )
    session.call("watch_events")
    return session


def announced(session: EngineSession, medium: str) -> Announced:
    return [
        (event["hashes"], event["parent"], event["tokens"])
        for event in session.call("seen_events")["events"]
        if event["medium"] == medium and event["kind"] == "BlockStored"
    ]


def stored_on_disk(session: EngineSession, stream: int, blocks: int = 3) -> Announced:
    """Stores blocks, and waits for the events that announce them on disk. Returns the content of these events."""
    session.check_one(Prompt.of(blocks * BLOCK_TOKENS + 10, stream, max_tokens=2))
    session.settle()
    ends_s = time.monotonic() + WITHIN_S
    while len(announced(session, "STORAGE")) < blocks:
        assert time.monotonic() < ends_s, "not all blocks were announced"
        session.check_one(Prompt.of(5, stream + 1, max_tokens=2))
    return announced(session, "STORAGE")


def test_blocks_on_disk_are_announced_as_such(engines: Engines, stream: int, tmp_path: Path) -> None:
    session = on_disk(engines, tmp_path)
    assert len(stored_on_disk(session, stream)) == 3
    assert announced(session, "STORAGE") == announced(session, "CPU")


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_the_next_engine_announces_what_it_finds_on_disk(
    engines: Engines, stream: int, tmp_path: Path, killed: bool
) -> None:
    session = on_disk(engines, tmp_path)
    before = stored_on_disk(session, stream)
    if killed:
        ends_s = time.monotonic() + WITHIN_S
        while session.metric(DURABLE) < session.metric(WRITTEN):
            assert time.monotonic() < ends_s, "written pages did not become durable"
            session.ask(Prompt.of(5, 7, max_tokens=1))
            session.settle()
        session.process.kill()
    else:
        engines.close()
    session = on_disk(engines, tmp_path)
    session.settle()
    assert announced(session, "STORAGE") == before
    assert announced(session, "CPU") == []
    prompt = Prompt.of(3 * BLOCK_TOKENS + 10, stream, max_tokens=2)
    assert session.check_one(prompt).cached == 3 * BLOCK_TOKENS
    session.settle()
    own = [event for event in session.call("seen_events")["events"] if event["medium"] == "GPU"]
    assert [hashes for hashes, _, _ in before] == [[each] for event in own for each in event["hashes"]][:3]
    engines.close()


def test_another_seed_of_the_hashes_leaves_nothing_to_announce(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    stored_on_disk(on_disk(engines, tmp_path), stream)
    engines.close()
    session = on_disk(engines, tmp_path, PYTHONHASHSEED="5")
    session.settle()
    assert announced(session, "STORAGE") == []
    prompt = Prompt.of(3 * BLOCK_TOKENS + 10, stream, max_tokens=2)
    assert session.check_one(prompt).cached == 0, "its keys are made of the hashes"
    assert "PYTHONHASHSEED" in session.process.log.read_text()
    engines.close()
