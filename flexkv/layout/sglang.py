"""SGLang's KV pools: token slots per layer, page = slot // page size, page 0 reserved.

    # MHA
    SglangHandler(page_size=64, k_buffers=pool.k_buffer, v_buffers=pool.v_buffer)
    # MLA with an indexer
    indexer = SglangSidecar("indexer", tuple(pool.index_k_with_scale_buffer), rows_per_page=1)
    SglangHandler(page_size=64, kv_buffers=pool.kv_buffer, sidecars=[indexer])

Blocks are SGLang's pages: block id = slot // page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
"""SGLang writes padding tokens to page 0: it never holds KV of a request."""


@dataclass(frozen=True, slots=True)
class SglangSidecar:
    """Buffers beside K and V, one per layer (DSA's indexer keys, scales): C-contiguous, dim 0 in pages or tokens.

    Attributes:
        rows_per_page: rows of dim 0 per page: 1 if the buffer counts pages, page_size if it counts token slots.
    """

    name: str
    buffers: tuple[TensorLike, ...]
    rows_per_page: int


class SglangHandler(GroupTable):
    """One rank's pool of one attention type.

    Args:
        page_size: token slots per page.
        k_buffers, v_buffers: per layer, shape [slots, H, D], C-contiguous; V may lie in K's allocation (then it has a
            storage offset) and may have another head size.
        kv_buffers: instead of both, for MLA: per layer, shape [slots, 1, rank + rope].
        sidecars: further buffers whose bytes belong to the page.
        ranks: stripes of a page.

    Raises:
        GeometryError: the pool cannot be served; the message names the buffer, the value found and what is allowed.
    """

    def __init__(
        self,
        page_size: int,
        k_buffers: Sequence[TensorLike] = (),
        v_buffers: Sequence[TensorLike] = (),
        kv_buffers: Sequence[TensorLike] = (),
        sidecars: Sequence[SglangSidecar] = (),
        ranks: int = 1,
    ) -> None:
        if page_size < 1:
            raise GeometryError(f"page_size is {page_size}: must be at least 1")
        if bool(kv_buffers) == bool(k_buffers) or len(k_buffers) != len(v_buffers):
            raise GeometryError(
                f"{len(k_buffers)} K, {len(v_buffers)} V and {len(kv_buffers)} joined buffers; "
                "allowed are as many V as K and no joined ones, or joined ones alone"
            )
        columns = (
            [SglangSidecar("kv_buffer", tuple(kv_buffers), page_size)]
            if kv_buffers
            else [
                SglangSidecar("k_buffer", tuple(k_buffers), page_size),
                SglangSidecar("v_buffer", tuple(v_buffers), page_size),
            ]
        )
        main_columns = len(columns)
        columns += sidecars
        layers = len(columns[0].buffers)
        pages: set[int] = set()
        runs = RunList()
        for layer in range(layers):
            for number, column in enumerate(columns):
                if len(column.buffers) != layers:
                    raise GeometryError(
                        f"{column.name} has {len(column.buffers)} layers, {columns[0].name} {layers}"
                    )
                pages.add(self._add(runs, column, layer, 3 if number < main_columns else None))
        if len(pages) != 1:
            raise GeometryError(f"the buffers hold different numbers of pages: {sorted(pages)}")
        count = pages.pop()
        if count <= RESERVED_PAGES:
            raise GeometryError(f"the pool has {count} pages; page 0 is reserved, so at least 2 are needed")
        view = runs.view(count, first_block=RESERVED_PAGES)
        interior = Interior.LATENT if kv_buffers else Interior.KV_SPLIT_NHD
        super().__init__([GroupLayout(view, FormatId.of_view(view, interior, page_size, ranks))])

    @staticmethod
    def _add(runs: RunList, column: SglangSidecar, layer: int, rank: int | None) -> int:
        """Adds one buffer's run; returns how many whole pages the buffer has."""
        tensor, name = column.buffers[layer], f"{column.name}[{layer}]"
        shape = tuple(tensor.shape)
        check_tensor(name, tensor, len(shape) if rank is None else rank)
        first = column.buffers[0]
        if shape != tuple(first.shape) or dtype_name(tensor) != dtype_name(first):
            raise GeometryError(
                f"{name}: {dtype_name(tensor)} {shape}, "
                f"but layer 0 has {dtype_name(first)} {tuple(first.shape)}"
            )
        check_strides(name, shape, byte_strides(tensor), dense_strides(shape, tensor.element_size()))
        if column.rows_per_page < 1:
            raise GeometryError(f"{name}: rows_per_page is {column.rows_per_page}: must be at least 1")
        page_bytes = prod(shape[1:]) * tensor.element_size() * column.rows_per_page
        runs.add(tensor.data_ptr(), page_bytes, page_bytes, layer)
        return int(shape[0]) // column.rows_per_page
