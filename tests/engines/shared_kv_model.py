"""Writes a small random-weight Gemma 3n: its last layers compute no KV and attend to that of earlier ones."""

from __future__ import annotations

from pathlib import Path

from demo.model import PRESETS, WEIGHT_STD, write_tokenizer

LAYERS, SHARED_LAYERS = 5, 2
KV_HEADS, HEAD = 2, 32
WINDOW = 128
"""Tokens that a sliding layer sees; shorter than the tests' prompts."""


def write_shared_kv_model(folder: Path) -> Path:
    """Writes the model into `folder` and returns it; float32, the same numbers every time."""
    import torch
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    vocabulary = PRESETS["tiny"].vocabulary
    config = Gemma3nTextConfig(
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary,
        hidden_size=128,
        hidden_size_per_layer_input=16,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_kv_shared_layers=SHARED_LAYERS,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2) + ["sliding_attention"],
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=PRESETS["tiny"].context_tokens,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * LAYERS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model = Gemma3nForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * WEIGHT_STD)
    model.save_pretrained(folder)
    write_tokenizer(folder, PRESETS["tiny"])
    return folder
