"""Writes small Llama models with random weights. Any engine can load them like a downloaded model. Writing them needs
neither a model hub nor torch.

The weights have a standard deviation of 0.08, which is large enough for the KV cache to decide the generated tokens:
wrong KV in a block changes the output. An engine's own dummy weights are too small for that.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WEIGHT_STD = 0.08
"""Standard deviation of the weights of every projection. A control test among the engine tests shows that this value is
large enough for tests to notice wrong KV.
"""

FIRST_WORD_TOKEN = 4
"""The first token that is a word. Those before it are <pad>, <s>, </s> and <unk>."""


Weights = dict[str, NDArray[np.float32]]
"""A model's tensors by name."""


class Draw(Protocol):
    """A function that returns a random matrix, float32 [rows, columns]."""

    def __call__(self, rows: int, columns: int, std: float = WEIGHT_STD) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a Llama model. All its weights are float32.

    Attributes:
        context_tokens: longest sequence that the model's rope table covers.
        head: number of elements of a head; 0 if the hidden size is divided among the heads.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 1024
    context_tokens: int = 8192
    head: int = 0

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, in float32."""
        return 2 * self.layers * self.kv_heads * self.head_size * 4


PRESETS = {
    # Starts and prefills quickly; for tests and the second part of the demo.
    "tiny": ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512),
    # A cold prefill of 4k tokens takes seconds on two cores, which is long enough for a comparison with a hit.
    "medium": ModelShape(layers=8, hidden=512, heads=8, kv_heads=4, intermediate=1536),
    # A layer has 101,000 weights per element of a query; a Llama of 70B has 104,000, and "medium" has 6,000. So
    # attention takes about the same share of a prompt's time as in a large model.
    "wide": ModelShape(layers=4, hidden=1024, heads=2, kv_heads=1, intermediate=4096, head=64),
    # Has two GB of weights, so that reading them takes a noticeable time.
    "heavy": ModelShape(layers=8, hidden=2048, heads=16, kv_heads=4, intermediate=8192),
}


def write_model(folder: Path, preset: str = "tiny", seed: int = 0) -> Path:
    """Writes the model to `folder`/`preset`-`seed` if this folder does not exist yet, and returns the folder's path.

    The same preset and seed give the same bytes. Several processes can write the same model at once, because the folder
    appears with one rename.

    Raises:
        ValueError: there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"model preset {preset!r} is not one of {sorted(PRESETS)}")
    target = folder / f"{preset}-{seed}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
    try:
        shape = PRESETS[preset]
        config = model_config("LlamaForCausalLM", "llama", shape, head_dim=shape.head_size)
        (staging / "config.json").write_text(json.dumps(config, indent=1))
        _write_weights(staging / "model.safetensors", shape, seed)
        write_tokenizer(staging, shape)
        try:
            os.rename(staging, target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def prompt_tokens(count: int, stream: int, shape: ModelShape = PRESETS["tiny"]) -> list[int]:
    """Returns `count` word tokens. The same `stream` gives the same tokens; different streams differ already in the
    first token.
    """
    words = shape.vocabulary - FIRST_WORD_TOKEN
    drawn = np.random.default_rng([stream, 20]).integers(0, words, size=max(count, 1))
    drawn[0] = stream % words
    return [FIRST_WORD_TOKEN + int(word) for word in drawn[:count]]


def model_config(
    architecture: str, model_type: str, shape: ModelShape, **particular: object
) -> dict[str, object]:
    """Returns a Hugging Face configuration. `particular` contains the fields that only models of type `model_type`
    have."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context_tokens,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **particular,
    }


def model_weights(shape: ModelShape, drawn: Draw, attention: Callable[[str], Weights]) -> Weights:
    """Returns the model's weights: the embeddings, then attention, dense MLP and norms of every layer, drawn in this
    order.

    Args:
        attention: a function that returns a layer's attention weights; its argument is the prefix of their names,
            "model.layers.N.self_attn.".
    """
    ones = np.ones(shape.hidden, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": drawn(shape.vocabulary, shape.hidden, 1.0),
        "lm_head.weight": drawn(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors |= attention(prefix + "self_attn.")
        tensors |= {
            prefix + "mlp.gate_proj.weight": drawn(shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": drawn(shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": drawn(shape.hidden, shape.intermediate),
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
        }
    return tensors


def _write_weights(path: Path, shape: ModelShape, seed: int) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)

    def drawn(rows: int, columns: int, std: float = WEIGHT_STD) -> NDArray[np.float32]:
        weights = generator.standard_normal((rows, columns), dtype=np.float32)
        return np.asarray(weights * np.float32(std), dtype=np.float32)

    query, key_value = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def attention(prefix: str) -> Weights:
        return {
            prefix + "q_proj.weight": drawn(query, shape.hidden),
            prefix + "k_proj.weight": drawn(key_value, shape.hidden),
            prefix + "v_proj.weight": drawn(key_value, shape.hidden),
            prefix + "o_proj.weight": drawn(shape.hidden, query),
        }

    save_file(model_weights(shape, drawn, attention), str(path), metadata={"format": "pt"})


def write_tokenizer(folder: Path, shape: ModelShape) -> None:
    """Writes a tokenizer that has a word for every token of the vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {f"w{token}": token for token in range(FIRST_WORD_TOKEN, shape.vocabulary)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": shape.context_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
