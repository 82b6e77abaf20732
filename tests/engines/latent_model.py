"""Writes a small DeepSeek-V2 model with random weights. It has multi-head latent attention (MLA), and only dense
layers.

Its latents have 512 + 64 numbers per token, and its blocks 16 tokens, because vLLM's MLA kernel for CPUs supports only
these sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.model import PRESETS, WEIGHT_STD, ModelShape, Weights, model_config, model_weights, write_tokenizer

LATENT, ROPE = 512, 64
BLOCK_TOKENS = 16
LAYERS, HIDDEN, HEADS, HEAD, INTERMEDIATE = 3, 256, 4, 64, 512
CONTEXT_TOKENS = 1024


def write_latent_model(folder: Path) -> Path:
    """Writes the model in float32 into `folder`, with the same bytes every time. Returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    vocabulary = PRESETS["tiny"].vocabulary
    shape = ModelShape(LAYERS, HIDDEN, HEADS, HEADS, INTERMEDIATE, vocabulary, CONTEXT_TOKENS)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    save_file(_weights(shape), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder, PRESETS["tiny"])
    return folder


def _config(shape: ModelShape) -> dict[str, object]:
    return model_config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        shape,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=HEAD,
        v_head_dim=HEAD,
        # Layers from this number on would have experts. The model has no such layer.
        first_k_dense_replace=LAYERS,
        n_routed_experts=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        num_experts_per_tok=1,
    )


def _weights(shape: ModelShape) -> Weights:
    generator = np.random.default_rng(0)

    def drawn(rows: int, columns: int, std: float = WEIGHT_STD) -> NDArray[np.float32]:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    def attention(prefix: str) -> Weights:
        return {
            prefix + "q_proj.weight": drawn(HEADS * (HEAD + ROPE), HIDDEN),
            prefix + "kv_a_proj_with_mqa.weight": drawn(LATENT + ROPE, HIDDEN),
            prefix + "kv_a_layernorm.weight": np.ones(LATENT, np.float32),
            prefix + "kv_b_proj.weight": drawn(HEADS * 2 * HEAD, LATENT),
            prefix + "o_proj.weight": drawn(HIDDEN, HEADS * HEAD),
        }

    return model_weights(shape, drawn, attention)
