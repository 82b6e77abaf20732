"""Makes variants of a model: one with sliding windows, and one with few words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from demo.model import FIRST_WORD_TOKEN

WINDOW_TOKENS = 48
WORDS = 6


def with_windows(model: Path, folder: Path) -> Path:
    """Copies the model. In the copy, every other layer attends only to a sliding window."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    layers = [kinds[number % 2] for number in range(config["num_hidden_layers"])]
    config |= {"sliding_window": WINDOW_TOKENS, "layer_types": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_few_words(model: Path, folder: Path) -> Path:
    """Copies the model. The copy can generate only a few words, so it soon repeats itself. This is true whichever words
    it chooses, which depends on the machine's rounding.
    """
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"].copy()
    head[:FIRST_WORD_TOKEN] = head[FIRST_WORD_TOKEN + WORDS :] = 0
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
