"""A real model with fewer KV heads than ranks. The two ranks have the same head, so flexkv stores one stripe for
both."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Engines
from .session import BLOCK_TOKENS
from .transformers_models import HEAD, LLAMA_LAYERS, write_llama_with_one_kv_head
from .two_ranks import check_stored_once, start_two_ranks


@pytest.mark.timeout(600)  # the test starts two engines, one of them with two workers
def test_a_head_is_stored_once_and_served_to_both_ranks(
    engines: Engines, tmp_path: Path, stream: int
) -> None:
    session = start_two_ranks(engines, model=str(write_llama_with_one_kv_head(tmp_path / "model")))
    check_stored_once(session, stream, BLOCK_TOKENS, token_bytes=2 * HEAD * 4 * LLAMA_LAYERS)
