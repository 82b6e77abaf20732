"""Makes KV groups of every kind, with one layer each, for an engine that uses vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

PAGE = 64
"""Number of elements of a block in one layer. It is the same in every KV group."""


def full(block: int) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=PAGE // block // 2, dtype=torch.float32
    )


def window(block: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=PAGE // block // 2,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def chunk(block: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=PAGE // block // 2,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


def state(block: int) -> KVCacheSpec:
    return MambaSpec(block_size=block, shapes=((PAGE,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def pool_of(specs: Sequence[KVCacheSpec], blocks: int) -> KVCacheConfig:
    """Returns a configuration with one layer per group. As in vLLM, all groups share the same memory."""
    size = blocks * PAGE * 4
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=[f"layer.{n}"], layer_stride=size, block_stride=PAGE * 4)
            for n in range(len(specs))
        ],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)],
        kv_cache_layout="LBHNC",
    )
