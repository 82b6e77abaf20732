"""Engines with equal keys give equal answers, and engines with other answers have other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE

from .conftest import Engines
from .session import Prompt
from .test_disk import start, wait_durable

OF_NO_KV: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 256, "max_num_seqs": 2},
    {"enable_prefix_caching": False},
    {"max_model_len": 1024, "num_gpu_blocks_override": 60},
    {"load_format": "safetensors", "seed": 3, "model_impl": "auto"},
    {"async_scheduling": False, "generation_config": "vllm"},
]
"""Arguments that look as if they affected KV, and do not."""

OF_KV: dict[str, Any] = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}


@pytest.mark.long
def test_equal_keys_mean_equal_answers(engines: Engines, stream: int, tmp_path: Path) -> None:
    stored = Prompt.of(601, stream)
    session = start(engines, tmp_path / "disk")
    assert session.check_one(stored).cached == 0
    wait_durable(session)
    for number, arguments in enumerate(OF_NO_KV, 1):
        session = start(engines, tmp_path / "disk", engine=arguments)
        # The keys are equal: the engine is served what the first one stored.
        assert session.check_one(stored).cached == stored.whole_blocks, arguments
        # Its own computation equals that of an engine without these arguments.
        assert session.check_one(Prompt.of(601, stream + number)).cached == 0, arguments
        session.settle()

    # Nor if the scheduler reads the configuration in another process than the one that loads the model.
    session = start(engines, tmp_path / "disk", SEPARATE_CORE)
    assert session.check_one(stored).cached == stored.whole_blocks

    # The control: another rotary embedding gives other answers, and other keys.
    session = start(engines, tmp_path / "disk", engine=OF_KV)
    [answer] = session.ask(stored)
    assert answer.cached == 0
    assert tuple(answer.tokens) != session.reference.tokens(stored)
