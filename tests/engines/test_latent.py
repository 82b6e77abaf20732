"""A real model with multi-head latent attention (MLA) on two ranks. The two ranks have the same latent, so flexkv
stores one stripe for both.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Engines
from .latent_model import BLOCK_TOKENS, CONTEXT_TOKENS, LATENT, LAYERS, ROPE, write_latent_model
from .session import Prompt
from .two_ranks import check_stored_once, start_two_ranks

ROTARY_IN_TORCH = {"custom_ops": ["-rotary_embedding"]}
"""Compilation settings that replace vLLM's rotary kernel with torch code. vLLM 0.32's kernel for CPUs treats MLA's
slices as dense tensors and rotates the wrong numbers. K then depends on the rest of the batch, so no connector could
reproduce an answer.
"""


@pytest.mark.timeout(600)  # the test starts two engines, one of them with two workers
def test_a_latent_is_stored_once_and_served_to_both_ranks(
    engines: Engines, tmp_path: Path, stream: int
) -> None:
    session = start_two_ranks(
        engines,
        model=str(write_latent_model(tmp_path / "model")),
        block_size=BLOCK_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        attention_backend="CPU_MLA",
        compilation_config=ROTARY_IN_TORCH,
    )
    prompt = check_stored_once(session, stream, BLOCK_TOKENS, token_bytes=(LATENT + ROPE) * 4 * LAYERS)
    turn = prompt.then(Prompt.of(100, stream + 2).ids)
    session.forget(seed=2)
    assert session.check_one(turn).cached == len(prompt.ids) // BLOCK_TOKENS * BLOCK_TOKENS
