"""A real model with fewer KV heads than ranks: both ranks hold the same head, and one stripe serves both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_parallel import TWO_RANKS
from .transformers_models import HEAD, LLAMA_LAYERS, write_llama_with_one_kv_head

DAMAGED_STORE = [{"action": "corrupt", "kind": "store", "nth_op": 0}]


@pytest.fixture
def session(engines: Engines, tmp_path: Path) -> EngineSession:
    """The engine's first store is damaged on its way."""
    arguments: dict[str, Any] = {"model": str(write_llama_with_one_kv_head(tmp_path / "model"))}
    alone = engines.another(None, **arguments)
    environment = {**TWO_RANKS, "FAULT_RULES": json.dumps(DAMAGED_STORE)}
    ours = engines.another(connector(FAULTY), environment, tensor_parallel_size=2, **arguments)
    return EngineSession(ours.process, Reference(alone.process))


@pytest.mark.timeout(600)  # two engines start for it, one of them with two workers
def test_a_head_is_stored_once_and_served_to_both_ranks(session: EngineSession, stream: int) -> None:
    # Comes first: the engine's first store. Without digests nobody can tell, so a wrong byte shows in the output.
    damaged = Prompt.of(300, stream + 1)
    session.check_one(damaged)
    session.forget()
    [answer] = session.ask(damaged)
    assert answer.cached == damaged.whole_blocks
    assert answer.tokens != session.reference.tokens(damaged)
    session.forget()

    prompt, moved = Prompt.of(405, stream), "vllm:flexkv_moved_pages_total{direction=store}"
    stored_before = session.metric(moved)
    session.check_one(prompt)
    session.forget()
    stored = session.metric(moved) - stored_before
    assert stored == (len(prompt.ids) + prompt.max_tokens - 1) // BLOCK_TOKENS, "not once for both ranks"
    page_bytes = BLOCK_TOKENS * 2 * HEAD * 4 * LLAMA_LAYERS
    bytes_moved = session.metric("vllm:flexkv_moved_bytes_total{direction=store}")
    assert bytes_moved == page_bytes * session.metric(moved)
    assert session.check_one(prompt).cached == prompt.whole_blocks
