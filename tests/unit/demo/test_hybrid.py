"""Tests of the second part of the demo, which uses a hybrid model: under which conditions it reports a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from demo.hybrid import BLOCK_TOKENS, PROMPT_TOKENS, HybridRun

ANSWER = tuple(range(12))
GOOD = HybridRun(ANSWER, ANSWER, ANSWER, (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS, stored_pages=69)


def test_a_run_as_it_should_be_has_no_problem() -> None:
    assert list(GOOD.problems()) == []
    assert "26%" in str(GOOD)


@pytest.mark.parametrize(
    "run",
    [
        replace(GOOD, hit=(1, *ANSWER[1:])),
        replace(GOOD, alone=(1, *ANSWER[1:])),
        replace(GOOD, cached=0),
        replace(GOOD, stored_pages=0),
        replace(GOOD, stored_pages=GOOD.whole_pages),
    ],
)
def test_what_should_not_be_is_a_problem(run: HybridRun) -> None:
    assert len(list(run.problems())) == 1
