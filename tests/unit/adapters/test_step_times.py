"""flexkv measures an engine's speed from the times of its steps. These tests script the times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.adapters.vllm.step_times import StepTimes
from flexkv.cache.ledger.cost import LinearFit


class Script:
    """Scripts steps with the number of tokens of each request, and a clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.line = LinearFit()
        self.times = StepTimes(self.line, lambda: self.now_s)

    def began(self, step: int, *tokens: int, waits: bool = False) -> None:
        output: Any = SimpleNamespace(
            num_scheduled_tokens={str(n): count for n, count in enumerate(tokens)},
            total_num_scheduled_tokens=sum(tokens),
        )
        self.times.began(step, output, waits)

    def ended(self, step: int, after_s: float) -> None:
        self.now_s += after_s
        self.times.ended(step)


def test_a_prefill_step_is_measured_with_all_its_tokens() -> None:
    script = Script()
    script.began(1, 500, 1, 1)
    script.ended(1, 2.0)
    assert script.line.line() == pytest.approx((0.0, 2.0 / 502))


def test_a_step_behind_another_begins_when_that_has_ended() -> None:
    script = Script()
    script.began(1, 100)
    script.began(2, 100)
    script.ended(1, 3.0)
    script.ended(2, 1.0)
    assert script.line.samples == 2
    assert script.line.line()[1] == pytest.approx(0.02, rel=0.05), "three and one second for a hundred each"


@pytest.mark.parametrize(
    ("tokens", "waits"), [((1, 1, 1), False), ((8,) * 40, False), ((40,), False), ((500,), True)]
)
def test_what_says_nothing_about_prefill_is_left_out(tokens: tuple[int, ...], waits: bool) -> None:
    script = Script()
    script.began(1, *tokens, waits=waits)
    script.ended(1, 1.0)
    assert script.line.samples == 0


def test_steps_that_were_never_heard_of_are_passed_over() -> None:
    script = Script()
    script.began(1, 100)
    script.began(2, 100)
    script.ended(2, 1.0)
    assert script.line.samples == 1
    for step in range(3, 1000):
        script.began(step, 100)
    script.ended(999, 1.0)
    assert script.line.samples == 2
