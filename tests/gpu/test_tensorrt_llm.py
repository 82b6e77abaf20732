"""Tests flexkv's connector in a real TensorRT-LLM engine: a loaded prompt gives the same tokens as a computed one. The
test is skipped without the package or without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from flexkv.adapters.tensorrt_llm import api
from tests.gpu.needs import GPU

pytestmark = GPU

MODEL_VARIABLE = "FLEXKV_TEST_TRTLLM_MODEL"
"""Name of the environment variable that has the folder or the name of a small model."""


@pytest.fixture(scope="module")
def package() -> Any:
    if api.find_api() is None:
        pytest.skip("TensorRT-LLM is not installed (PyPI has a stub only)")
    if not os.environ.get(MODEL_VARIABLE):
        pytest.skip(f"{MODEL_VARIABLE} names no model")
    return pytest.importorskip("tensorrt_llm")


def generate(package: Any, prompts: list[str], with_connector: bool) -> list[list[int]]:
    """Sends all prompts twice, one after another, and returns the tokens of each answer. The engine's own pool is too
    small for all prompts, so the second round needs flexkv to load them.
    """
    llmapi = package.llmapi
    cache = llmapi.KvCacheConfig(max_tokens=2048, enable_partial_reuse=False)
    more: dict[str, Any] = {}
    if with_connector:
        more["kv_connector_config"] = llmapi.KvCacheConnectorConfig(
            connector_module="flexkv.adapters.tensorrt_llm",
            connector_scheduler_class="FlexKVScheduler",
            connector_worker_class="FlexKVWorker",
        )
    model = package.LLM(os.environ[MODEL_VARIABLE], kv_cache_config=cache, **more)
    greedy = package.SamplingParams(max_tokens=16, temperature=0.0)
    try:
        # All ranks join the unit within the first iterations.
        for _ in range(3):
            model.generate("hello", greedy)
        return [
            list(model.generate(prompt, greedy).outputs[0].token_ids) for _ in range(2) for prompt in prompts
        ]
    finally:
        model.shutdown()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_tokens_are_those_without_flexkv(
    package: Any, mode: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXKV_HOST_BYTES", "1GiB")
    monkeypatch.setenv("FLEXKV_HOST_VERIFY", "true")
    monkeypatch.setenv("FLEXKV_LOAD_MODE", mode)
    prompts = [
        " ".join(f"{word} {number}" for number in range(200)) for word in ("red", "green", "blue", "white")
    ]
    plain = generate(package, prompts, with_connector=False)
    assert generate(package, prompts, with_connector=True) == plain
    said = capfd.readouterr()
    assert "loaded_pages=0" not in said.err + said.out, "nothing was loaded"
    assert "loaded_pages=" in said.err + said.out
