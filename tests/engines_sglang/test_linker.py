"""flexkv as the external linker of a real SGLang engine: every answer equals the one without flexkv."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess, linker
from tests.engines_sglang.conftest import Judge, request

HOST_BYTES = 48 << 20
"""Room for 700 pages of the tiny model: all prompts of these tests."""

DURABLE_DEADLINE_S = 60.0


class Spied:
    """An engine with the spying linker, and what that wrote down."""

    def __init__(self, model: Path, folder: Path, disk: Path) -> None:
        self.folder = folder
        folder.mkdir()
        settings = {"host__bytes": HOST_BYTES, "disk__folders": str(disk), "disk__bytes_per_folder": 64 << 20}
        # Pages from disk have to come up on a machine where all cores are busy.
        settings |= {"load__lookup_wait_s": 30.0}
        arguments = linker("tests.engines_sglang.spying_linker", "SpyingLinker", **settings)
        self.engine = SglangProcess(model, folder / "engine.log", arguments, SPY_FOLDER=str(folder))

    def ask(self, *names: str, **more: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.call(
            "generate", requests=[request(name, **more) for name in names]
        )
        return answers

    def forget(self) -> None:
        """Waits for what is being stored, empties the engine's own cache and spoils its pool."""
        self.settle()
        assert self.engine.call("flush")

    def settle(self) -> None:
        """Waits until every offload has completed."""
        ends_s = time.monotonic() + DURABLE_DEADLINE_S
        while len(self.notes("stored")) < len(self.notes("offload")):
            assert time.monotonic() < ends_s, "an offload has not completed"
            time.sleep(0.05)

    def notes(self, what: str) -> list[dict[str, Any]]:
        lines = (self.folder / "notes").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def pages_of_last(self, what: str) -> set[int]:
        return set(self.notes(what)[-1]["pages"])


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
    stored = {page for note in spied.notes("offload") for page in note["pages"]}
    spied.forget()
    # Takes the first pages of the emptied pool, so that those that were stored come back elsewhere.
    judge("b", spied.ask("b")[0])
    [answer] = spied.ask("a")
    judge("a", answer)
    assert answer["host"] == 200 // PAGE_TOKENS * PAGE_TOKENS
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


def test_a_new_engine_serves_from_disk_and_damage_is_seen(
    spied: Spied, model: Path, disk: Path, judge: Judge
) -> None:
    spied.ask("a")
    spied.settle()
    wait_until_durable(disk)
    spied.engine.close()
    again = Spied(model, spied.folder.parent / "second", disk)
    try:
        assert again.notes("start")[0]["cached"] == 0, "host memory is empty at the start"
        [answer] = again.ask("a")
        judge("a", answer)
        assert answer["host"] == 200 // PAGE_TOKENS * PAGE_TOKENS, "served from disk"
        # The control: were the stored bytes wrong, these tests would see it.
        (again.folder / "corrupt").touch()
        again.forget()
        assert again.notes("corrupt")[-1]["slots"] > 0
        [damaged] = again.ask("a")
        assert damaged["host"] > 0
        with pytest.raises(AssertionError):
            judge("a", damaged)
        # New weights, although they are the same: nothing from before may be served.
        assert again.engine.call("update_weights", path=str(model))
        [recomputed] = again.ask("a")
        judge("a", recomputed)
        assert recomputed["cached"] == 0
    finally:
        again.engine.close()


def wait_until_durable(disk: Path) -> None:
    """Waits until nothing in the folder grows any more; the journal commits within a second."""
    ends_s = time.monotonic() + DURABLE_DEADLINE_S
    before, same = "", 0
    while same < 6:
        assert time.monotonic() < ends_s, "the disk tier never came to rest"
        time.sleep(0.5)
        now = str(sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*") if file.is_file()))
        same = same + 1 if now == before else 0
        before = now
