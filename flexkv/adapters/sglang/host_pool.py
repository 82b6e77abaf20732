"""SGLang's host pool (HiCache) as a view, read off the addresses that it gives for zero copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flexkv.adapters.sglang.pools import PoolView
from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.run_list import RunList

LAYOUTS = {
    "layer_first": "sglang-host-layer-first",
    "page_first": "sglang-host-page-first",
    "page_first_direct": "sglang-host-page-first-direct",
    "page_head": "sglang-host-page-head",
}
"""Layouts of host pools, and who can read a page of each: an interior of SGLang's own."""


def view_of_host_pool(pool: Any) -> PoolView:
    """The view of a host pool: its pieces of a page lie where `get_page_buffer_meta` says, at one distance each.

    Raises:
        GeometryError: another layout, or pages that do not lie at equal distances.
    """
    if pool.layout not in LAYOUTS:
        raise GeometryError(f"the host pool's layout is {pool.layout!r}; allowed are {', '.join(LAYOUTS)}")
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
    format_id = FormatId.of_view(view, Interior.OPAQUE, page_size, 1, LAYOUTS[pool.layout])
    return PoolView(view, format_id, (pool.kv_buffer,), pages, pool.layer_num, page_size)


def _pieces(pool: Any, page: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Address and bytes of each piece of a page, int64 [pieces, 2]."""
    slots = torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
    addresses, sizes = pool.get_page_buffer_meta(slots)
    return np.array([addresses, sizes], np.int64).T
