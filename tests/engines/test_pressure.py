"""Engines under pressure. If an engine's pool has too few blocks, the engine preempts requests and evicts blocks. If
host memory has too few slots, flexkv evicts pages.
"""

from __future__ import annotations

import pytest

from tests.soak import soak_rounds

from .conftest import Engines, connector
from .session import EngineSession, Prompt

pytestmark = pytest.mark.soak


@soak_rounds()
@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
@pytest.mark.parametrize("store_mode", ["eager", "lazy"])
def test_preempted_requests_resume_right(
    engines: Engines, stream: int, load_mode: str, store_mode: str, soak_round: int
) -> None:
    session = engines.get(
        connector(load__mode=load_mode, store__mode=store_mode),
        num_gpu_blocks_override=41,
        max_num_seqs=4,
        max_model_len=1024,
    )
    prompts = [Prompt.of(300, stream + n, max_tokens=180) for n in range(4)]
    preempted = session.metric("vllm:num_preemptions_total")
    session.check(*prompts)
    assert session.metric("vllm:num_preemptions_total") > preempted
    session.settle()
    session.check(*reversed(prompts))
    session.settle()


def _conversations(session: EngineSession, stream: int, count: int, turns: int) -> list[int]:
    """Runs several conversations at the same time, turn by turn. For each turn after a conversation's first, returns
    how many tokens were cached.
    """
    talks = [Prompt.of(330 + 10 * n, stream + n) for n in range(count)]
    cached = []
    for turn in range(turns):
        for number, talk in enumerate(talks):
            answer = session.check_one(talk)
            if turn:
                cached.append(answer.cached)
            talks[number] = talk.then(answer.tokens).then(Prompt.of(40, stream + 100 * turn + number).ids)
    return cached


@soak_rounds()
@pytest.mark.parametrize("store_mode", ["eager", "lazy"])
def test_conversations_that_exceed_the_engines_pool(
    engines: Engines, stream: int, store_mode: str, soak_round: int
) -> None:
    session = engines.get(
        connector(store__mode=store_mode), num_gpu_blocks_override=41, max_num_seqs=4, max_model_len=1024
    )
    before = session.metric("vllm:external_prefix_cache_hits_total")
    cached = _conversations(session, stream, count=8, turns=3)
    assert min(cached) >= 320, f"a turn found less than its first prompt: {cached}"
    assert session.metric("vllm:external_prefix_cache_hits_total") - before > 8 * 320
    session.settle()


@soak_rounds()
def test_a_full_host_tier_evicts_and_stays_right(engines: Engines, stream: int, soak_round: int) -> None:
    session = engines.get(
        connector(host__bytes=8 << 20, host__extent_bytes=2 << 20),
        num_gpu_blocks_override=41,
        max_num_seqs=4,
        max_model_len=1024,
    )
    _conversations(session, stream, count=8, turns=3)
    session.settle()
    slots = session.metric("vllm:flexkv_host_slots")
    assert 30 <= slots <= 64
    assert session.metric("vllm:flexkv_host_slots_used") <= slots
    assert session.metric("vllm:flexkv_evictions_total") > 0
    recent = Prompt.of(300, stream + 9999)
    session.check_one(recent)
    session.forget()
    assert session.check_one(recent).cached == recent.whole_blocks
