"""Makes views of SGLang's KV pools, on a device and in HiCache's host memory, and refuses pools that flexkv does not
support."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.run_list import RunList
from flexkv.layout.sglang import SglangHandler

HOST_LAYOUTS = {
    "layer_first": "sglang-host-layer-first",
    "page_first": "sglang-host-page-first",
    "page_first_direct": "sglang-host-page-first-direct",
    "page_head": "sglang-host-page-head",
}
"""Layout of a host pool -> name of the format of its pages' bytes, which only SGLang can interpret."""


def view_of(pool: Any, page_size: int) -> RankPool:
    """Describes a plain multi-head or latent (MLA) pool on a device. SGLang never uses page 0. An fp8 pool holds uint8,
    and needs no special treatment.

    Raises:
        GeometryError: the pool is of a different kind, orders its bytes differently, or has scales beside K and V. The
            message says which.
    """
    kind = type(pool)
    # Subclasses order their bytes differently or have further buffers, so only these two classes are accepted.
    if kind is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd":
            raise GeometryError(
                f"the KV pool's layout is {pool.kv_cache_layout!r}; flexkv takes 'nhd' "
                "(unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT)"
            )
        if pool.k_scale_buffer is not None or getattr(pool, "native_k_scale_buffer", None) is not None:
            raise GeometryError("the KV pool has scales beside K and V; flexkv would not store them")
        tensors = (*pool.k_buffer, *pool.v_buffer)
        handler = SglangHandler(page_size, k_buffers=pool.k_buffer, v_buffers=pool.v_buffer)
        heads = pool.k_buffer[0].shape[1] if pool.k_buffer[0].shape == pool.v_buffer[0].shape else 0
    elif kind is MLATokenToKVPool:
        if pool.kv_scale_buffer is not None:
            raise GeometryError("the latent pool has scales beside it; flexkv would not store them")
        tensors = tuple(pool.kv_buffer)
        handler = SglangHandler(page_size, kv_buffers=pool.kv_buffer)
        heads = 0
    else:
        raise GeometryError(
            f"the KV pool is a {kind.__name__}; flexkv stores MHATokenToKVPool and MLATokenToKVPool "
            "(full attention in bf16, fp16, fp32 or plain fp8)"
        )
    return RankPool(handler.view(), handler.format_id(), page_size, tensors, pool.layer_num, heads)


def view_of_host_pool(pool: Any) -> RankPool:
    """Describes a host pool of HiCache. The pool's `get_page_buffer_meta` returns the pieces of a page. Each piece must
    be at a constant distance from the same piece of the next page.

    Raises:
        GeometryError: the pool has an unknown layout, has fewer than 2 pages, or its pages are not at equal distances.
    """
    if pool.layout not in HOST_LAYOUTS:
        raise GeometryError(
            f"the host pool's layout is {pool.layout!r}; allowed are {', '.join(HOST_LAYOUTS)}"
        )
    page_size, pages = pool.page_size, pool.size // pool.page_size
    if pages < 2:
        raise GeometryError(f"the host pool has {pages} pages; at least 2 are needed")
    first, second, last = (_pieces(pool, page) for page in (0, 1, pages - 1))
    strides = second[:, 0] - first[:, 0]
    straight = first[:, 0] + (pages - 1) * strides
    if np.any(strides <= 0) or np.any(last[:, 0] != straight) or np.any(second[:, 1] != first[:, 1]):
        raise GeometryError(f"the pages of host pool {type(pool).__name__} do not lie at equal distances")
    runs = RunList()
    for layer, ((address, size), stride) in enumerate(zip(first.tolist(), strides.tolist(), strict=True)):
        runs.add(address, stride, size, layer)
    view = runs.view(pages)
    format_id = FormatId.of_view(view, Interior.OPAQUE, page_size, 1, HOST_LAYOUTS[pool.layout])
    return RankPool(view, format_id, page_size, (pool.kv_buffer,), pool.layer_num)


def _pieces(pool: Any, page: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Address and length in bytes of each piece of a page, int64 [pieces, 2]."""
    slots = torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
    addresses, sizes = pool.get_page_buffer_meta(slots)
    return np.array([addresses, sizes], np.int64).T
