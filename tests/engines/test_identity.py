"""Engines with the same keys give equal answers. Engines that give different answers have different keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE

from .conftest import BLOCKS_OF_ALL_GROUPS, Engines
from .session import EngineSession, Prompt
from .test_disk import start, wait_durable
from .transformers_models import write_llama_4

pytestmark = pytest.mark.long

OF_NO_KV: dict[str, Any] = {
    "async_scheduling": False,
    "disable_cascade_attn": True,
    "disable_log_stats": True,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "enable_prompt_embeds": True,
    "generation_config": "vllm",
    "gpu_memory_utilization": 0.5,
    "load_format": "safetensors",
    "logits_processors": [],
    "logprobs_mode": "raw_logits",
    "max_logprobs": 3,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 2,
    "model_impl": "auto",
    "num_gpu_blocks_override": 80,
    "scheduling_policy": "priority",
    "seed": 3,
    "served_model_name": "another",
    "skip_tokenizer_init": True,
    "stream_interval": 3,
    "use_tqdm_on_load": False,
}
"""Arguments that seem to affect KV but do not. Each value differs from the value that the other engine tests use."""

OF_KV: dict[str, Any] = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}
STORED = Prompt.of(601, 3131)


@pytest.fixture(scope="module")
def folder(all_engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk folder in which an engine has stored the full blocks of the prompt STORED."""
    made = tmp_path_factory.mktemp("stored") / "disk"
    session = start(all_engines, made)
    assert session.check_one(STORED).cached == 0
    wait_durable(session)
    return made


def check_shares(session: EngineSession, stream: int) -> None:
    """Checks that the engine gets hits on the pages that the first engine stored. Also checks that its own computation
    gives the same answer as an engine without these arguments.
    """
    assert session.check_one(STORED).cached == STORED.whole_blocks
    assert session.check_one(Prompt.of(601, stream)).cached == 0
    session.settle()


@pytest.mark.parametrize("name", OF_NO_KV)
def test_an_argument_that_is_in_no_key_changes_no_answer(
    engines: Engines, folder: Path, stream: int, name: str
) -> None:
    check_shares(start(engines, folder, engine={name: OF_NO_KV[name]}), stream)


def test_a_scheduler_in_another_process_reads_the_same_configuration(engines: Engines, folder: Path) -> None:
    """An engine whose scheduler runs in a process of its own has the same keys as other engines. vLLM's model loader
    may change the copy of the configuration that it returns, and keys must not depend on these changes."""
    session = start(engines, folder, SEPARATE_CORE)
    assert session.check_one(STORED).cached == STORED.whole_blocks


def test_control_another_rotary_embedding_has_other_answers_and_other_keys(
    engines: Engines, folder: Path
) -> None:
    session = start(engines, folder, engine=OF_KV)
    [answer] = session.ask(STORED)
    assert answer.cached == 0
    assert tuple(answer.tokens) != session.reference.tokens(STORED)


def test_a_llama_4_that_scales_its_queries_has_other_keys(engines: Engines, tmp_path: Path) -> None:
    """A Llama 4 that scales its queries has other keys than one that does not. The scheduler and the model run in
    different processes, and loading the model changes the configuration."""
    shape = {"no_rope_layers": [1, 0, 1, 1], "floor_scale": 16, "attn_scale": 1.0}
    engine: dict[str, Any] = {
        "model": str(write_llama_4(tmp_path / "model")),
        "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS,
        "hf_overrides": shape,
    }
    session = start(engines, tmp_path / "disk", engine=engine)
    [usual] = session.ask(STORED)
    wait_durable(session)
    [hit] = start(engines, tmp_path / "disk", SEPARATE_CORE, engine=engine).ask(STORED)
    assert (hit.cached, hit.tokens) == (STORED.whole_blocks, usual.tokens)
    engine["override_generation_config"] = {"attn_temperature_tuning": True}
    [scaled] = start(engines, tmp_path / "disk", SEPARATE_CORE, engine=engine).ask(STORED)
    assert scaled.cached == 0
    assert scaled.tokens != usual.tokens
