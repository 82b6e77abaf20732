"""A real SGLang engine and a real vLLM engine run at the same time. Each of them loads pages that the other one
computed, from the other one's host memory.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flexkv.cli.peers_command import ask_units
from tests.engines_sglang.conftest import Judge, judge_of
from tests.engines_sglang.test_one_cache import BLOCK_TOKENS, CACHED, NAMES, Sglang, Vllm

WITHIN_S = 120.0


def wait_known(folder: Path, pages: int, copied: int = 0) -> None:
    """Waits until the units together know at least `pages` pages in their peers' host memory, and until they have
    copied at least `copied` pages.
    """
    ends_s = time.monotonic() + WITHIN_S
    while True:
        rows = [row for unit in ask_units(folder, 5.0) for row in unit["peers"]]
        if sum(row["host_pages"] for row in rows) >= pages and sum(row["copied"] for row in rows) >= copied:
            return
        assert time.monotonic() < ends_s, rows
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_engine_is_served_by_the_other_while_both_run(model: Path, judge: Judge, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = {"peers.share": "host+disk", "peers.folder": str(run)}
    plain = Vllm(model, tmp_path / "plain.log", None)
    try:
        judge_vllm = judge_of({name: plain.ask(name) for name in NAMES})
    finally:
        plain.process.close()
    sglang = Sglang(model, tmp_path / "sglang.log", tmp_path / "one", **told)
    vllm = Vllm(model, tmp_path / "vllm.log", tmp_path / "two", **told)
    try:
        first = sglang.ask("a")
        judge("a", first)
        assert first["cached"] == 0
        pages = CACHED["a"] // BLOCK_TOKENS
        wait_known(run, pages)
        answer = vllm.ask("a")
        judge_vllm("a", answer)
        assert answer["cached"] == CACHED["a"]
        wait_known(run, pages, copied=pages)
        other = vllm.ask("b")
        judge_vllm("b", other)
        more = CACHED["b"] // BLOCK_TOKENS
        wait_known(run, 2 * pages + more)  # vLLM's copies of the first prompt's pages count, too
        answer = sglang.ask("b")
        judge("b", answer)
        assert answer["cached"] == CACHED["b"]
        wait_known(run, pages, copied=pages + more)
    finally:
        vllm.process.close()
        sglang.process.close()
