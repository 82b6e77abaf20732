"""A running engine with flexkv. Also the checks that each of flexkv's integrations with SGLang must pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import PROMPTS, Judge, request

FILLERS = [name for name in PROMPTS if name.startswith("filler")]
"""Names of prompts that together have more tokens than the engine's pool."""

TENANTS: tuple[dict[str, str], ...] = ({"extra_key": "a tenant"}, {"cache_salt": "a tenant"})


def whole(name: str) -> int:
    """Returns the number of tokens in the full pages of the prompt `name`."""
    return len(PROMPTS[name]) // PAGE_TOKENS * PAGE_TOKENS


class Asked(ABC):
    """A running engine with flexkv. Each subclass starts it with one of flexkv's integrations."""

    engine: SglangProcess

    @abstractmethod
    def forget(self) -> None:
        """Waits for stores in flight. Then empties the engine's own caches, and overwrites their memory."""

    @abstractmethod
    def served(self, answer: dict[str, Any]) -> int:
        """Returns how many tokens of the prompt came from flexkv. Depending on the subclass, tokens from SGLang's own
        caches may count, too.
        """

    def ask(self, *names: str, **more: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.call(
            "generate", requests=[request(name, **more) for name in names]
        )
        return answers

    def ask_one(self, name: str, **more: Any) -> dict[str, Any]:
        [answer] = self.ask(name, **more)
        return answer

    # --- checks that every integration with SGLang must pass ---

    def serves_after_a_flush(self, judge: Judge, name: str = "a") -> None:
        """Checks that a new prompt is computed. After a flush of the engine's caches, all its full pages must be
        hits."""
        cold = self.ask_one(name)
        judge(name, cold)
        assert cold["cached"] == 0, cold
        self.forget()
        answer = self.ask_one(name)
        judge(name, answer)
        assert answer["cached"] == whole(name), answer

    def keeps_tenants_apart(self, judge: Judge) -> None:
        """Checks that tenants share no pages: the first request of each tenant is computed, and its second request is a
        hit."""
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
        """Checks that a prompt is a hit after other prompts have filled the engine's own caches."""
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
        """Aborts a request while it generates tokens, and another one before its first token. Checks that later hits
        are right.
        """
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
    """A control: checks that an answer that was computed from damaged pages differs from the expected answer."""
    assert answer["cached"] > 0
    with pytest.raises(
        AssertionError, match=f"(tokens|log probabilities) of the answer to {name!r} are others"
    ):
        judge(name, answer)
