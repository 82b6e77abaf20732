"""Two tensor-parallel ranks of a real SGLang engine, each with its own manager. The two must load and store the same
pages, even if something fails on one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines_sglang.asked import whole
from tests.engines_sglang.conftest import Judge, judge_by, request
from tests.engines_sglang.spied import Spied, wait_until_durable
from tests.engines_sglang.stored import Stored

TWO_RANKS = {"tp_size": 2}
ONE_CPU_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""Environment variable that lists the CPUs of each rank. SGLang requires it if there are more ranks than memory nodes.
It binds ranks to these CPUs only if its kernels for CPUs are installed.
"""
NAMES = ("a", "b", "aborted")
ALIKE = ("lookup", "load", "landed", "offload", "stored")


@pytest.fixture(scope="module")
def judge_two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """A judge with the answers of an engine of two ranks, without flexkv and without a cache of its own."""
    log = tmp_path_factory.mktemp("two-ranks-alone") / "engine.log"
    return judge_by(model, log, NAMES, TWO_RANKS, **ONE_CPU_EACH)


@pytest.fixture(scope="module")
def spied(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    folder = tmp_path_factory.mktemp("two-ranks") / "engine"
    spied = Spied(model, folder, disk, TWO_RANKS, ONE_CPU_EACH, host__verify=True)
    yield spied
    spied.engine.close()


def assert_alike(spied: Spied, *whats: str) -> None:
    """Asserts that the two ranks noted the same events in the same order: the same pages and the same results."""
    for what in whats:
        assert spied.notes(what, rank=0) == spied.notes(what, rank=1), what
        assert spied.notes(what), f"nothing of {what} to compare"


def test_both_ranks_load_what_they_stored_to_other_pages(spied: Spied, judge_two: Judge) -> None:
    spied.loads_to_other_pages(judge_two)
    assert_alike(spied, *ALIKE)


def test_a_page_that_is_damaged_on_one_rank_fails_the_load_on_both(spied: Spied, judge_two: Judge) -> None:
    spied.ask("a")
    spied.order("corrupt-1")
    spied.forget()
    failed = spied.ask_one("a")
    assert failed["finish"] == "abort", failed
    landed = [spied.notes("landed", rank)[-1]["landed"] for rank in (0, 1)]
    assert landed == [True, False], "the other rank's page was whole"
    # After one rank has lost a page, the two ranks load or compute it again and store it. Then it is a hit.
    judge_two("a", spied.ask_one("a"))
    spied.forget()
    served = spied.ask_one("a")
    judge_two("a", served)
    assert served["host"] == whole("a")


def test_an_aborted_request_leaves_both_ranks_alike(spied: Spied, judge_two: Judge) -> None:
    judge_two("aborted", spied.ask_one("aborted"))
    spied.forget()
    asked = {**request("aborted"), "tokens": 600}
    assert spied.engine.call("abort", request=asked, after_tokens=2)["finish"] == "abort"
    spied.forget()
    for name in ("aborted", "a"):
        answer = spied.ask_one(name)
        judge_two(name, answer)
        assert answer["host"] > 0
    assert_alike(spied, "load", "offload", "stored")


@pytest.mark.long
def test_both_ranks_serve_from_their_own_folders_after_a_restart(
    spied: Spied, model: Path, disk: Path, judge_two: Judge
) -> None:
    spied.ask("a")
    spied.settle()
    wait_until_durable(disk)
    spied.engine.close()
    assert len(list(disk.rglob("*.slab"))) == 2, "each rank has a folder of its own"
    again = Spied(model, spied.folder.parent / "again", disk, TWO_RANKS, ONE_CPU_EACH, host__verify=True)
    with again.engine:
        assert [again.notes("start", rank)[0]["cached"] for rank in (0, 1)] == [0, 0]
        answer = again.ask_one("a")
        judge_two("a", answer)
        assert answer["host"] == whole("a"), "served from disk"
        assert_alike(again, "lookup", "load", "landed")


@pytest.mark.long
def test_two_ranks_of_hicache_and_a_page_that_is_damaged_on_one(
    model: Path, tmp_path: Path, judge_two: Judge
) -> None:
    stored = Stored(model, tmp_path / "stored", tmp_path / "disk", TWO_RANKS, ONE_CPU_EACH, host__verify=True)
    with stored.engine:
        stored.serves_after_a_flush(judge_two)
        stored.forget()
        stored.order("corrupt", rank=1)
        damaged = stored.ask_one("a")
        judge_two("a", damaged)
        assert damaged["cached"] < whole("a"), "what is gone on one rank is computed on both"
