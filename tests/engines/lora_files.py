"""Writes a random LoRA adapter for the tiny model, in the format of the peft library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from demo.model import PRESETS

RANK = 8
ALPHA = 64
"""LoRA scale: peft multiplies the adapter's product by ALPHA / RANK. The scale is so large that the adapter changes the
output from the first token on.
"""


def write_lora(folder: Path, seed: int) -> Path:
    """Writes an adapter that changes the key and value projections, so that the KV cache itself differs."""
    from safetensors.numpy import save_file

    shape = PRESETS["tiny"]
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    key_value = shape.kv_heads * shape.head_size
    tensors = {}
    for layer in range(shape.layers):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down, up = (RANK, shape.hidden), (key_value, RANK)
            tensors[f"{prefix}.lora_A.weight"] = generator.standard_normal(down, dtype=np.float32) * 0.05
            tensors[f"{prefix}.lora_B.weight"] = generator.standard_normal(up, dtype=np.float32) * 0.05
    save_file(
        {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in tensors.items()},
        str(folder / "adapter_model.safetensors"),
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
