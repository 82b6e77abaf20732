"""What one engine does in a test: each case starts it in this process, and returns what it answered.

`transfer` is vLLM's `kv_transfer_config`, None for the same without flexkv. Every case returns a `Phases` as "phases".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from demo.model import prompt_tokens
from tests.engines_vllm33.engine import Engine, Request

Transfer = Mapping[str, Any] | None
Found = dict[str, Any]
Case = Callable[..., Found]

CASES: dict[str, Case] = {}

SHORT, SHORTER, LONG = prompt_tokens(150, 1), prompt_tokens(70, 2), prompt_tokens(330, 3)
PROMPTS = [SHORT, SHORTER, LONG]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Phases:
    """Answers by the name of what was asked for, as JSON takes them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add(self, name: str, answers: Sequence[Request]) -> None:
        self.found[name] = {
            "tokens": [answer.tokens for answer in answers],
            "cached": [answer.cached for answer in answers],
        }


@case
def served(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Computed, from vLLM's own prefix cache, from flexkv one by one, and from flexkv all at once."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("cold", lab.run_each(PROMPTS))
    lab.drain()
    phases.add("own", lab.run_each(PROMPTS))
    lab.forget()
    phases.add("hit", lab.run_each(PROMPTS))
    lab.forget()
    phases.add("together", lab.run(PROMPTS))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found
