"""The layout handler for SGLang's KV pools. They have token slots for each layer; page 0 is reserved.

    # MHA
    SglangHandler(page_size=64, k_buffers=pool.k_buffer, v_buffers=pool.v_buffer)
    # MLA
    SglangHandler(page_size=64, kv_buffers=pool.kv_buffer)

Blocks are SGLang's pages: block id = slot // page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.group_table import GroupLayout, GroupTable
from flexkv.layout.run_list import RunList
from flexkv.layout.tensor import (
    TensorLike,
    byte_strides,
    check_strides,
    check_tensor,
    dense_strides,
    dtype_name,
)

RESERVED_PAGES = 1
"""Number of reserved pages at the start of a pool. SGLang writes padding tokens to page 0, which never holds a
request's KV."""


class SglangHandler(GroupTable):
    """The layout of one rank's pool, for MHA or MLA.

    Args:
        page_size: token slots per page.
        k_buffers, v_buffers: for MHA, one C-contiguous tensor [slots, H, D] per layer. V may be in K's allocation, with
            a storage offset, and may have a different head size.
        kv_buffers: for MLA, one C-contiguous tensor [slots, 1, rank + rope] per layer, in place of `k_buffers` and
            `v_buffers`.

    Raises:
        GeometryError: the pool is not supported. The message names the buffer, the value found and what is allowed.
    """

    def __init__(
        self,
        page_size: int,
        k_buffers: Sequence[TensorLike] = (),
        v_buffers: Sequence[TensorLike] = (),
        kv_buffers: Sequence[TensorLike] = (),
    ) -> None:
        if page_size < 1:
            raise GeometryError(f"page_size is {page_size}: must be at least 1")
        if bool(kv_buffers) == bool(k_buffers) or len(k_buffers) != len(v_buffers):
            raise GeometryError(
                f"{len(k_buffers)} K, {len(v_buffers)} V and {len(kv_buffers)} joined buffers; "
                "allowed are as many V as K and no joined ones, or joined ones alone"
            )
        named = {"kv_buffer": kv_buffers} if kv_buffers else {"k_buffer": k_buffers, "v_buffer": v_buffers}
        pages: set[int] = set()
        runs = RunList()
        for layer in range(len(kv_buffers) or len(k_buffers)):
            for name, buffers in named.items():
                pages.add(_add_buffer(runs, name, buffers, layer, page_size))
        if len(pages) != 1:
            raise GeometryError(f"the buffers hold different numbers of pages: {sorted(pages)}")
        count = pages.pop()
        if count <= RESERVED_PAGES:
            raise GeometryError(f"the pool has {count} pages; page 0 is reserved, so at least 2 are needed")
        view = runs.view(count, first_block=RESERVED_PAGES)
        interior = Interior.LATENT if kv_buffers else Interior.KV_SPLIT_NHD
        super().__init__([GroupLayout(view, FormatId.of_view(view, interior, page_size, 1))])


def _add_buffer(runs: RunList, name: str, buffers: Sequence[TensorLike], layer: int, page_size: int) -> int:
    """Adds the run of one layer's buffer to `runs`; returns the number of full pages in the buffer."""
    tensor, first, name = buffers[layer], buffers[0], f"{name}[{layer}]"
    shape = tuple(tensor.shape)
    check_tensor(name, tensor, 3)
    if shape != tuple(first.shape) or dtype_name(tensor) != dtype_name(first):
        raise GeometryError(
            f"{name}: {dtype_name(tensor)} {shape}, but layer 0 has {dtype_name(first)} {tuple(first.shape)}"
        )
    check_strides(name, shape, byte_strides(tensor), dense_strides(shape, tensor.element_size()))
    page_bytes = prod(shape[1:]) * tensor.element_size() * page_size
    runs.add(tensor.data_ptr(), page_bytes, page_bytes, layer)
    return int(shape[0]) // page_size
