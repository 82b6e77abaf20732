"""For every kind of RoPE scaling, flexkv rotates a model's keys as vLLM's own rotary embedding does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from flexkv.adapters.vllm.blend.contract import TURN_LIMITS, rotation_of
from flexkv.blend.registry import NotBlendable

HEADS, HEAD_DIM, POSITIONS = 2, 64, 8192
THETA = 10_000.0
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def parameters(scaling: str) -> dict[str, Any]:
    return {"rope_type": scaling, "rope_theta": THETA} | SCALINGS[scaling]


def rotary(dtype: Any = torch.float32, is_neox_style: bool = True, **changed: Any) -> Any:
    """Returns vLLM's rotary embedding for the rope parameters `changed`."""
    with set_current_vllm_config(VllmConfig()):
        return get_rope(HEAD_DIM, POSITIONS, is_neox_style, changed, dtype)


def turn(described: str, module: Any, dtype: Any = torch.float32) -> Any:
    """Returns flexkv's rotation for a model whose configuration has the scaling `described` and whose layers have the
    rotary embedding `module`.
    """
    attention = SimpleNamespace(num_kv_heads=HEADS, head_size=HEAD_DIM, kv_cache=torch.empty(0, dtype=dtype))
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn=attention, rotary_emb=module))
    text = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        rope_parameters=parameters(described),
        architectures=["LlamaForCausalLM"],
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, max_model_len=POSITIONS, dtype=dtype)
    )
    return rotation_of(SimpleNamespace(model=SimpleNamespace(layers=[layer])), config)


@pytest.mark.parametrize("dtype", list(TURN_LIMITS))
@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "dynamic"])
def test_keys_are_turned_as_the_engines_module_turns_them(scaling: str, dtype: Any) -> None:
    found = turn(scaling, rotary(dtype, **parameters(scaling)), dtype)
    assert found.row_bytes == HEADS * HEAD_DIM * dtype.itemsize


def test_a_dynamic_rope_is_refused() -> None:
    with pytest.raises(NotBlendable, match="its rope is dynamic, and vLLM scales that otherwise"):
        turn("dynamic", rotary(**parameters("dynamic")))


@pytest.mark.parametrize("dtype", list(TURN_LIMITS))
@pytest.mark.parametrize(
    "module",
    [
        {"is_neox_style": False, **parameters("default")},
        parameters("default") | {"rope_theta": 2 * THETA},
        parameters("default") | {"partial_rotary_factor": 0.5},
        parameters("linear"),
        parameters("yarn"),
        parameters("llama3"),
    ],
    ids=["pairing", "theta", "half of a head", "linear", "yarn", "llama3"],
)
def test_another_rotary_than_the_configuration_describes_is_refused(
    module: dict[str, Any], dtype: Any
) -> None:
    words = r"keys turned to other positions differ from the model's own by (\d\.\d|\d)"
    with pytest.raises(NotBlendable, match=words) as refused:
        turn("default", rotary(dtype, **module), dtype)
    assert float(str(refused.value).rpartition(" ")[2]) > 10 * TURN_LIMITS[dtype], "no matter of rounding"
