"""Writes small models of families that Hugging Face transformers supports. Their weights are random, but the same in
each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.model import PRESETS, WEIGHT_STD, write_tokenizer

LAYERS, SHARED_LAYERS = 5, 2
LLAMA_LAYERS = 2
KV_HEADS, HEAD = 2, 32
SLIDING_LAYERS, FULL_LAYERS, FULL_HEAD = 4, 2, 64
WINDOW = 128
"""Number of tokens to which a sliding layer attends. The tests' prompts are longer."""
STATE_LAYERS, STATE_HEAD = 3, 128
IMAGE_EDGE, PATCH, SCALE = 112, 14, 2
IMAGE_TOKENS = (IMAGE_EDGE // PATCH // SCALE) ** 2
"""Number of tokens of an image, without the three special tokens around them."""
IMAGE_TOKEN = "<image>"
IMAGE_WEIGHT_STD = 0.3
CHUNK = 256
"""Number of tokens of a chunk. In a layer with chunked attention, a token attends only to tokens of its own chunk."""
COMMON: dict[str, Any] = {
    "vocab_size": PRESETS["tiny"].vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": HEAD,
    "max_position_embeddings": PRESETS["tiny"].context_tokens,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def write_gemma_3n(folder: Path) -> Path:
    """Writes a Gemma 3n. Its last layers compute no KV and attend to the KV of earlier layers."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **COMMON,
        vocab_size_per_layer_input=COMMON["vocab_size"],
        hidden_size_per_layer_input=16,
        num_hidden_layers=LAYERS,
        num_kv_shared_layers=SHARED_LAYERS,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2) + ["sliding_attention"],
        sliding_window=WINDOW,
        num_key_value_heads=KV_HEADS,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * LAYERS,
    )
    return _write(Gemma3nForCausalLM, config, folder)


def write_gemma_4(folder: Path) -> Path:
    """Writes a Gemma 4. The heads of its full layers have a different size from those of its sliding layers."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **COMMON,
        vocab_size_per_layer_input=COMMON["vocab_size"],
        hidden_size_per_layer_input=16,
        num_hidden_layers=SLIDING_LAYERS + FULL_LAYERS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * FULL_LAYERS,
        sliding_window=WINDOW,
        num_key_value_heads=KV_HEADS,
        global_head_dim=FULL_HEAD,
        num_global_key_value_heads=KV_HEADS,
    )
    return _write(Gemma4ForCausalLM, config, folder)


def write_mistral(folder: Path) -> Path:
    """Writes a small model like Mistral 7B 0.1: every layer attends to a window, and none to the complete prompt."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **COMMON,
        num_hidden_layers=SLIDING_LAYERS,
        num_key_value_heads=KV_HEADS,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
    )
    return _write(MistralForCausalLM, config, folder)


def write_gpt_oss(folder: Path) -> Path:
    """Writes a GPT-OSS. Every other layer attends to a window, and each head has an attention sink."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        num_hidden_layers=SLIDING_LAYERS,
        layer_types=["sliding_attention", "full_attention"] * (SLIDING_LAYERS // 2),
        num_key_value_heads=KV_HEADS,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return _write(GptOssForCausalLM, config, folder)


def write_llama_4(folder: Path) -> Path:
    """Writes a Llama 4. Three of its four layers have chunked attention."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **COMMON,
        intermediate_size_mlp=COMMON["intermediate_size"],
        num_hidden_layers=4,
        num_key_value_heads=KV_HEADS,
        attention_chunk_size=CHUNK,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        tie_word_embeddings=False,
    )
    return _write(Llama4ForCausalLM, config, folder)


def write_lfm_2(folder: Path) -> Path:
    """Writes an LFM2. Three of its four layers are short convolutions, whose states are their last inputs. The written
    configuration has some settings twice: vLLM reads them under the names in the published models' files, and
    transformers reads them under its own names.
    """
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **COMMON,
        conv_dim=COMMON["hidden_size"],
        conv_dim_out=COMMON["hidden_size"],
        block_dim=COMMON["hidden_size"],
        block_ff_dim=COMMON["intermediate_size"],
        block_multiple_of=COMMON["intermediate_size"],
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=STATE_LAYERS + 1,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=False,
    )
    return _write(Lfm2ForCausalLM, config, folder)


def write_llama_with_one_kv_head(folder: Path) -> Path:
    """Writes a Llama with a single KV head, which all query heads share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **COMMON, num_hidden_layers=LLAMA_LAYERS, num_key_value_heads=1, tie_word_embeddings=False
    )
    return _write(LlamaForCausalLM, config, folder)


def write_qwen_3_next(folder: Path) -> Path:
    """Writes a Qwen3-Next. Three of its four layers keep a recurrent state instead of K and V. It has bfloat16 weights
    and state heads of 128, because vLLM's kernels for CPUs support nothing else.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON | {"dtype": "bfloat16", "head_dim": FULL_HEAD},
        num_hidden_layers=STATE_LAYERS + 1,
        num_key_value_heads=KV_HEADS,
        linear_num_key_heads=KV_HEADS,
        linear_num_value_heads=KV_HEADS,
        linear_key_head_dim=STATE_HEAD,
        linear_value_head_dim=STATE_HEAD,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    )
    return _write(Qwen3NextForCausalLM, config, folder)


def write_hrm_text(folder: Path) -> Path:
    """Writes an HRM-Text. It is a prefix LM: every token of a prompt attends to all tokens of the prompt."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    config = HrmTextConfig(**COMMON, num_hidden_layers=2, num_layers_per_stack=1, H_cycles=1, L_cycles=1)
    return _write(HrmTextForCausalLM, config, folder)


def write_idefics_3(folder: Path) -> Path:
    """Writes an Idefics 3, which takes images. vLLM runs several image models on a CPU. This one is used because its
    processor needs neither torchvision nor any file from a hub. An image of any size is one part of the prompt.
    """
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        Idefics3VisionConfig,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, PRESETS["tiny"])
    around = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=[IMAGE_TOKEN, *around],
    )
    edge = {"longest_edge": IMAGE_EDGE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS).save_pretrained(folder)
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=IMAGE_EDGE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            **COMMON | {"vocab_size": len(tokenizer)},
            num_hidden_layers=LLAMA_LAYERS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=False,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=0,
        scale_factor=SCALE,
        tie_word_embeddings=False,
    )
    # The weights are large enough that the image affects the answer.
    return _write_weights(Idefics3ForConditionalGeneration, config, folder, IMAGE_WEIGHT_STD)


def _write(kind: Any, config: Any, folder: Path) -> Path:
    _write_weights(kind, config, folder, WEIGHT_STD)
    write_tokenizer(folder, PRESETS["tiny"])
    return folder


def _write_weights(kind: Any, config: Any, folder: Path, std: float) -> Path:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(), torch.no_grad():
        # Only tensors of two or more dimensions are replaced below. The others, such as norms, keep their initial
        # values.
        torch.manual_seed(0)
        model = kind(config)
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.save_pretrained(folder)
    return folder
