"""Shows for which engines and models blending refuses to start, and the reasons that it gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from flexkv.adapters.vllm.blend import ARCHITECTURES, MODELS
from flexkv.adapters.vllm.blend.contract import TESTED, engine_refusal, model_refusal
from flexkv.adapters.vllm.engine_checks import engine_release
from flexkv.config import BlendConfig

BACKEND = min(TESTED[engine_release()])


def engine(**changed: Any) -> Any:
    """Makes an engine's configuration that allows blending, with some values changed. In a keyword, `__` stands for
    each dot of the value's name.
    """
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            architectures=["FlexKVLlamaForCausalLM"],
            is_moe=False,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            uses_mrope=False,
            runner_type="generate",
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            use_ubatching=False,
            data_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
    )
    for name, value in changed.items():
        *parents, last = name.split("__")
        owner: Any = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, last, value)
    return config


def test_an_engine_that_can_blend_is_not_refused() -> None:
    assert engine_refusal(engine()) == ""


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"model_config__architectures": ["LlamaForCausalLM"]}, '"FlexKVLlamaForCausalLM"'),
        ({"model_config__architectures": ["GlmForCausalLM"]}, "no model class for GlmForCausalLM"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__use_ubatching": True}, "enable_dbo"),
        ({"parallel_config__data_parallel_size": 2, "model_config__is_moe": True}, "experts"),
        ({"lora_config": "some"}, "LoRA"),
        ({"speculative_config": "some"}, "speculative decoding"),
        ({"model_config__is_multimodal_model": True}, "images"),
        ({"model_config__enable_prompt_embeds": True}, "prompt embeddings"),
        ({"model_config__uses_mrope": True}, "M-RoPE"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        (
            {"compilation_config__cudagraph_mode": SimpleNamespace(has_full_cudagraphs=lambda: True)},
            "CUDA graphs of the whole forward",
        ),
    ],
)
def test_an_engine_that_cannot_blend_is_refused_by_name(changed: dict[str, Any], word: str) -> None:
    assert word in engine_refusal(engine(**changed))


def test_breakable_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert "breakable CUDA graphs" in engine_refusal(engine())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert engine_refusal(engine()) == f"it was tested with vLLM {' and '.join(TESTED)}, and this is 0.99"


class Layer:
    """A decoder layer with the attributes that blending needs."""

    def __init__(self, rope: Any, **attention: Any) -> None:
        parts: dict[str, Any] = {
            "impl": SimpleNamespace(do_kv_cache_update=lambda *rows: None),
            "num_kv_heads": 2,
            "head_size": 64,
            "head_size_v": 64,
            "kv_cache": torch.empty(0),
            "attn_backend": SimpleNamespace(get_name=lambda: BACKEND),
            "sliding_window": None,
            "kv_sharing_target_layer_name": None,
        }
        self.self_attn = SimpleNamespace(attn=SimpleNamespace(**parts | attention), rotary_emb=rope)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> None: ...


class OtherLayer(Layer):
    def forward(self, hidden_states: Any, positions: Any, residual: Any) -> None: ...  # type: ignore[override]


def model(*layers: Layer) -> Any:
    rope = object()
    parts = {"layers": layers or [Layer(rope) for _ in range(4)], "norm": print, "embed_input_ids": print}
    return SimpleNamespace(model=SimpleNamespace(**parts))


ROPE = object()


@pytest.mark.parametrize(
    ("found", "groups", "word"),
    [
        (None, 1, "another model class"),
        (model(), 2, "2 KV cache groups"),
        (SimpleNamespace(model=SimpleNamespace(blocks=[])), 1, "has no attribute 'layers'"),
        (model(*[OtherLayer(ROPE) for _ in range(4)]), 1, "take other arguments"),
        (model(*[Layer(ROPE) for _ in range(2)]), 1, "blend.check_layer is 1; the model has layers 0 to 1"),
        (model(*[Layer(object()) for _ in range(4)]), 1, "several rotary embeddings"),
        (model(*[Layer(ROPE, num_kv_heads=1 + n) for n in range(4)]), 1, "differ in their heads"),
        (model(*[Layer(ROPE, head_size_v=32) for _ in range(4)]), 1, "heads of 64 and 32"),
        (model(*[Layer(ROPE, kv_cache=torch.empty(0, dtype=torch.uint8))] * 4), 1, "torch.uint8"),
        (model(*[Layer(ROPE, sliding_window=128 * n or None) for n in range(4)]), 1, "windows"),
        (model(*[Layer(ROPE, kv_sharing_target_layer_name="l0")] * 4), 1, "share KV"),
        (
            model(*[Layer(ROPE, attn_backend=SimpleNamespace(get_name=lambda: "FLEX_ATTENTION"))] * 4),
            1,
            f"the attention backend is FLEX_ATTENTION; it was tested with {BACKEND}",
        ),
    ],
)
def test_a_model_that_cannot_be_blended_is_refused_by_name(found: Any, groups: int, word: str) -> None:
    assert word in model_refusal(found, groups, BlendConfig(enabled=True))


def test_a_model_with_all_parts_is_not_refused() -> None:
    assert model_refusal(model(), 1, BlendConfig(enabled=True)) == ""


def test_every_architecture_has_its_class_and_vllm_knows_the_parent() -> None:
    from importlib import import_module

    classes = import_module(MODELS)
    for plain, ours in ARCHITECTURES.items():
        assert plain in {parent.__name__ for parent in getattr(classes, ours).__mro__}
