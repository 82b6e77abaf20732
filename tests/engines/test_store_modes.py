"""Store modes: which blocks are stored, and when. Also the modes with `FlexKVConnectorV1`, vLLM's own connector class
for flexkv.
"""

from __future__ import annotations

import pytest

from demo.model import PRESETS

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, Prompt

BUILT_IN = {
    "kv_connector": "FlexKVConnectorV1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def test_prompt_only_leaves_generated_blocks_out(engines: Engines, stream: int) -> None:
    session = engines.get(connector(store__tokens="prompt"))
    turn = Prompt.of(200, stream, max_tokens=100)
    answer = session.check_one(turn)
    session.forget()
    assert session.check_one(turn.then(answer.tokens)).cached == 200 // BLOCK_TOKENS * BLOCK_TOKENS


def test_without_the_engines_prefix_caching_lazy_stores_are_eager(engines: Engines, stream: int) -> None:
    session = engines.get(connector(store__mode="lazy"), enable_prefix_caching=False)
    prompt = Prompt.of(300, stream)
    session.check_one(prompt)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert "store.mode=lazy" in session.process.log.read_text()


def test_lazy_stores_what_the_engine_evicts(engines: Engines, stream: int) -> None:
    # Lazy stores look two steps ahead. Steps in this test are short, so that the engine first hands out unused blocks
    # of its pool.
    session = engines.get(
        connector(store__mode="lazy"),
        num_gpu_blocks_override=41,
        max_model_len=1024,
        max_num_batched_tokens=160,
        max_num_seqs=4,
    )
    prompt = Prompt.of(500, stream)
    session.check_one(prompt)
    session.settle()
    assert session.metric("vllm:flexkv_moved_pages_total{direction=store}") == 0
    for other in range(1, 4):
        session.check_one(Prompt.of(700, stream + other))
    session.settle()
    assert session.metric("vllm:flexkv_moved_pages_total{direction=store}") > 0
    session.call("shuffle", seed=5)
    session.call("scribble", seed=5)
    before = session.metric("vllm:external_prefix_cache_hits_total")
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert session.metric("vllm:external_prefix_cache_hits_total") > before


def test_the_built_in_connector_serves_the_same_core(engines: Engines, stream: int) -> None:
    session = engines.get(connector(BUILT_IN))
    prompt = Prompt.of(700, stream, max_tokens=40)
    answer = session.check_one(prompt)
    # No step follows the last one. So the stores of this step must have ended within it, before the test overwrites the
    # blocks.
    assert session.call("reset")["done"]
    spoiled = session.call("scribble")
    assert spoiled["blocks"] == spoiled["free"]
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.forget()
    # This connector's mode stores only blocks of prompts, and no blocks with generated tokens.
    assert session.check_one(prompt.then(answer.tokens)).cached == 700 // BLOCK_TOKENS * BLOCK_TOKENS
    warnings = session.process.log.read_text()
    assert "reset" in warnings
    assert "FlexKVConnectorV1" in warnings


def test_a_prefix_of_three_tokens_is_served(engines: Engines, stream: int) -> None:
    """A prefix of three tokens is a hit. Two prompts have 3 and 7 tokens. The second one gets a hit on the partial tail
    of the first one. 48 of 50 slots stay free.
    """
    page_bytes = BLOCK_TOKENS * PRESETS["tiny"].kv_bytes_per_token
    session = engines.get(
        connector(
            store__partial_blocks=True, store__tokens="prompt", host__bytes=50 * page_bytes, load__mode="sync"
        )
    )
    longer = Prompt.of(7, stream, max_tokens=4)
    assert session.check_one(longer.first(3)).cached == 0
    session.forget()
    assert session.check_one(longer).cached == 3
    session.settle()
    # The engine updates gauges only in a step, so this runs a step that stores nothing.
    session.check_one(
        Prompt.of(5, stream + 1, max_tokens=2, extra={"kv_transfer_params": {"skip_save": True}})
    )
    assert session.metric("vllm:flexkv_host_slots") == 50
    assert session.metric("vllm:flexkv_host_slots_used") == 2


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_partial_tails_extend_a_hit_to_the_last_token(engines: Engines, stream: int, load_mode: str) -> None:
    session = engines.get(connector(store__partial_blocks=True, store__tokens="prompt", load__mode=load_mode))
    prompt = Prompt.of(170, stream)
    session.check_one(prompt)
    session.forget()
    assert session.check_one(prompt.then(Prompt.of(40, stream + 1).ids)).cached == 170
    session.forget()
    # The same prompt is a hit except for its last token. The engine computes this token to sample the next one.
    assert session.check_one(prompt).cached == 169


def test_partial_tails_hold_what_was_generated(engines: Engines, stream: int) -> None:
    session = engines.get(connector(store__partial_blocks=True))
    prompt = Prompt.of(170, stream)
    answer = session.check_one(prompt)
    session.forget()
    following = prompt.then(answer.tokens).then(Prompt.of(40, stream + 1).ids)
    # The KV of the last generated token was never computed, so it cannot be stored.
    assert session.check_one(following).cached == 170 + len(answer.tokens) - 1


def test_a_policy_that_loses_requests_is_warned_about(engines: Engines) -> None:
    quiet = engines.get(connector())
    assert "kv_load_failure_policy" not in _warnings(quiet.process.log.read_text())
    loud = engines.get({**connector(), "kv_load_failure_policy": "fail"})
    assert "kv_load_failure_policy" in _warnings(loud.process.log.read_text())


def _warnings(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "WARNING" in line and "flexkv" in line.lower())
