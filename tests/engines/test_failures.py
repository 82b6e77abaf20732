"""Loads and stores that fail in different ways. The engine's output must be right every time, except in the
controls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .conftest import FAULTY, Engines, connector
from .session import EngineSession, Prompt

CARELESS = FAULTY | {"kv_connector": "CarelessConnector"}
FAILED_LINE = re.compile(
    r"WARNING .*flexkv.*load from host memory, op \d+ of request \S+: (\d+) of (\d+) pages failed: rank 0: (.*)"
)
FAILED_LOADS = "vllm:flexkv_failed_pages_total{direction=load,reason=failed}"


def faulty(
    engines: Engines, rules: list[dict[str, Any]], kind: dict[str, Any] = FAULTY, **settings: Any
) -> EngineSession:
    """Starts a new engine, because fault rules count ops from the engine's start on."""
    engines.close()
    return engines.get(connector(kind, **settings), {"FAULT_RULES": json.dumps(rules)})


def failures_in_log(session: EngineSession) -> list[tuple[int, int, str]]:
    """Finds the failed loads in the engine's log, which is written at the default level. For each load, returns the
    number of failed pages, the number of all pages, and the reason.
    """
    found = FAILED_LINE.findall(session.process.log.read_text(errors="replace"))
    return [(int(failed), int(pages), reason) for failed, pages, reason in found]


def acted(session: EngineSession) -> int:
    return sum(rank["acted"] for rank in session.call("faults")["ranks"])


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_one_page_of_a_load_fails(engines: Engines, stream: int, load_mode: str) -> None:
    rules = [{"action": "fail", "kind": "load", "nth_op": 0, "page": 5}]
    session = faulty(engines, rules, load__mode=load_mode)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    assert acted(session) == 1
    session.settle()
    assert session.metric(FAILED_LOADS) == 1
    assert failures_in_log(session) == [(1, len(prompt.ids) // 32, "injected fault")]
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks, (
        "the recomputed blocks were not stored again"
    )


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_every_page_of_a_load_fails(engines: Engines, stream: int, load_mode: str) -> None:
    session = faulty(engines, [{"action": "fail", "kind": "load", "nth_op": 0}], load__mode=load_mode)
    prompt, other = Prompt.of(600, stream), Prompt.of(200, stream + 1)
    session.check(prompt, other)
    session.forget()
    session.check(prompt, other)
    session.forget()
    assert [answer.cached for answer in session.check(prompt, other)] == [
        prompt.whole_blocks,
        other.whole_blocks,
    ]


PAGE_FAILS = [{"action": "fail", "kind": "load", "nth_op": 0, "page": 3}]


def compute_from_a_failed_load(session: EngineSession, stream: int) -> Prompt:
    """Makes a page of a load fail, so that the engine computes new blocks from it.

    Returns the prompt with all these blocks. Before it returns, the engine has recomputed them, given the right answer,
    and dropped them from its own cache.
    """
    prompt = Prompt.of(400, stream)
    longer = prompt.then(Prompt.of(500, stream + 1).ids)
    session.check_one(prompt)
    session.forget()
    session.check_one(longer)
    assert acted(session) >= 1
    session.forget()
    return longer


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_what_a_failed_load_led_to_is_not_published(engines: Engines, stream: int, load_mode: str) -> None:
    session = faulty(engines, PAGE_FAILS, load__mode=load_mode)
    longer = compute_from_a_failed_load(session, stream)
    session.check_one(longer)
    session.forget()
    assert session.check_one(longer).cached == longer.whole_blocks


def test_control_a_careless_connector_serves_what_a_failed_load_led_to(engines: Engines, stream: int) -> None:
    """A control: if flexkv published blocks that were computed from a failed load, a later request would get a wrong
    answer."""
    session = faulty(engines, PAGE_FAILS, CARELESS, load__mode="sync")
    longer = compute_from_a_failed_load(session, stream)
    [answer] = session.ask(longer)
    assert answer.cached == longer.whole_blocks
    assert answer.tokens != session.reference.tokens(longer)


def test_lazy_stores_and_loads_that_fail(engines: Engines, stream: int) -> None:
    """Answers are right even if a store or a load fails in lazy mode. One page of a store fails, and one page of a load
    within a step."""
    rules = [
        {"action": "fail", "kind": "store", "nth_op": 0, "page": 1},
        {"action": "fail", "kind": "load", "nth_op": 0, "page": 2},
    ]
    engines.close()
    session = engines.get(
        connector(FAULTY, store__mode="lazy", load__mode="sync"),
        {"FAULT_RULES": json.dumps(rules)},
        num_gpu_blocks_override=41,
        max_model_len=1024,
        max_num_batched_tokens=160,
        max_num_seqs=4,
    )
    prompt = Prompt.of(500, stream)
    for round_number in range(3):
        session.check_one(prompt)
        for other in range(1, 4):
            session.check_one(Prompt.of(700, stream + 10 * round_number + other))
        session.settle()
        session.call("shuffle", seed=round_number)
        session.call("scribble", seed=round_number)
    assert acted(session) == 2
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_control_damaged_pages_change_the_output(engines: Engines, stream: int) -> None:
    """A control: without digests flexkv does not find damaged pages, and the output changes. So the other tests would
    fail if a wrong byte were served.
    """
    session = faulty(engines, [{"action": "corrupt", "kind": "store"}])
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_digests_find_damaged_pages(engines: Engines, stream: int, load_mode: str) -> None:
    rules = [{"action": "corrupt", "kind": "store", "page": 2, "corrupt_bytes": 1}]
    session = faulty(engines, rules, load__mode=load_mode, host__verify=True)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    assert session.metric(FAILED_LOADS) >= 1


def test_failed_stores_are_misses(engines: Engines, stream: int) -> None:
    session = faulty(engines, [{"action": "fail", "kind": "store", "nth_op": 0}])
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.parametrize("abort", [False, True])
def test_a_load_past_its_deadline_keeps_its_blocks(engines: Engines, stream: int, abort: bool) -> None:
    """If a load is past its deadline, no other request gets its blocks before its copy has ended. The engine reports
    the load only then. Other requests run meanwhile.
    """
    rules = [{"action": "stall", "kind": "load", "nth_op": 0, "page": 1}]
    session = faulty(engines, rules, load__deadline_s=0.2, transfer__stuck_s=30)
    prompt = Prompt.of(600, stream)
    others = [Prompt.of(500 + 30 * n, stream + 1 + n, max_tokens=30) for n in range(3)]
    session.check_one(prompt)
    session.forget()
    reply = session.call(
        "stuck_load", victim=prompt.wire(), others=[other.wire() for other in others], wait_s=1.0, abort=abort
    )
    assert reply["late"]["status"] in ("WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED")
    assert reply["late"]["held"] >= len(prompt.ids) // 32, "the blocks of a copy in flight were given away"
    for other, result in zip(others, reply["requests"][1:], strict=True):
        assert tuple(result["tokens"]) == session.reference.tokens(other)
    if not abort:
        assert tuple(reply["requests"][0]["tokens"]) == session.reference.tokens(prompt)
    session.settle()
    assert session.call("requests_held")["held"] == 0
    # After that, other requests can use the blocks at once.
    session.check(*others)
    session.forget()
    session.check(prompt, *others)


def test_a_stuck_lane_goes_down_and_requests_go_on(engines: Engines, stream: int) -> None:
    rules = [{"action": "stall", "kind": "load", "nth_op": 0}]
    session = faulty(engines, rules, load__deadline_s=0.2, transfer__stuck_s=0.5)
    prompt, other = Prompt.of(400, stream), Prompt.of(350, stream + 1)
    session.check(prompt, other)
    session.forget()
    reply = session.call(
        "stuck_load", victim=prompt.wire(), others=[other.wire()], wait_s=2.0, abort=False, deadline_s=30.0
    )
    for asked, result in zip((prompt, other), reply["requests"], strict=True):
        assert tuple(result["tokens"]) == session.reference.tokens(asked)
    session.check(prompt, other, Prompt.of(200, stream + 2))


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_a_request_whose_loads_stay_too_slow_is_computed(
    engines: Engines, stream: int, load_mode: str
) -> None:
    """If copies stay too slow, flexkv does not promise the same pages again, and the engine computes the request. No
    page is bad, so flexkv drops none. Without this rule, loads of the request would fail again as long as copies are
    slow.
    """
    rules = [{"action": "delay", "kind": "load", "delay_s": 0.2}]
    session = faulty(
        engines, rules, load__mode=load_mode, load__deadline_s=0.1, transfer__stuck_s=30, host__verify=True
    )
    prompt = Prompt.of(400, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    tried = session.metric("vllm:flexkv_hit_tokens_total")
    assert 0 < tried <= 2 * prompt.whole_blocks, "the same load was tried again and again"
    session.settle()
    blocks = prompt.whole_blocks // 32
    assert failures_in_log(session)[0] == (blocks, blocks, "past load.deadline_s")
