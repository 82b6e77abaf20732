"""Implements in torch, on host tensors, those operators of vLLM's compiled libraries that a dense Llama needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SUPPORTED = "bool"
"""Result type of the operators that report whether the GPU has a certain feature. In this mock they always report
False."""

ONLY_NAMED = (
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "scaled_fp4_quant",
    "scaled_fp4_quant.out",
    "per_token_group_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_nvfp4_quant",
    "fused_qk_norm_rope",
)
"""Operators that vLLM never calls in these tests. vLLM's compiler passes look them up in `torch.ops._C` when they are
imported."""


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    normed = (wide * scale).to(input.dtype)
    result.copy_(normed if weight is None else normed * weight)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


def silu_and_mul(result: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert is_neox, "Llama turns halves, not pairs"
    assert not inverse
    turned = cos_sin_cache.shape[-1]
    angles = cos_sin_cache[positions.flatten()].unsqueeze(1).to(query.dtype)
    cos, sin = angles.chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(positions.numel(), -1, head_size)
            part = heads[..., rope_dim_offset : rope_dim_offset + turned]
            low, high = part.clone().chunk(2, dim=-1)
            part.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


def vocab_parallel_embedding(
    out: Tensor,
    ids: Tensor,
    weight: Tensor,
    first: int,
    end: int,
    padding: int,
    added_first: int,
    added_end: int,
) -> None:
    held = (ids >= first) & (ids < end)
    rows = weight[torch.where(held, ids - first, 0).long()]
    out.copy_(rows * held.unsqueeze(-1))


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes keys and values to their slots. The key cache and the value cache have the shape [blocks, tokens per
    block, heads, head size] and any strides. A padding token has the slot -1 and is skipped.
    """
    block_tokens = key_cache.shape[1]
    real = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[real].long()
    where = slots // block_tokens, slots % block_tokens
    key_cache[where] = key[real].to(key_cache.dtype)
    value_cache[where] = value[real].to(value_cache.dtype)


def swap_blocks_batch(
    src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, is_src_access_order_any: bool = False
) -> None:
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


OPERATORS: dict[str, dict[str, tuple[Callable[..., Any] | None, str]]] = {
    "_C": {
        "rms_norm": (rms_norm, "(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()"),
        "fused_add_rms_norm": (
            fused_add_rms_norm,
            "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        ),
        "silu_and_mul": (silu_and_mul, "(Tensor! result, Tensor input) -> ()"),
        "rotary_embedding": (
            rotary_embedding,
            "(Tensor positions, Tensor! query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, bool is_neox, "
            "int rope_dim_offset=0, bool inverse=False) -> ()",
        ),
        "vocab_parallel_embedding": (
            vocab_parallel_embedding,
            "(Tensor! out, Tensor ids, Tensor weight, int first, int end, int padding, int added_first, "
            "int added_end) -> ()",
        ),
        "get_cuda_view_from_cpu_tensor": (lambda tensor: tensor, "(Tensor(a) tensor) -> Tensor(a)"),
        "cutlass_scaled_mm_supports_fp8": (None, "(int capability) -> bool"),
        "cutlass_scaled_mm_supports_block_fp8": (None, "(int capability) -> bool"),
        "cutlass_scaled_mm_supports_fp4": (None, "(int capability) -> bool"),
        "cutlass_group_gemm_supported": (None, "(int capability) -> bool"),
        **dict.fromkeys(ONLY_NAMED, (None, "() -> ()")),
    },
    "_C_cache_ops": {
        "reshape_and_cache_flash": (
            reshape_and_cache_flash,
            "(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
            "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
        ),
        "swap_blocks": (
            None,
            "(Tensor src, Tensor! dst, int block_size_in_bytes, Tensor block_mapping) -> ()",
        ),
        "swap_blocks_batch": (
            swap_blocks_batch,
            "(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any=False) -> ()",
        ),
    },
}

_kept: list[Any] = []
"""References that keep the libraries alive: when a library is garbage-collected, torch removes its operators."""


def register() -> None:
    for namespace, operators in OPERATORS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        _kept.append(library)
        for name, (function, signature) in operators.items():
            library.define(name + signature)
            if signature.endswith(SUPPORTED):
                library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
            elif function is not None:
                library.impl(name, function, "CPU")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    window_size: Any = None,
    **_: Any,
) -> Tensor:
    """Computes attention like FlashAttention with paged keys and values, with or without a causal mask and a window.
    Each request is computed separately.
    """
    assert block_table is not None, "only paged attention"
    assert seqused_k is not None
    out = torch.empty_like(q) if out is None else out
    starts = cu_seqlens_q.tolist()
    scale = softmax_scale or q.shape[-1] ** -0.5
    for number, (start, end) in enumerate(pairwise(starts)):
        length = int(seqused_k[number])
        if start == end or not length:
            out[start:end] = 0
            continue
        pages = block_table[number, : -(-length // k.shape[1])].long()
        each = q.shape[1] // k.shape[2]
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(each, dim=1) for cache in (k, v)
        )
        at = torch.arange(length - (end - start), length).unsqueeze(1)
        distance = at - torch.arange(length).unsqueeze(0)
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if window_size is not None and window_size[0] >= 0:
            hidden |= distance > window_size[0]
            # Values to which no token attends may be NaN. They must be zeroed, because NaN times a weight of 0 is NaN.
            values = values.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out
