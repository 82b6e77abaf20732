"""Requests that a real engine cannot blend. Each gets the answer of an engine without blending, including log
probabilities, and flexkv counts the reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from .blend_world import Documents, blending, new_results, results, salt, start_blending
from .conftest import Engines
from .session import Answer, EngineSession, Prompt

UNREAD = "vllm:flexkv_unread_request_fields_total{reason=value}"


@pytest.fixture
def session(engines: Engines) -> EngineSession:
    return start_blending(engines)


@pytest.fixture
def documents(session: EngineSession, stream: int) -> Documents:
    made = Documents.of(stream % 10_000_000)
    made.store(session)
    return made


def check_full(session: EngineSession, prompt: Prompt, answer: Answer) -> None:
    session.judge(prompt, answer)
    assert answer.cached == 0
    assert answer.log_probabilities == session.reference.log_probabilities(prompt)


def test_control_the_same_prompt_is_blended_where_nothing_is_wrong(
    session: EngineSession, documents: Documents
) -> None:
    """A control: the same prompt without the faults is blended. A request without a ratio gets the configured ratio, so
    a ratio of 0 must be given explicitly."""
    before = results(session)
    none, asked, zero = (session.ask(documents.blended(ratio))[0] for ratio in (None, 0.15, 0.0))
    assert new_results(session, before) == {"blended": 3}
    assert none.log_probabilities == asked.log_probabilities != zero.log_probabilities
    for answer in (none, zero):
        with pytest.raises(AssertionError):
            check_full(session, documents.prompt, answer)


@pytest.mark.parametrize(
    ("result", "spans", "more"),
    [
        ("salt", None, {"salt": ""}),
        ("salt", None, {"salt": "somebody's"}),
        ("segments", [(10, 60), (50, 90)], {}),
        ("segments", [(10, 60), (10, 60)], {}),
        ("segments", [(10, 10)], {}),
        ("segments", [(60, 10)], {}),
        ("segments", [(-1, 60)], {}),
        ("segments", [(10, 5000)], {}),
        ("no_segments", [], {}),
        ("short", [(10, 40)], {}),
    ],
)
def test_what_cannot_be_blended_is_computed_and_counted(
    session: EngineSession, documents: Documents, result: str, spans: Any, more: dict[str, Any]
) -> None:
    before = results(session)
    prompt = documents.blended(0.0, spans, **more)
    session.call("reset")
    [answer] = session.ask(prompt)
    check_full(session, prompt, answer)
    assert new_results(session, before) == {result: 1}


def test_a_salt_that_was_used_before_is_refused(session: EngineSession, documents: Documents) -> None:
    once = documents.blended(0.0)
    session.ask(once)
    before = results(session)
    again = documents.blended(0.0, salt=once.salt)
    [answer] = session.ask(again)
    check_full(session, again, answer)
    assert new_results(session, before) == {"used_salt": 1}


def test_a_prompt_without_a_separator_has_no_segments(session: EngineSession, stream: int) -> None:
    before = results(session)
    prompt = Prompt(Prompt.of(200, stream).ids, salt=salt(), extra=blending(True), log_probabilities=True)
    [answer] = session.ask(prompt)
    check_full(session, prompt, answer)
    assert new_results(session, before) == {"no_segments": 1}


def test_a_segment_with_a_time_to_live_is_not_kept(session: EngineSession, stream: int) -> None:
    before = results(session)
    extra = blending({"store": True})
    extra["kv_transfer_params"]["flexkv.ttl_s"] = 60
    prompt = Prompt(Prompt.of(96, stream).ids, salt=salt(), extra=extra, log_probabilities=True)
    [answer] = session.ask(prompt)
    check_full(session, prompt, answer)
    session.settle()
    assert new_results(session, before) == {"time_to_live": 1}
    whole = Prompt(prompt.ids + prompt.ids[:8], salt=salt(), extra=blending({"segments": [[0, 96]]}))
    session.check_one(whole)
    assert new_results(session, before) == {"time_to_live": 1, "miss": 1}


def test_log_probabilities_of_a_prompt_are_those_of_the_full_computation(
    session: EngineSession, documents: Documents
) -> None:
    before = results(session)
    plain = session.call("blend_scored", request=documents.plain().wire())
    asked = session.call("blend_scored", request=documents.blended(0.0).wire())
    assert asked == plain
    assert len(asked["scores"]) == len(documents.prompt.ids) - 1
    assert tuple(asked["tokens"]) == session.reference.tokens(documents.prompt)
    assert new_results(session, before) == {"prompt_logprobs": 1}


@pytest.mark.parametrize(
    "ask",
    [
        "yes",
        [[10, 60]],
        {"segments": "all"},
        {"segments": [[10]]},
        {"segments": [[10, 60.5]]},
        {"segments": [[10, True]]},
        {"segments": [[at, at + 1] for at in range(257)]},
        {"segments": [[10, 60]], "ratio": 1.5},
        {"segments": [[10, 60]], "ratio": "half"},
        {"segments": [[10, 60]], "share": 0.5},
        {"segments": [[10, 60]], "store": True},
    ],
    ids=str,
)
def test_an_ask_that_cannot_be_read_asks_for_nothing(
    session: EngineSession, documents: Documents, ask: object
) -> None:
    before, unread = results(session), session.metric(UNREAD)
    prompt = documents.blended(extra=blending(ask))
    [answer] = session.ask(prompt)
    check_full(session, prompt, answer)
    assert session.metric(UNREAD) == unread + 1
    assert new_results(session, before) == {}


def test_nothing_is_held_for_any_of_them(session: EngineSession) -> None:
    session.settle()
    assert session.call("blend_held") == {"live": 0, "pages": 0, "loads": 0, "staged": 0}
