"""Writes a small random-weight DeepSeek-V2 with multi-head latent attention (MLA) and dense layers only.

vLLM's MLA for CPUs decodes a latent of 512 + 64 numbers a token only, and in blocks of 16 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.model import PRESETS, WEIGHT_STD, write_tokenizer

LATENT, ROPE = 512, 64
BLOCK_TOKENS = 16
LAYERS, HIDDEN, HEADS, HEAD, INTERMEDIATE = 3, 256, 4, 64, 512
CONTEXT_TOKENS = 1024


def write_latent_model(folder: Path) -> Path:
    """Writes the model into `folder` and returns it; float32, the same bytes every time."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    vocabulary = PRESETS["tiny"].vocabulary
    (folder / "config.json").write_text(json.dumps(_config(vocabulary)))
    save_file(_weights(vocabulary), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder, PRESETS["tiny"])
    return folder


def _config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": HEAD,
        "v_head_dim": HEAD,
        # Every layer comes before the first one with experts.
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 1,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(vocabulary: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(0)

    def drawn(rows: int, columns: int, std: float = WEIGHT_STD) -> NDArray[np.float32]:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": drawn(vocabulary, HIDDEN, 1.0),
        "lm_head.weight": drawn(vocabulary, HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": drawn(HEADS * (HEAD + ROPE), HIDDEN),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": drawn(LATENT + ROPE, HIDDEN),
            prefix + "self_attn.kv_a_layernorm.weight": np.ones(LATENT, np.float32),
            prefix + "self_attn.kv_b_proj.weight": drawn(HEADS * 2 * HEAD, LATENT),
            prefix + "self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD),
            prefix + "mlp.gate_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": drawn(HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
        }
    return tensors
