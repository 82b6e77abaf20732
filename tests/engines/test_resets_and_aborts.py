"""What ends early: caches that are reset and requests that are aborted while something is under way."""

from __future__ import annotations

import json

import pytest

from .conftest import Engines, connector
from .session import Prompt
from .test_failures import FAULTY


def test_a_connector_reset_forgets_everything(engines: Engines, stream: int) -> None:
    session = engines.get(connector())
    prompt = Prompt.of(500, stream)
    session.check_one(prompt)
    session.settle()
    assert session.call("reset", connector=True)["done"]
    session.call("scribble")
    assert session.check_one(prompt).cached == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_reset_with_stores_in_flight_serves_nothing_old(engines: Engines, stream: int, steps: int) -> None:
    """The copies are slow enough to be under way when the weights would change."""
    rules = [{"action": "delay", "kind": "store", "delay_s": 0.01}]
    session = engines.get(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)})
    prompts = [Prompt.of(500 + 20 * n, stream + n, max_tokens=8) for n in range(3)]
    reply = session.call(
        "reset_while_running",
        requests=[prompt.wire() for prompt in prompts],
        steps=steps,
        connector=True,
        running=True,
    )
    assert reply["done"]
    for prompt, result in zip(prompts, reply["requests"], strict=True):
        assert tuple(result["tokens"]) == session.reference.tokens(prompt)
    session.forget()
    session.check(*prompts)


def test_a_reset_right_after_the_last_token(engines: Engines, stream: int) -> None:
    rules = [{"action": "delay", "kind": "store", "delay_s": 0.01}]
    session = engines.get(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)})
    prompt = Prompt.of(1000, stream, max_tokens=1)
    session.check_one(prompt)
    assert session.call("reset", connector=True)["done"]
    session.call("drain")
    session.call("scribble")
    assert session.check_one(prompt).cached == 0, "stored before the reset, published after it"
    session.settle()


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("load_mode", ["async", "sync"])  # the lower one: its cases in a row share an engine
def test_aborts_at_any_step_leave_nothing_behind(
    engines: Engines, stream: int, load_mode: str, steps: int
) -> None:
    session = engines.get(connector(load__mode=load_mode))
    prompts = [Prompt.of(700, stream), Prompt.of(300, stream + 1)]
    for known in (False, True):
        reply = session.call(
            "abort",
            requests=[prompt.wire() for prompt in prompts],
            victim=0,
            steps=steps,
            later=[prompts[0].wire()],
        )
        assert reply["aborted"]
        for prompt, result in zip((prompts[1], prompts[0]), reply["requests"][1:], strict=True):
            assert tuple(result["tokens"]) == session.reference.tokens(prompt), f"known: {known}"
        session.settle()
        assert session.call("requests_held")["held"] == 0
        session.forget()


def test_an_abort_during_an_async_load(engines: Engines, stream: int) -> None:
    rules = [{"action": "delay", "kind": "load", "delay_s": 0.02}]
    session = engines.get(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)})
    session.abort_while_loading(stream)
