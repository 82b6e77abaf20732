"""KV in fp8, which a real SGLang engine stores as bytes. The linker and the HiCache storage load it into different
pages of the pool. Damage to it changes the answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines_sglang.asked import seen_to_be_damaged
from tests.engines_sglang.conftest import Judge, judge_by
from tests.engines_sglang.spied import Spied
from tests.engines_sglang.stored import Stored

FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(scope="module")
def judge_fp8(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return judge_by(model, tmp_path_factory.mktemp("fp8") / "alone.log", ("a", "b"), FP8)


def test_fp8_pages_come_back_after_a_flush(model: Path, tmp_path: Path, judge_fp8: Judge) -> None:
    spied = Spied(model, tmp_path / "spied", None, FP8)
    with spied.engine:
        spied.loads_to_other_pages(judge_fp8)
        spied.order("corrupt-0")
        spied.forget()
        seen_to_be_damaged(judge_fp8, "a", spied.ask_one("a"))


@pytest.mark.long
def test_fp8_pages_come_back_from_hicaches_storage(model: Path, tmp_path: Path, judge_fp8: Judge) -> None:
    stored = Stored(model, tmp_path / "stored", tmp_path / "disk", FP8)
    with stored.engine:
        stored.serves_after_a_flush(judge_fp8)
        stored.forget()
        stored.order("corrupt")
        seen_to_be_damaged(judge_fp8, "a", stored.ask_one("a"))
