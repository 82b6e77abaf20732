"""Models of several families with windows, chunks and states. Hits on each model give the right answer, and each of its
KV groups is needed for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV, EngineError

from .conftest import BLOCKS_OF_ALL_GROUPS, FAULTY, POOL_BLOCKS, Engines, connector
from .session import BLOCK_TOKENS, Prompt
from .test_store_modes import BUILT_IN
from .transformers_models import (
    CHUNK,
    STATE_LAYERS,
    WINDOW,
    write_gemma_3n,
    write_gemma_4,
    write_gpt_oss,
    write_lfm_2,
    write_llama_4,
    write_mistral,
)

STORED = "vllm:flexkv_moved_pages_total{direction=store}"
FAMILIES = [
    # All layers of this model have windows, so no group has all pages of a prompt.
    pytest.param(write_mistral, 0, 1, 0, 0, id="mistral"),
    # This model has attention sinks. They are weights of the model, and not a part of the cache.
    pytest.param(write_gpt_oss, 1, 1, 0, 0, id="gpt-oss", marks=pytest.mark.long),
    pytest.param(write_llama_4, 1, 0, 3, 0, id="llama-4"),
    pytest.param(write_lfm_2, 1, 0, 0, STATE_LAYERS, id="lfm-2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("write", "full", "windows", "chunks", "states"), FAMILIES)
def test_a_family_is_served(
    engines: Engines,
    tmp_path: Path,
    stream: int,
    write: Callable[[Path], Path],
    full: int,
    windows: int,
    chunks: int,
    states: int,
) -> None:
    """A model of each family gets hits that give the right answer. The test compares them with the engine's first
    answer, which is computed while nothing is cached.

    Args:
        write: writes the model.
        full, windows, chunks, states: number of the model's KV groups of each kind.
    """
    groups = full + windows + chunks + states
    rules = [{"action": "corrupt", "kind": "load", "nth_op": groups * g + g} for g in range(groups)]
    more: dict[str, Any] = {
        "model": str(write(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS,
    }
    session = engines.another(
        connector(FAULTY, store__tokens="prompt"), {"FAULT_RULES": json.dumps(rules)}, **more
    )
    # Few tokens follow the hit, because a convolution's state affects only the next few tokens.
    prompt = Prompt.of(386, stream)
    [cold] = session.ask(prompt)
    session.settle()
    pages, of_window = prompt.whole_blocks // BLOCK_TOKENS, WINDOW // BLOCK_TOKENS
    of_chunk = prompt.whole_blocks % CHUNK // BLOCK_TOKENS
    assert session.metric(STORED) == full * pages + windows * of_window + chunks * of_chunk + states
    for group in (*range(groups), None):
        session.forget()
        [answer] = session.ask(prompt)
        assert answer.cached == prompt.whole_blocks
        assert (answer.tokens != cold.tokens) == (group is not None), f"group {group} damaged"
    # The token after the hit begins a new chunk, so the hit needs no pages of chunked groups.
    whole = Prompt.of(2 * CHUNK + 1, stream + 1)
    [cold] = session.ask(whole)
    session.forget()
    [answer] = session.ask(whole)
    assert (answer.tokens, answer.cached) == (cold.tokens, 2 * CHUNK)


def test_heads_of_two_sizes_are_served(engines: Engines, tmp_path: Path, stream: int) -> None:
    """A model with heads of two sizes, a Gemma 4, gets hits that give the right answer. The test compares them with the
    engine's first answer, which is computed while nothing is cached."""
    more: dict[str, Any] = {
        "model": str(write_gemma_4(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS,
    }
    rules = [{"action": "corrupt", "kind": "load", "nth_op": 1}]
    ours = engines.another(connector(FAULTY), {"FAULT_RULES": json.dumps(rules)}, **more)
    prompt = Prompt.of(405, stream)
    [cold] = ours.ask(prompt)
    for damaged in (True, False):
        ours.forget()
        [answer] = ours.ask(prompt)
        assert answer.cached == prompt.whole_blocks
        assert (answer.tokens != cold.tokens) == damaged


@pytest.mark.parametrize(
    "base", [FLEXKV, pytest.param(BUILT_IN, marks=pytest.mark.long)], ids=["connector", "built-in"]
)
def test_layers_that_share_kv_in_one_group_are_served(
    engines: Engines, tmp_path: Path, stream: int, base: dict[str, Any]
) -> None:
    """A model whose layers share KV in one KV group, a Gemma 3n, gets hits that give the right answer. The control
    overwrites the blocks in the engine's own prefix cache with garbage."""
    ours = engines.another(
        connector(base, load__mode="sync"),
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        model=str(write_gemma_3n(tmp_path / "model")),
        disable_hybrid_kv_cache_manager=True,
        async_scheduling=False,
    )
    prompt = Prompt.of(405, stream)
    [cold] = ours.ask(prompt)
    ours.call("spoil_cached", blocks=POOL_BLOCKS)
    [control] = ours.ask(prompt)
    assert control.tokens != cold.tokens
    ours.forget()
    [hit] = ours.ask(prompt)
    assert (hit.cached, hit.tokens) == (prompt.whole_blocks, cold.tokens)


def test_layers_that_share_kv_in_a_hybrid_pool_are_refused(engines: Engines, tmp_path: Path) -> None:
    """flexkv refuses a model whose layers share KV in several KV groups, a Gemma 3n. The test also shows the reason: in
    such a pool, vLLM's own prefix cache changes the model's answer.
    """
    more: dict[str, Any] = {
        "model": str(write_gemma_3n(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS,
    }
    with pytest.raises(EngineError, match="--disable-hybrid-kv-cache-manager"):
        engines.another(connector(), **more)
    plain = engines.another(None, **more)
    prompt = Prompt.of(405, 7)
    [[cold], [hit]] = plain.ask(prompt), plain.ask(prompt)
    assert hit.cached == prompt.whole_blocks
    assert hit.tokens != cold.tokens, "vLLM has mended it: serve these models"
