"""flexkv as the external linker of a real SGLang engine: every answer equals the one without flexkv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.sglang_process import PAGE_TOKENS
from tests.engines_sglang.conftest import Judge, request
from tests.engines_sglang.spied import Spied, wait_until_durable

WHOLE_A = 200 // PAGE_TOKENS * PAGE_TOKENS
"""Tokens of prompt "a" in whole pages."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def spied(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    spied = Spied(model, tmp_path_factory.mktemp("linker") / "first", disk)
    yield spied
    spied.engine.close()


def test_a_cold_prompt_is_computed_and_stored(spied: Spied, judge: Judge) -> None:
    [answer] = spied.ask("a")
    judge("a", answer)
    assert answer["cached"] == 0
    spied.settle()
    assert all(note["stored"] for note in spied.notes("stored"))


def test_after_a_flush_it_is_loaded_to_other_pages(spied: Spied, judge: Judge) -> None:
    spied.ask("a")
    stored = spied.stored_pages()
    spied.forget()
    # Takes the first pages of the emptied pool, so that those that were stored come back elsewhere.
    judge("b", spied.ask("b")[0])
    [answer] = spied.ask("a")
    judge("a", answer)
    assert answer["host"] == WHOLE_A
    assert not spied.pages_of_last("load") & stored


def test_after_eviction_by_pressure_it_is_loaded(spied: Spied, judge: Judge) -> None:
    judge("b", spied.ask("b")[0])
    for number in range(4):
        judge(f"filler {number}", spied.ask(f"filler {number}")[0])
    [answer] = spied.ask("b")
    judge("b", answer)
    assert answer["host"] > 0, answer


def test_another_tenant_is_not_served(spied: Spied, judge: Judge) -> None:
    spied.ask("a")
    spied.forget()
    [answer] = spied.ask("a", extra_key="another tenant")
    judge("a", answer)
    assert answer["cached"] == 0
    spied.forget()
    [mine, theirs] = [spied.ask("a", extra_key=key)[0] for key in (None, "another tenant")]
    for answer in (mine, theirs):
        judge("a", answer)
        assert answer["host"] > 0


def test_requests_that_share_a_prefix_load_it_at_once(spied: Spied, judge: Judge) -> None:
    spied.ask("shared 1", "shared 2")
    spied.forget()
    answers = spied.ask("shared 1", "shared 2")
    for name, answer in zip(("shared 1", "shared 2"), answers, strict=True):
        judge(name, answer)
        assert answer["cached"] >= 240, answer
    assert sum(answer["host"] for answer in answers) > 0


def test_an_aborted_request_harms_nobody(spied: Spied, judge: Judge) -> None:
    judge("aborted", spied.ask("aborted")[0])
    spied.forget()
    aborted = spied.engine.call("abort", request={**request("aborted"), "tokens": 600}, after_tokens=2)
    assert aborted["finish"] == "abort", aborted
    spied.forget()
    for name in ("aborted", "a"):
        [answer] = spied.ask(name)
        judge(name, answer)
        assert answer["host"] > 0


def test_schedulers_killed_in_a_load_and_in_a_store_leave_a_folder_that_serves(
    spied: Spied, model: Path, disk: Path, judge: Judge
) -> None:
    """One test, because engines start slowly: each takes over the folder of the one that was killed before it."""
    spied.ask("a")
    spied.settle()
    wait_until_durable(disk)
    spied.forget()
    spied.order("die-0", "load")
    with pytest.raises(RuntimeError, match="ended"):
        spied.ask("a", "b")
    # No lock is in the way, and what was durable is there.
    again = Spied(model, spied.folder.parent / "second", disk)
    try:
        assert again.notes("start")[0]["cached"] == 0, "host memory is empty at the start"
        [answer] = again.ask("a")
        judge("a", answer)
        assert answer["host"] == WHOLE_A, "served from disk"
        # The control: were the stored bytes wrong, these tests would see it.
        again.order("corrupt-0")
        again.forget()
        assert again.notes("corrupt")[-1]["slots"] > 0
        [damaged] = again.ask("a")
        assert damaged["host"] > 0
        with pytest.raises(AssertionError):
            judge("a", damaged)
        again.order("die-0", "offload")
        with pytest.raises(RuntimeError, match="ended"):
            again.ask("late")
    finally:
        again.engine.close()
    third = Spied(model, spied.folder.parent / "third", disk)
    try:
        [answer] = third.ask("a")
        judge("a", answer)
        assert answer["host"] == WHOLE_A
        judge("late", third.ask("late")[0])
        # New weights, although they are the same: nothing from before may be served.
        assert third.engine.call("update_weights", path=str(model))
        [recomputed] = third.ask("a")
        judge("a", recomputed)
        assert recomputed["cached"] == 0
    finally:
        third.engine.close()
    assert not [entry.name for entry in Path("/dev/shm").iterdir() if "flexkv" in entry.name]
