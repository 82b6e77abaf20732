"""KV in fp8, which the real SGLang engine keeps as bytes: loaded to other pages, and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import judge_by, request
from tests.engines_sglang.spied import Spied

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
NAMES = ("a", "b")


def test_fp8_pages_come_back_after_a_flush(model: Path, tmp_path: Path) -> None:
    with SglangProcess(model, tmp_path / "alone.log", {"disable_radix_cache": True, **FP8}) as alone:
        judge = judge_by({name: alone.call("generate", requests=[request(name)])[0] for name in NAMES})
    spied = Spied(model, tmp_path / "spied", None, FP8)
    with spied.engine:
        [cold] = spied.ask("a")
        judge("a", cold)
        assert cold["cached"] == 0
        stored = spied.stored_pages()
        spied.forget()
        judge("b", spied.ask("b")[0])
        [answer] = spied.ask("a")
        judge("a", answer)
        assert answer["host"] == 200 // PAGE_TOKENS * PAGE_TOKENS
        assert not spied.pages_of_last("load") & stored
        spied.order("corrupt-0")
        spied.forget()
        [damaged] = spied.ask("a")
        assert damaged["host"] > 0
        with pytest.raises(AssertionError):
            judge("a", damaged)
