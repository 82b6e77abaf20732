"""Sleep mode in a real engine. vLLM 0.32 calls no hook of the workers' connectors before it sleeps, so flexkv ends all
copies in the reset that precedes the sleep.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE

from .conftest import FAULTY, Engines, connector
from .session import EngineSession, Prompt

SLEEPY = FAULTY | {"kv_connector": "SleepyConnector"}
SLOW = {
    "FAULT_RULES": json.dumps(
        [{"action": "delay", "kind": kind, "delay_s": 0.01} for kind in ("store", "load")]
    )
}
"""Fault rules that make stores slow, so that they are in flight when the engine is sent to sleep."""


@pytest.fixture
def session(engines: Engines) -> EngineSession:
    return engines.get(connector(SLEEPY), SLOW)


def sleep(session: EngineSession, stream: int, mode: str, ends_copies: bool = True) -> dict[str, Any]:
    prompts = [Prompt.of(500 + 20 * n, stream + n, max_tokens=8) for n in range(3)]
    reply = session.call(
        "sleep_while_copying",
        requests=[prompt.wire() for prompt in prompts],
        mode=mode,
        ends_copies=ends_copies,
    )
    assert reply["before"] > 0, "nothing was in flight, so nothing was shown"
    if mode == "keep":
        for prompt, result in zip(prompts, reply["requests"], strict=True):
            assert tuple(result["tokens"]) == session.reference.tokens(prompt)
    assert [answer.cached for answer in session.check(*prompts)] == (
        [0, 0, 0] if mode == "abort" else [prompt.whole_blocks for prompt in prompts]
    )
    return reply


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_no_copy_is_in_flight_when_the_engine_loses_its_memory(
    session: EngineSession, stream: int, mode: str
) -> None:
    assert sleep(session, stream, mode)["at_sleep"] == 0
    session.forget()


def test_control_without_that_copies_outlive_the_memory(session: EngineSession, stream: int) -> None:
    assert sleep(session, stream, "abort", ends_copies=False)["at_sleep"] > 0
    session.forget()


def test_vllm_does_not_sleep_while_a_request_waits_for_its_load(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(500, stream)
    session.check_one(prompt)
    session.forget()
    reply = session.call("sleep_while_loading", request=prompt.wire())
    assert "Failed to reset KV cache" in reply["error"]
    assert not reply["asleep"]
    session.settle()
    assert session.call("requests_held")["held"] == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.parametrize(
    ("method", "arguments", "kept"),
    [
        ("sleep", {"level": 0}, True),
        ("sleep", {"level": 1}, False),
        ("sleep", {"level": 2}, False),
        ("reset_encoder_cache", {}, True),
        ("reset_mm_cache", {}, True),
    ],
)
def test_what_the_docs_say_is_left_after_a_call(
    session: EngineSession, stream: int, method: str, arguments: dict[str, Any], kept: bool
) -> None:
    prompt = Prompt.of(300, stream)
    session.check_one(prompt)
    session.settle()
    session.call("call_engine", method=method, **arguments)
    session.forget()
    assert session.check_one(prompt).cached == (prompt.whole_blocks if kept else 0)


def test_an_engine_in_processes_of_its_own_steps_until_nothing_moves(engines: Engines, stream: int) -> None:
    """An engine that goes to sleep first steps until no copy is in flight, because the scheduler cannot end copies of
    workers in other processes. If a copy were in flight at the reset, vLLM's sleep would raise.
    """
    session = engines.get(connector(SLEEPY), SLOW | SEPARATE_CORE)
    prompts = [Prompt.of(500 + 20 * n, stream + n, max_tokens=8) for n in range(3)]
    session.check(*prompts)
    session.call("call_engine", method="sleep", level=1)
    assert [answer.cached for answer in session.check(*prompts)] == [0, 0, 0]
