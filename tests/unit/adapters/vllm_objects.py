"""Makes vLLM's own requests and block pools in the same way as vLLM's engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_TOKENS = 4

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


def make_request(tokens: Sequence[int] | None = None, name: str = "r", **fields: Any) -> Request:
    """Makes a request whose block hashes are computed by vLLM's own code, with `BLOCK_TOKENS` tokens per block."""
    extra = fields.pop("extra_args", None)
    ids = None if tokens is None else list(tokens)
    params = SamplingParams(max_tokens=16, extra_args=extra)
    return Request(name, ids, params, None, block_hasher=_hasher, **fields)


def make_pool(blocks: int = 16) -> BlockPool:
    """Makes vLLM's block pool. Its block 0 is the null block."""
    return BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """Makes a multi-modal input at tokens [offset, offset + length)."""
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset, length)
    )


def lora(name: str, number: int = 1, path: str = "/adapters/x") -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def embeddings(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))
