"""Resets of the cache of a model with several KV groups: after a reset, flexkv serves no page that was stored before
it."""

from __future__ import annotations

from typing import Any

from .conftest import FAULTY, Engines
from .session import EngineSession, Prompt

SLOW_STORES = [{"action": "delay", "kind": "store", "delay_s": 0.01}]
"""Fault rules that make stores slow, so that they are in flight when the reset comes."""
FORGETFUL = FAULTY | {"kv_connector": "ForgetfulConnector"}


def test_a_reset_forgets_all_groups(hybrid: Any, stream: int) -> None:
    session = hybrid()
    prompt = Prompt.of(500, stream)
    session.check_one(prompt)
    session.settle()
    assert session.call("reset", connector=True)["done"]
    session.call("scribble")
    assert session.check_one(prompt).cached == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_a_reset_right_after_the_last_token(hybrid: Any, stream: int) -> None:
    session = hybrid(SLOW_STORES)
    prompt = Prompt.of(1000, stream, max_tokens=1)
    session.check_one(prompt)
    assert session.call("reset", connector=True)["done"]
    session.settle()
    session.call("scribble")
    assert session.check_one(prompt).cached == 0, "stored before the reset, published after it"
    session.settle()


def reset_on_new_weights(session: EngineSession, stream: int) -> tuple[Prompt, list[Prompt]]:
    """Resets the cache while stores are in flight, and changes the weights. Returns a prompt that was stored before the
    reset, and the prompts whose stores were in flight.
    """
    old = Prompt.of(700, stream)
    session.check_one(old)
    prompts = [Prompt.of(500 + 20 * n, stream + n + 1) for n in range(3)]
    reply = session.call(
        "reset_while_running",
        requests=[prompt.wire() for prompt in prompts],
        steps=2,
        connector=True,
        running=True,
        new_weights=True,
    )
    assert reply["done"]
    session.forget()
    return old, prompts


def test_new_weights_with_stores_in_flight(hybrid: Any, engines: Engines, stream: int) -> None:
    session = hybrid(SLOW_STORES)
    old, prompts = reset_on_new_weights(session, stream)
    [cold] = session.ask(old)
    assert cold.cached == 0
    assert cold.tokens != session.reference.tokens(old)
    session.forget()
    [hit] = session.ask(old)
    assert (hit.tokens, hit.cached) == (cold.tokens, old.whole_blocks)
    # The engine has computed the prompts whose stores the reset interrupted again, with the new weights only.
    asked = session.ask(*prompts)
    for prompt, answer in zip(prompts, asked, strict=True):
        salted = Prompt(prompt.ids, prompt.max_tokens, salt="nobody else's")
        [fresh] = session.ask(salted)
        assert fresh.cached == 0
        assert answer.tokens == fresh.tokens
    engines.close()


def test_control_without_a_reset_old_weights_answer(hybrid: Any, engines: Engines, stream: int) -> None:
    session = hybrid(SLOW_STORES, FORGETFUL)
    old, _ = reset_on_new_weights(session, stream)
    [answer] = session.ask(old)
    assert answer.cached == old.whole_blocks
    [fresh] = session.ask(Prompt(old.ids, old.max_tokens, salt="nobody else's"))
    assert answer.tokens != fresh.tokens
    engines.close()
