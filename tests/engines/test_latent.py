"""A real model with latent attention (MLA), on two ranks: both hold the same latent, and one stripe serves both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAULTY, Engines, connector
from .latent_model import BLOCK_TOKENS, CONTEXT_TOKENS, LATENT, LAYERS, ROPE, write_latent_model
from .session import EngineSession, Prompt, Reference
from .test_parallel import TWO_RANKS

ROTARY_IN_TORCH = {"custom_ops": ["-rotary_embedding"]}
"""vLLM 0.32's rotary kernel for CPUs takes MLA's slices for dense tensors and turns the wrong numbers: K then depends
on what else is in the batch, and no connector, of vLLM's or ours, can give the same answer from it."""
DAMAGED_STORE = [{"action": "corrupt", "kind": "store", "nth_op": 0}]


@pytest.fixture
def session(engines: Engines, tmp_path: Path) -> EngineSession:
    """The engine's first store is damaged on its way."""
    arguments: dict[str, Any] = {
        "model": str(write_latent_model(tmp_path / "model")),
        "block_size": BLOCK_TOKENS,
        "max_model_len": CONTEXT_TOKENS,
        "attention_backend": "CPU_MLA",
        "compilation_config": ROTARY_IN_TORCH,
    }
    alone = engines.another(None, **arguments)
    environment = {**TWO_RANKS, "FAULT_RULES": json.dumps(DAMAGED_STORE)}
    ours = engines.another(connector(FAULTY), environment, tensor_parallel_size=2, **arguments)
    return EngineSession(ours.process, Reference(alone.process))


def blocks_served(prompt: Prompt) -> int:
    """Tokens in whole blocks before the token that the engine computes itself."""
    return (len(prompt.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.timeout(600)  # two engines start for it, one of them with two workers
def test_a_latent_is_stored_once_and_served_to_both_ranks(session: EngineSession, stream: int) -> None:
    # Comes first: the engine's first store. Without digests nobody can tell, so a wrong byte shows in the output.
    damaged = Prompt.of(300, stream + 1)
    session.check_one(damaged)
    session.forget()
    [answer] = session.ask(damaged)
    assert answer.cached == blocks_served(damaged)
    assert answer.tokens != session.reference.tokens(damaged)
    session.forget()

    prompt, moved = Prompt.of(405, stream), "vllm:flexkv_moved_pages_total{direction=store}"
    stored_before = session.metric(moved)
    session.check_one(prompt)
    session.forget()
    stored = session.metric(moved) - stored_before
    assert stored == (len(prompt.ids) + prompt.max_tokens - 1) // BLOCK_TOKENS, "not once for both ranks"
    page_bytes = BLOCK_TOKENS * (LATENT + ROPE) * 4 * LAYERS
    assert session.metric("vllm:flexkv_moved_bytes_total{direction=store}") == page_bytes * session.metric(
        moved
    )
    assert session.check_one(prompt).cached == blocks_served(prompt)
    turn = prompt.then(Prompt.of(100, stream + 2).ids)
    session.forget(seed=2)
    assert session.check_one(turn).cached == len(prompt.ids) // BLOCK_TOKENS * BLOCK_TOKENS
