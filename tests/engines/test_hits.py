"""Hits for prompts that match stored blocks in different ways. Loads run between steps or within a step."""

from __future__ import annotations

import pytest

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(params=["async", "sync"], scope="module")
def load_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(engines: Engines, load_mode: str) -> EngineSession:
    return engines.get(connector(load__mode=load_mode))


def test_a_stored_prompt_is_served_to_other_blocks(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(601, stream)
    assert session.check_one(prompt).cached == 0
    for seed in (1, 2, 3):
        session.forget(seed)
        before = session.metric(EXTERNAL_HITS)
        assert session.check_one(prompt).cached == prompt.whole_blocks
        assert session.metric(EXTERNAL_HITS) - before == prompt.whole_blocks


def test_a_hit_continues_what_the_engine_still_has(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(1001, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt.first(10 * BLOCK_TOKENS + 5))
    before = session.metric(EXTERNAL_HITS)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert session.metric(EXTERNAL_HITS) - before == prompt.whole_blocks - 10 * BLOCK_TOKENS


def test_a_longer_prompt_takes_the_prefix_that_is_known(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(901, stream)
    session.check_one(prompt.first(400))
    session.forget()
    # The model's answer to the short prompt is not the continuation of the longer prompt. So only their common full
    # blocks are hits.
    assert session.check_one(prompt).cached == 400 // BLOCK_TOKENS * BLOCK_TOKENS


def test_requests_that_share_a_prefix_and_run_together(session: EngineSession, stream: int) -> None:
    common = Prompt.of(500, stream)
    prompts = [common.then(Prompt.of(50 + 40 * n, stream + n).ids) for n in range(4)]
    session.check(*prompts)
    session.forget()
    for prompt, answer in zip(prompts, session.check(*prompts), strict=True):
        assert answer.cached >= 500 // BLOCK_TOKENS * BLOCK_TOKENS
        assert answer.cached <= prompt.whole_blocks


def test_the_same_prompt_several_times_at_once(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(333, stream)
    session.check(prompt, prompt, prompt)
    session.forget()
    assert [answer.cached for answer in session.check(prompt, prompt, prompt)] == [prompt.whole_blocks] * 3


def test_the_next_turn_finds_what_was_generated(session: EngineSession, stream: int) -> None:
    turn = Prompt.of(200, stream, max_tokens=70)
    answer = session.check_one(turn)
    session.forget()
    following = turn.then(answer.tokens).then(Prompt.of(30, stream + 1).ids)
    # The KV of the last generated token was never computed, so it cannot be stored.
    computed = (200 + 70 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert session.check_one(following).cached == computed


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 8 * BLOCK_TOKENS])
def test_prompts_at_the_edges_of_a_block(session: EngineSession, stream: int, tokens: int) -> None:
    prompt = Prompt.of(tokens, stream, max_tokens=4)
    session.check_one(prompt)
    session.forget()
    assert prompt.whole_blocks <= session.check_one(prompt).cached < tokens


def test_skip_save_stores_nothing(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(300, stream)
    unsaved = Prompt(prompt.ids, extra={"kv_transfer_params": {"skip_save": True}})
    session.check_one(unsaved)
    session.forget()
    assert session.check_one(unsaved).cached == 0
    session.forget()
    session.check_one(prompt)
    session.forget()
    assert session.check_one(unsaved).cached == prompt.whole_blocks, (
        "skip_save must not keep a request from hits"
    )


def test_salts_keep_callers_apart(session: EngineSession, stream: int) -> None:
    mine = Prompt.of(300, stream, salt="mine")
    session.check_one(mine)
    session.forget()
    assert session.check_one(Prompt(mine.ids, salt="yours")).cached == 0
    assert session.check_one(Prompt(mine.ids)).cached == 0
    session.forget()
    assert session.check_one(mine).cached == mine.whole_blocks


def test_nothing_is_stored_twice(session: EngineSession, stream: int) -> None:
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.settle()
    stored = session.metric("vllm:flexkv_moved_pages_total{direction=store}")
    session.forget()
    session.check(prompt, prompt)
    session.settle()
    assert session.metric("vllm:flexkv_moved_pages_total{direction=store}") == stored
