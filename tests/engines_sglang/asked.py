"""An engine with flexkv, and the checks that every integration must pass: the same prompts,
whatever holds the pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import PROMPTS, Judge, request

FILLERS = [name for name in PROMPTS if name.startswith("filler")]
"""Prompts that together take more than the engine's pool."""

TENANTS: tuple[dict[str, str], ...] = ({"extra_key": "a tenant"}, {"cache_salt": "a tenant"})


def whole(name: str) -> int:
    """Tokens of a prompt in whole pages."""
    return len(PROMPTS[name]) // PAGE_TOKENS * PAGE_TOKENS


class Asked(ABC):
    """A running engine."""

    engine: SglangProcess

    @abstractmethod
    def forget(self) -> None:
        """Waits for stores under way, empties the engine's own caches, and spoils their memory."""

    @abstractmethod
    def served(self, answer: dict[str, Any]) -> int:
        """Tokens of an answer's prompt that did not come from the device's own cache."""

    def ask(self, *names: str, **more: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.call(
            "generate", requests=[request(name, **more) for name in names]
        )
        return answers

    def ask_one(self, name: str, **more: Any) -> dict[str, Any]:
        [answer] = self.ask(name, **more)
        return answer

    # --- what it has to show ---

    def serves_after_a_flush(self, judge: Judge, name: str = "a") -> None:
        """A prompt that the engine has never seen is computed, and then served whole."""
        cold = self.ask_one(name)
        judge(name, cold)
        assert cold["cached"] == 0, cold
        self.forget()
        answer = self.ask_one(name)
        judge(name, answer)
        assert answer["cached"] == whole(name), answer

    def keeps_tenants_apart(self, judge: Judge) -> None:
        """Each tenant's first request is computed, and its second one is served."""
        self.ask_one("a")
        self.forget()
        for who in TENANTS:
            answer = self.ask_one("a", **who)
            judge("a", answer)
            assert answer["cached"] == 0, (who, answer)
        self.forget()
        for who in ({}, *TENANTS):
            answer = self.ask_one("a", **who)
            judge("a", answer)
            assert self.served(answer) == whole("a"), (who, answer)

    def serves_what_was_evicted(self, judge: Judge) -> None:
        """The engine's own caches are filled with other prompts."""
        judge("b", self.ask_one("b"))
        for name in FILLERS:
            judge(name, self.ask_one(name))
        answer = self.ask_one("b")
        judge("b", answer)
        assert self.served(answer) > 0, answer
        assert answer["cached"] == whole("b"), answer

    def serves_a_shared_prefix_at_once(self, judge: Judge) -> None:
        names = ("shared 1", "shared 2")
        self.ask(*names)
        self.forget()
        answers = self.ask(*names)
        for name, answer in zip(names, answers, strict=True):
            judge(name, answer)
            assert answer["cached"] >= 240, answer
        assert sum(self.served(answer) for answer in answers) > 0

    def outlives_an_abort(self, judge: Judge) -> None:
        """One request is aborted while it produces tokens, and one before its first token."""
        both = ("aborted", "a")
        for name in both:
            judge(name, self.ask_one(name))
        self.forget()
        for after_tokens in (2, 0):
            asked = {**request("aborted"), "tokens": 600}
            ended = self.engine.call("abort", request=asked, after_tokens=after_tokens)
            assert ended["finish"] == "abort", ended
            self.forget()
        for name in both:
            answer = self.ask_one(name)
            judge(name, answer)
            assert self.served(answer) > 0, answer


def seen_to_be_damaged(judge: Judge, name: str, answer: dict[str, Any]) -> None:
    """The control: if the stored bytes were wrong, the judge would notice."""
    assert answer["cached"] > 0
    with pytest.raises(
        AssertionError, match=f"(tokens|log probabilities) of the answer to {name!r} are others"
    ):
        judge(name, answer)
