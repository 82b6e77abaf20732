"""Small transformers models with random weights, and prompts that consist of segments."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from flexkv.blend import segment_cache
from flexkv.blend.cache import SegmentCache

VOCABULARY = 97
ROUNDING = 1e-5
"""The largest relative error that can come from adding numbers in a different order."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
}
ROTARY_SHARE = {"glm": 0.5, "stablelm": 0.25}
"""The rotated share of each head, for families that do not rotate the complete head."""
SCALINGS: dict[str, dict] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def make_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **options):
    """Makes a model whose projections have weights four times as large as usual, so that each row depends noticeably on
    the rows before it.
    """
    config_class, model_class = FAMILIES[family]
    if family == "mistral":
        options.setdefault("sliding_window", None)
    if family == "glm":
        options.setdefault("pad_token_id", None)
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(4.0)
    return model.to(dtype)


def make_scaled(family: str, scaling: str):
    """Makes a model of the family. The model has this scaling of its rope, and the family's usual rotated share of each
    head.
    """
    rope = {"rope_theta": 10_000.0, **SCALINGS[scaling]}
    if family in ROTARY_SHARE:
        rope["partial_rotary_factor"] = ROTARY_SHARE[family]
    return make_model(family, rope_parameters=rope)


def make_cache(model, **options) -> SegmentCache:
    return segment_cache(
        model, {"weights": "random"}, **{"slots": 64, "staging_tokens": 512, "block_tokens": 8, **options}
    )


def random_segments(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length) for length in lengths]


@torch.no_grad()
def full(model, segments, past=None):
    """Runs the prompt with transformers itself. Returns the logits of the last token [1, vocabulary], and the KV
    cache."""
    tokens = torch.from_numpy(np.concatenate(segments))[None]
    found = model(tokens, past_key_values=past, use_cache=True)
    return found.logits[0, -1:], found.past_key_values


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def worst_layer(found, wanted, rows=slice(None)) -> float:
    """Returns the largest relative error among all layers' keys and values."""
    return max(
        relative(getattr(mine, plane)[:, :, rows], getattr(theirs, plane)[:, :, rows])
        for mine, theirs in zip(found.layers, wanted.layers, strict=True)
        for plane in ("keys", "values")
    )
