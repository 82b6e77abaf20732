"""Checks at the engine's start whether the engine and its model have the properties that blending assumes.

vLLM guarantees neither the structure of its models nor that of its forward context. If either differs from what
blending needs, blending is off: one warning says why, and every request is computed completely.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from flexkv.adapters.vllm.blend import ARCHITECTURES, PLAIN
from flexkv.adapters.vllm.engine_checks import engine_release
from flexkv.blend.base import KvShape
from flexkv.blend.registry import NotBlendable, rope_of
from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.config import BlendConfig

TESTED = {"0.32": frozenset({"CPU_ATTN"}), "0.33": frozenset({"FLASH_ATTN", "TRITON_ATTN"})}
"""The versions of vLLM with which the tests of blending run, each with the tested attention backends. docs/blending.md
lists the kernels."""

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

TURNED_ROWS, LONGEST = 64, 4096
"""To check a rotation, `TURNED_ROWS` keys at positions below `LONGEST` are rotated. At larger positions, the float32
angles of a model are off by more than `TURN_LIMITS`."""
TURN_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The largest relative error of rotated keys that is allowed, by dtype. A rotation with a wrong pairing or scaling is
off by about 1."""


def engine_refusal(vllm_config: Any) -> str:
    """Returns why this engine's configuration rules out blending; empty if it does not."""
    from vllm import envs

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    architecture = str(model.architectures[0])
    if architecture not in PLAIN:
        if (ours := ARCHITECTURES.get(architecture)) is None:
            return f"it has no model class for {architecture}; it has for {', '.join(ARCHITECTURES)}"
        return f'start vLLM with --hf-overrides \'{{"architectures":["{ours}"]}}\''
    if (release := engine_release()) not in TESTED:
        return f"it was tested with vLLM {' and '.join(TESTED)}, and this is {release}"
    found = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "batches in parts (enable_dbo, ubatch_size)": parallel.use_ubatching,
        "data parallelism with experts": parallel.data_parallel_size > 1 and model.is_moe,
        "LoRA adapters": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "images and other inputs": model.is_multimodal_model,
        "prompt embeddings": model.enable_prompt_embeds,
        "positions in several dimensions (M-RoPE)": model.uses_mrope,
        "pooling models": model.runner_type != "generate",
        f"a KV cache in {vllm_config.cache_config.cache_dtype}": str(
            vllm_config.cache_config.cache_dtype
        ).startswith(("fp8", "nvfp4", "int")),
        "CUDA graphs of the whole forward": vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        # A CUDA graph replays the forward pass without a call to the model's class, which does the blending.
        "breakable CUDA graphs (VLLM_USE_BREAKABLE_CUDAGRAPH)": envs.VLLM_USE_BREAKABLE_CUDAGRAPH,
    }
    return next((f"it does not work with {name}" for name, there in found.items() if there), "")


def model_refusal(model: Any, groups: int, settings: BlendConfig) -> str:
    """Returns why this model's structure rules out blending; empty if it does not.

    Args:
        model: the engine's model; None if it is not one of flexkv's classes.
        groups: number of the engine's KV cache groups.
    """
    if model is None:
        return "vLLM made another model class than the one that was asked for"
    if groups != 1:
        return f"the engine has {groups} KV cache groups; it works with one"
    try:
        layers = list(model.model.layers)
        attentions = [layer.self_attn.attn for layer in layers]
        ropes = {id(layer.self_attn.rotary_emb) for layer in layers}
        parts = [model.model.embed_input_ids, model.model.norm]
        parts += [attention.impl.do_kv_cache_update for attention in attentions]
    except AttributeError as error:
        return f"vLLM's model has another form: {error}"
    parameters = {tuple(inspect.signature(layer.forward).parameters)[:3] for layer in layers}
    if parameters != {("positions", "hidden_states", "residual")} or not all(map(callable, parts)):
        return f"vLLM's layers take other arguments: {sorted(parameters)}"
    if settings.check_layer >= len(layers) - 1:
        return f"blend.check_layer is {settings.check_layer}; the model has layers 0 to {len(layers) - 1}"
    if len(ropes) != 1:
        return "its layers have several rotary embeddings"
    kinds = {
        (attention.num_kv_heads, attention.head_size, attention.head_size_v, attention.kv_cache.dtype)
        for attention in attentions
    }
    backends = {attention.attn_backend.get_name() for attention in attentions}
    if len(kinds) != 1 or len(backends) != 1:
        return "its layers differ in their heads, their dtype or their attention backend"
    if not backends <= (tested := TESTED[engine_release()]):
        return f"the attention backend is {backends.pop()}; it was tested with {', '.join(sorted(tested))}"
    first = attentions[0]
    if first.head_size != first.head_size_v or first.kv_cache.dtype not in DTYPES:
        return (
            f"its KV cache has heads of {first.head_size} and {first.head_size_v} in {first.kv_cache.dtype}"
        )
    windows = {getattr(attention, "sliding_window", None) for attention in attentions}
    shared = {getattr(attention, "kv_sharing_target_layer_name", None) for attention in attentions}
    return "its layers attend through windows or share KV" if windows | shared != {None} else ""


def shape_of(model: Any) -> KvShape:
    """Returns the shape of a token's KV on this rank.

    Preconditions:
        `model_refusal` has returned an empty text.
    """
    layers = model.model.layers
    attention = layers[0].self_attn.attn
    return KvShape(len(layers), attention.num_kv_heads, attention.head_size, DTYPES[attention.kv_cache.dtype])


def rotation_of(model: Any, vllm_config: Any) -> KeyRotation:
    """Returns the rotation that moves the model's keys to other positions, after comparing it with the model's own.

    Raises:
        NotBlendable: the model's family or scaling is not known, or the rotation differs from the model's own; the
            message says by how much.
    """
    shape = shape_of(model)
    rope = rope_of(vllm_config.model_config.hf_text_config)
    if rope.scaling == "dynamic":
        raise NotBlendable("its rope is dynamic, and vLLM scales that otherwise than the models' authors")
    rotary = model.model.layers[0].self_attn.rotary_emb
    random = np.random.default_rng(0)
    longest = min(LONGEST, vllm_config.model_config.max_model_len)
    old, new = random.integers(0, longest, TURNED_ROWS), random.integers(0, longest, TURNED_ROWS)
    dtype, device = vllm_config.model_config.dtype, model.model.layers[0].self_attn.attn.kv_cache.device
    plain = torch.from_numpy(random.standard_normal((TURNED_ROWS, shape.heads * shape.head_dim)))

    def rotated(positions: np.ndarray) -> Any:
        keys = plain.to(device=device, dtype=dtype)
        _, turned = rotary(torch.from_numpy(positions).to(device), keys.clone(), keys.clone())
        return turned.float().cpu().contiguous()

    check = KeyRotation(rope, shape.heads, "float32")
    keys, wanted = rotated(old), rotated(new)
    places = RowPlaces(np.arange(TURNED_ROWS, dtype=np.int64) * check.row_bytes, 4 * shape.head_dim)
    check.apply(keys, places, keys, places, check.table(old, new))
    error = float((keys - wanted).norm() / wanted.norm())
    if not error <= TURN_LIMITS[dtype]:
        raise NotBlendable(f"keys turned to other positions differ from the model's own by {error:.2g}")
    return KeyRotation(rope, shape.heads, shape.dtype)
