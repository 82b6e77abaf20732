"""A running engine, with the operations that tests use. Tests send it prompts, compare its answers with those of an
engine without a connector, drop its prefix cache, and overwrite its free blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from demo.engine_process import EngineProcess
from demo.model import prompt_tokens

BLOCK_TOKENS = 32
"""Number of tokens in a block: the smallest block size that vLLM allows on a CPU."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        extra: the sampling parameters' extra_args; its "kv_transfer_params" reach the connector.
        log_probabilities: whether the answer includes the log probabilities of its tokens.
    """

    ids: tuple[int, ...]
    max_tokens: int = 12
    salt: str = ""
    extra: dict[str, Any] | None = None
    log_probabilities: bool = False

    @classmethod
    def of(cls, count: int, stream: int, **fields: Any) -> Prompt:
        """Makes a prompt of `count` tokens. Prompts of the same stream have the same tokens: a longer prompt begins
        with the tokens of a shorter one.
        """
        return cls(tuple(prompt_tokens(count, stream)), **fields)

    def first(self, count: int) -> Prompt:
        """Returns the same request with only the first `count` tokens of the prompt."""
        return replace(self, ids=self.ids[:count])

    def then(self, tokens: Sequence[int]) -> Prompt:
        """Returns the same request with `tokens` appended to the prompt, like the next turn of a conversation."""
        return replace(self, ids=(*self.ids, *tokens))

    def wire(self) -> dict[str, Any]:
        return {
            "ids": list(self.ids),
            "max_tokens": self.max_tokens,
            "salt": self.salt,
            "extra": self.extra,
            "logprobs": self.log_probabilities,
        }

    @property
    def whole_blocks(self) -> int:
        """The largest number of the prompt's tokens that can be hits in full blocks. The engine always computes the
        last token itself."""
        return (len(self.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    """The engine's answer to a prompt.

    Attributes:
        cached: number of prompt tokens that were hits, in the engine's prefix cache or in the connector.
    """

    tokens: tuple[int, ...]
    cached: int
    finish: str | None
    ttft_s: float | None
    log_probabilities: tuple[float, ...] = ()

    @classmethod
    def of(cls, result: dict[str, Any]) -> Answer:
        return cls(
            tuple(result["tokens"]),
            result["cached"] or 0,
            result["finish"],
            result["ttft_s"],
            tuple(result.get("logprobs", ())),
        )


class Reference:
    """An engine with neither a connector nor a prefix cache. Its answers are the expected answers. It remembers them
    for repeated prompts."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        key = (prompt.ids, prompt.max_tokens)
        if key not in self._known:
            [result] = self._process.generate([Prompt(prompt.ids, prompt.max_tokens).wire()])
            self._known[key] = tuple(result["tokens"])
        return self._known[key]

    def log_probabilities(self, prompt: Prompt) -> tuple[float, ...]:
        """Returns the log probabilities of the answer's tokens."""
        [result] = self._process.generate([replace(prompt, log_probabilities=True).wire()])
        return tuple(result["logprobs"])


class EngineSession:
    """A running engine, and the reference engine for its answers."""

    def __init__(self, process: EngineProcess, reference: Reference) -> None:
        self.process = process
        self.reference = reference

    def ask(self, *prompts: Prompt) -> list[Answer]:
        """Runs the prompts together, and returns the answers without comparing them."""
        return [Answer.of(result) for result in self.process.generate([prompt.wire() for prompt in prompts])]

    def check(self, *prompts: Prompt) -> list[Answer]:
        """Runs the prompts together, and asserts that every answer has exactly the tokens of the reference's answer."""
        answers = self.ask(*prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            self.judge(prompt, answer)
        return answers

    def check_one(self, prompt: Prompt) -> Answer:
        [answer] = self.check(prompt)
        return answer

    def judge(self, prompt: Prompt, answer: Answer) -> None:
        assert answer.finish == "length", f"finished with {answer.finish!r} after {answer.tokens}"
        assert answer.tokens == self.reference.tokens(prompt), (
            f"prompt of {len(prompt.ids)} tokens, {answer.cached} of them cached: wrong output"
        )

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self.process.call(operation, **arguments)

    def settle(self) -> None:
        """Steps the engine until no work of earlier requests remains. Fails if the work does not end in time."""
        done = self.call("drain")
        assert done["drained"], f"the scheduler still has work long after the last request: {done}"

    def forget(self, seed: int = 1) -> None:
        """Drops the engine's own prefix cache, shuffles the free block ids, and overwrites every free block with
        garbage.
        """
        self.settle()
        assert self.call("reset")["done"], "no reset: blocks are still referenced"
        pool = self.call("pool")
        assert pool["held"] == 0, f"blocks still held with no request left: {pool}"
        self.call("shuffle", seed=seed)
        spoiled = self.call("scribble", seed=seed)
        assert spoiled["blocks"] == spoiled["free"], f"not all free blocks were spoiled: {spoiled}"

    def abort_while_loading(self, stream: int) -> None:
        """Aborts one of two requests during its async load, and immediately adds another request. Checks that the
        answers to the two remaining requests are right, and that no request remains and no block stays referenced.
        """
        prompts = [Prompt.of(700, stream), Prompt.of(650, stream + 1)]
        later = Prompt.of(900, stream + 2)
        self.check(*prompts)
        self.forget()
        reply = self.call(
            "abort",
            requests=[prompt.wire() for prompt in prompts],
            victim=0,
            status="WAITING_FOR_REMOTE_KVS",
            later=[later.wire()],
        )
        assert reply["aborted"], reply
        for prompt, result in zip((prompts[1], later), reply["requests"][1:], strict=True):
            assert tuple(result["tokens"]) == self.reference.tokens(prompt)
        self.settle()
        assert self.call("requests_held")["held"] == 0
        self.forget()
        self.check(*prompts)

    def metric(self, name: str) -> float:
        """Returns the sum of a counter or gauge over its labels, or the value of one series if `name` has labels.
        Returns 0 if there is no such metric.
        """
        family = name.partition("{")[0]
        values = self.process.metrics(family)
        return sum(value for key, value in values.items() if name in (key, key.partition("{")[0]))
