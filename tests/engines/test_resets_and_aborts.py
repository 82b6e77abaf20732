"""Resets of caches, and aborts of requests, while copies are in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_model

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference


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


@pytest.mark.parametrize("steps", [2, 5])
def test_a_request_preempted_and_resumed_in_one_step_loads_what_is_stored(
    engines: Engines, stream: int, steps: int
) -> None:
    """A request that is preempted and resumed in one step loads its stored pages. A reset of the engine's own cache
    preempts running requests. The next step looks them up again, and gets hits on their pages.
    """
    session = engines.get(connector())
    prompts = [Prompt.of(500 + 20 * n, stream + n, max_tokens=8) for n in range(3)]
    session.check(*prompts)
    session.forget()
    hits = session.metric("vllm:flexkv_hit_tokens_total")
    reply = session.call(
        "reset_while_running",
        requests=[prompt.wire() for prompt in prompts],
        steps=steps,
        until_running=True,
        connector=False,
        running=True,
    )
    assert reply["done"]
    assert reply["preempted"] == len(prompts)
    assert [tuple(result["tokens"]) for result in reply["requests"]] == [
        session.reference.tokens(prompt) for prompt in prompts
    ]
    session.forget()
    whole = sum(prompt.whole_blocks for prompt in prompts)
    loaded = session.metric("vllm:flexkv_hit_tokens_total") - hits
    assert loaded >= 2 * whole, "not loaded before the reset and after it"
    session.check(*prompts)


SLOW_STORES = {"FAULT_RULES": json.dumps([{"action": "delay", "kind": "store", "delay_s": 0.01}])}
"""Makes stores slow, so that they are in flight when the reset comes."""


def reset_during_stores(session: EngineSession, stream: int, steps: int, **how: Any) -> list[Prompt]:
    """Resets the cache while the prompts' blocks are being stored. Returns the prompts after all of them have been
    answered.
    """
    prompts = [Prompt.of(500 + 20 * n, stream + n, max_tokens=8) for n in range(3)]
    reply = session.call(
        "reset_while_running",
        requests=[prompt.wire() for prompt in prompts],
        steps=steps,
        connector=True,
        running=True,
        **how,
    )
    assert reply["done"]
    if not how:
        for prompt, result in zip(prompts, reply["requests"], strict=True):
            assert tuple(result["tokens"]) == session.reference.tokens(prompt)
    session.forget()
    return prompts


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_reset_with_stores_in_flight(engines: Engines, stream: int, steps: int) -> None:
    session = engines.get(connector(FAULTY), SLOW_STORES)
    session.check(*reset_during_stores(session, stream, steps))


@pytest.fixture
def retrained(engines: Engines) -> Reference:
    """An engine without a connector and with the new weights."""
    return changed(engines, "load_new_weights")


def changed(engines: Engines, call: str, **arguments: Any) -> Reference:
    """An engine without a connector, whose weights were changed by `call`."""
    session = engines.another(None, enable_prefix_caching=False)
    session.call(call, **arguments)
    return Reference(session.process)


def test_new_weights_with_stores_in_flight(engines: Engines, stream: int, retrained: Reference) -> None:
    """A block that was computed with the old weights is not served, even if its store was in flight at the change."""
    engines.close()
    session = engines.get(connector(FAULTY), SLOW_STORES)
    old = Prompt.of(700, stream + 7)
    session.check_one(old)
    prompts = reset_during_stores(session, stream, steps=2, new_weights=True)
    session.reference = retrained
    assert session.check_one(old).cached == 0
    session.check(*prompts)
    session.forget()
    # Blocks that were computed with the new weights are stored and served.
    assert [answer.cached for answer in session.check(old, *prompts)] == [
        prompt.whole_blocks for prompt in (old, *prompts)
    ]
    # Closes the engine, because the next test needs one with the old weights, like its reference.
    engines.close()


def test_control_without_a_reset_old_weights_answer(
    engines: Engines, stream: int, retrained: Reference
) -> None:
    session = engines.get(connector(FAULTY | {"kv_connector": "ForgetfulConnector"}), SLOW_STORES)
    old = Prompt.of(700, stream + 7)
    session.check_one(old)
    reset_during_stores(session, stream, steps=2, new_weights=True)
    [answer] = session.ask(old)
    assert answer.cached == old.whole_blocks
    assert answer.tokens != retrained.tokens(old)
    engines.close()


@pytest.mark.parametrize("call", ["load_new_weights", "reload_weights"])
def test_new_weights_without_a_reset(
    engines: Engines, stream: int, model: Path, tmp_path: Path, call: str
) -> None:
    """If the engine's weights change, flexkv serves no page of the old weights, even if only the engine's own cache is
    reset."""
    arguments = {}
    if call == "reload_weights":
        arguments["folder"] = str(write_model(tmp_path, "tiny", seed=1))
    engines.close()
    session = engines.get(connector())
    old = Prompt.of(700, stream + 7)
    first = session.check_one(old).tokens
    session.settle()
    session.call(call, **arguments)
    session.forget()
    session.reference = changed(engines, call, **arguments)
    assert session.check_one(old).cached == 0
    assert session.reference.tokens(old) != first
    session.forget()
    assert session.check_one(old).cached == old.whole_blocks
    engines.close()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_new_weights_while_a_block_is_not_full(
    engines: Engines, stream: int, retrained: Reference, mode: str
) -> None:
    """The KV of the block's first tokens is computed with the old weights. vLLM serves it until its own reset, and
    nothing that depends on it is stored.
    """
    engines.close()
    session = engines.get(connector(store__mode=mode))
    first = Prompt.of(BLOCK_TOKENS - 12, stream)
    reply = session.call("new_weights_within_a_block", ids=list(first.ids), tokens=3 * BLOCK_TOKENS)
    assert reply["requests"][1]["cached"] >= BLOCK_TOKENS, "found in vLLM's own cache"
    session.reference = retrained
    prompt = Prompt(tuple(reply["prompt"]), 4)
    session.forget()
    assert session.check_one(prompt).cached == 0
    session.forget()
    assert session.check_one(prompt).cached == len(prompt.ids) - 1
    engines.close()


def test_control_new_weights_that_flexkv_does_not_see_get_old_answers(
    engines: Engines, stream: int, retrained: Reference
) -> None:
    engines.close()
    session = engines.get(connector())
    old = Prompt.of(700, stream + 7)
    session.check_one(old)
    session.settle()
    session.call("load_new_weights", hidden=True)
    session.forget()
    [answer] = session.ask(old)
    assert answer.cached == old.whole_blocks
    assert answer.tokens != retrained.tokens(old)
    engines.close()


def test_a_reset_right_after_the_last_token(engines: Engines, stream: int) -> None:
    session = engines.get(connector(FAULTY), SLOW_STORES)
    prompt = Prompt.of(1000, stream, max_tokens=1)
    session.check_one(prompt)
    assert session.call("reset", connector=True)["done"]
    session.call("drain")
    session.call("scribble")
    assert session.check_one(prompt).cached == 0, "stored before the reset, published after it"
    session.settle()


@pytest.mark.parametrize(
    "steps", [0, pytest.param(1, marks=pytest.mark.long), 2, pytest.param(6, marks=pytest.mark.long)]
)
# the outer loop, so that consecutive cases share an engine
@pytest.mark.parametrize("load_mode", ["async", "sync"])
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


def not_loaded(session: EngineSession) -> tuple[float, float]:
    """Returns two numbers: pages whose load failed, and pages whose load was cancelled."""
    session.settle()
    failed = session.metric("vllm:flexkv_failed_pages_total")
    return failed, session.metric("vllm:flexkv_cancelled_pages_total{direction=load}")


def test_an_abort_during_an_async_load_is_no_failure(engines: Engines, stream: int) -> None:
    rules = [{"action": "delay", "kind": "load", "delay_s": 0.02}]
    session = engines.get(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)})
    failed, cancelled = not_loaded(session)
    session.abort_while_loading(stream)
    now_failed, now_cancelled = not_loaded(session)
    assert now_failed == failed
    assert now_cancelled > cancelled


def test_control_a_load_that_fails_is_counted_as_failed(engines: Engines, stream: int) -> None:
    rules = [{"action": "fail", "kind": "load", "times": 1}]
    session = engines.get(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)})
    prompt = Prompt.of(700, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    failed, cancelled = not_loaded(session)
    assert failed > 0
    assert cancelled == 0
