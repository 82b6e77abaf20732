"""A real SGLang engine whose HiCache has flexkv as its storage. Every answer equals that of an engine without
flexkv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines_sglang.asked import seen_to_be_damaged, whole
from tests.engines_sglang.conftest import Judge
from tests.engines_sglang.spied import wait_until_durable
from tests.engines_sglang.stored import Stored


@pytest.fixture(scope="module")
def stored(model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    stored = Stored(model, tmp_path_factory.mktemp("hicache") / "first", disk)
    yield stored
    stored.engine.close()


def test_pages_come_back_after_a_flush(stored: Stored, judge: Judge) -> None:
    stored.serves_after_a_flush(judge)


def test_another_tenant_is_not_served(stored: Stored, judge: Judge) -> None:
    stored.keeps_tenants_apart(judge)


def test_pages_come_back_after_eviction_from_both_of_the_engines_tiers(stored: Stored, judge: Judge) -> None:
    stored.serves_what_was_evicted(judge)


def test_requests_that_share_a_prefix_and_one_that_is_aborted(stored: Stored, judge: Judge) -> None:
    stored.serves_a_shared_prefix_at_once(judge)
    stored.outlives_an_abort(judge)


def test_a_new_engine_serves_from_disk_and_damage_is_seen(
    stored: Stored, model: Path, disk: Path, judge: Judge
) -> None:
    stored.ask("a")
    wait_until_durable(disk)
    stored.engine.close()
    again = Stored(model, stored.folder.parent / "second", disk)
    with again.engine:
        answer = again.ask_one("a")
        judge("a", answer)
        assert answer["cached"] == whole("a"), answer
        again.forget()
        again.order("corrupt")
        seen_to_be_damaged(judge, "a", again.ask_one("a"))
