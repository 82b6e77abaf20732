"""Two tensor-parallel ranks of the real SGLang engine, each with a manager of its own: both must do the same, whatever
happens on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import Judge, judge_by, request
from tests.engines_sglang.spied import Spied

TWO_RANKS = {"tp_size": 2}
ONE_CPU_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""SGLang wants to be told a rank's CPUs where there are more ranks than memory nodes; without its kernels for CPUs it
binds nothing."""
NAMES = ("a", "b", "aborted")
ALIKE = ("lookup", "load", "landed", "offload", "stored")


@pytest.fixture(scope="module")
def judge_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Holds answers to those of two ranks without flexkv and without a cache of their own."""
    log = tmp_path_factory.mktemp("two-ranks-alone") / "engine.log"
    with SglangProcess(model, log, {"disable_radix_cache": True, **TWO_RANKS}, **ONE_CPU_EACH) as engine:
        answers: dict[str, dict[str, Any]] = {
            name: engine.call("generate", requests=[request(name)])[0] for name in NAMES
        }
    return judge_by(answers)


@pytest.fixture(scope="module")
def spied(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    folder = tmp_path_factory.mktemp("two-ranks") / "engine"
    spied = Spied(model, folder, None, TWO_RANKS, ONE_CPU_EACH, host__verify=True)
    yield spied
    spied.engine.close()


def assert_alike(spied: Spied) -> None:
    """Both ranks found, loaded and stored the same, in the same order and with the same result."""
    for what in ALIKE:
        assert spied.notes(what, rank=0) == spied.notes(what, rank=1), what
        assert spied.notes(what), f"nothing of {what} to compare"


def test_both_ranks_load_what_they_stored_to_other_pages(spied: Spied, judge_two: Judge) -> None:
    [cold] = spied.ask("a")
    judge_two("a", cold)
    assert cold["cached"] == 0
    stored = spied.stored_pages()
    spied.forget()
    judge_two("b", spied.ask("b")[0])
    [answer] = spied.ask("a")
    judge_two("a", answer)
    assert answer["host"] == 200 // PAGE_TOKENS * PAGE_TOKENS
    assert not spied.pages_of_last("load") & stored
    assert_alike(spied)


def test_a_page_that_is_damaged_on_one_rank_fails_the_load_on_both(spied: Spied, judge_two: Judge) -> None:
    spied.ask("a")
    spied.order("corrupt-1")
    spied.forget()
    [failed] = spied.ask("a")
    assert failed["finish"] == "abort", failed
    landed = [spied.notes("landed", rank)[-1]["landed"] for rank in (0, 1)]
    assert landed == [True, False], "the other rank's page was whole"
    # What is gone on one rank is computed again on both, stored, and served.
    [computed] = spied.ask("a")
    judge_two("a", computed)
    spied.forget()
    [served] = spied.ask("a")
    judge_two("a", served)
    assert served["host"] == 200 // PAGE_TOKENS * PAGE_TOKENS


def test_an_aborted_request_leaves_both_ranks_alike(spied: Spied, judge_two: Judge) -> None:
    judge_two("aborted", spied.ask("aborted")[0])
    spied.forget()
    asked = {**request("aborted"), "tokens": 600}
    assert spied.engine.call("abort", request=asked, after_tokens=2)["finish"] == "abort"
    spied.forget()
    for name in ("aborted", "a"):
        [answer] = spied.ask(name)
        judge_two(name, answer)
        assert answer["host"] > 0
    for what in ("load", "offload", "stored"):
        assert spied.notes(what, rank=0) == spied.notes(what, rank=1), what
