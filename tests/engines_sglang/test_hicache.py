"""flexkv as HiCache's storage behind the host tier of a real SGLang engine: every answer equals the one without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import Judge, request
from tests.engines_sglang.spied import wait_until_durable

WHOLE_A = 200 // PAGE_TOKENS * PAGE_TOKENS
"""Tokens of prompt "a" in whole pages."""


def hicache(module: str, name: str, disk: Path) -> dict[str, Any]:
    """Engine arguments; a prefetch is waited for, so that what is stored is served."""
    extra = {
        "backend_name": "flexkv",
        "module_path": module,
        "class_name": name,
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "host.bytes": 32 << 20,
        "disk.folders": str(disk),
        "disk.bytes_per_folder": 64 << 20,
    }
    return {
        "enable_hierarchical_cache": True,
        # SGLang's host tier holds 2,457 tokens: less than what the test of eviction asks.
        "hicache_ratio": 1.2,
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


class Stored:
    """An engine whose storage is flexkv."""

    def __init__(self, model: Path, folder: Path, disk: Path) -> None:
        self.folder, self.disk = folder, disk
        folder.mkdir()
        arguments = hicache("tests.engines_sglang.spying_hicache", "SpyingHiCache", disk)
        self.engine = SglangProcess(model, folder / "engine.log", arguments, SPY_FOLDER=str(folder))

    def ask(self, *names: str, **more: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.call(
            "generate", requests=[request(name, **more) for name in names]
        )
        return answers

    def forget(self) -> None:
        """Waits for what is being stored and empties SGLang's tiers; the next lookup finds the host tier spoiled."""
        wait_until_durable(self.disk)
        assert self.engine.call("flush"), "the device's and the host's tiers are empty, the storage is not"
        (self.folder / "spoil").touch()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def stored(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    stored = Stored(model, tmp_path_factory.mktemp("hicache") / "first", disk)
    yield stored
    stored.engine.close()


def test_pages_come_back_after_a_flush(stored: Stored, judge: Judge) -> None:
    [cold] = stored.ask("a")
    judge("a", cold)
    assert cold["cached"] == 0
    stored.forget()
    [answer] = stored.ask("a")
    judge("a", answer)
    assert answer["cached"] == WHOLE_A, answer
    stored.forget()
    [other] = stored.ask("a", extra_key="another tenant")
    judge("a", other)
    assert other["cached"] == 0, other


def test_pages_come_back_after_eviction_from_both_of_the_engines_tiers(stored: Stored, judge: Judge) -> None:
    judge("b", stored.ask("b")[0])
    for number in range(4):
        judge(f"filler {number}", stored.ask(f"filler {number}")[0])
    [answer] = stored.ask("b")
    judge("b", answer)
    assert answer["cached"] == 333 // PAGE_TOKENS * PAGE_TOKENS, answer


def test_requests_that_share_a_prefix_and_one_that_is_aborted(stored: Stored, judge: Judge) -> None:
    stored.ask("shared 1", "shared 2", "aborted")
    stored.forget()
    for name, answer in zip(("shared 1", "shared 2"), stored.ask("shared 1", "shared 2"), strict=True):
        judge(name, answer)
        assert answer["cached"] >= 240, answer
    asked = {**request("aborted"), "tokens": 600}
    assert stored.engine.call("abort", request=asked, after_tokens=2)["finish"] == "abort"
    stored.forget()
    for name in ("aborted", "a"):
        [answer] = stored.ask(name)
        judge(name, answer)
        assert answer["cached"] > 0


def test_a_new_engine_serves_from_disk_and_damage_is_seen(
    stored: Stored, model: Path, disk: Path, judge: Judge
) -> None:
    stored.ask("a")
    wait_until_durable(disk)
    stored.engine.close()
    again = Stored(model, stored.folder.parent / "second", disk)
    try:
        [answer] = again.ask("a")
        judge("a", answer)
        assert answer["cached"] == WHOLE_A, answer
        # The control: were the stored bytes wrong, these tests would see it.
        again.forget()
        (again.folder / "corrupt").touch()
        [damaged] = again.ask("a")
        assert damaged["cached"] > 0
        with pytest.raises(AssertionError):
            judge("a", damaged)
    finally:
        again.engine.close()
