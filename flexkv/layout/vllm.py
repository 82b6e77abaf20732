"""The layout handler for vLLM's KV pool, which is one allocation in one of six physical orders, with a tensor per
layer.

An adapter makes the handler from values of `kv_cache_config`; this module does not import vLLM:

    handler = VllmHandler(
        caches=kv_caches,                                  # the argument of register_kv_caches
        placements=kv_cache_config.kv_cache_tensors,       # KVCacheTensor objects fit as they are
        groups=[VllmGroup(tuple(g.layer_names)) for g in kv_cache_config.kv_cache_groups],
        num_blocks=kv_cache_config.num_blocks,
        order=kv_cache_config.kv_cache_layout,             # "LBHNC", "BLHNC", ...
        ranks=tensor_parallel_size,
    )
    view, format_id = handler.view(group), handler.format_id(group)
    layer = handler.layer_number("model.layers.3.self_attn.attn")   # the number that layer-wise waits use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.group_table import GroupLayout, GroupTable
from flexkv.layout.run_list import RunList
from flexkv.layout.tensor import (
    TensorLike,
    byte_strides,
    check_strides,
    check_tensor,
    storage_base,
    storage_bytes,
)
from flexkv.layout.vllm_order import ORDERS, PageShape, runs_of_page, strides_of_order


class VllmPlacement(Protocol):
    """The positions of layers of equal shape in the allocation, in bytes. These are the fields of vLLM's KVCacheTensor.

    In the allocation, block b of layer `layers[l]` starts at byte `offset + l * layer_stride + b * block_stride`.
    """

    @property
    def size(self) -> int:
        """Bytes of the complete allocation, the same for every placement."""

    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def layer_stride(self) -> int: ...
    @property
    def block_stride(self) -> int: ...
    @property
    def offset(self) -> int: ...


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """One KV cache group: layers that share a block table.

    Attributes:
        layers: names of the layers, in execution order. The view numbers the layers in this order. A layer that shares
            the KV of an earlier layer gets the earlier layer's number.
        interior: the meaning of the bytes of one layer of a block; None to derive it from the physical order. Use
            LATENT for MLA, and OPAQUE for Mamba and for attention kernels with their own order inside a block (vLLM's
            CPU backend).
        owner: name of the engine or kernel that can interpret an OPAQUE interior, such as "vllm-cpu-attn"; otherwise
            empty.
    """

    layers: tuple[str, ...]
    interior: Interior | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of one layer: its block b starts at address `base + b * placement.block_stride`.

    Attributes:
        placement: the placement that contains the layer.
        index: the layer's index in the placement.
        base: address of the layer's block 0.
    """

    placement: VllmPlacement
    index: int
    base: int


class VllmHandler(GroupTable):
    """The layout of one rank's pool. The constructor checks its geometry.

    Args:
        caches: maps each layer's name to the layer's tensor, of logical shape `[B, H, N, C]`, where C is K and V
            joined, or a layer's states. If vLLM splits each block into `ratio` kernel blocks, B is num_blocks x ratio.
            A layer without its own placement shares the KV of a layer with one, so its tensor must start at the same
            address.
        placements: the placements that vLLM made. Groups may use the same bytes, because a block belongs to one group
            at a time.
        groups: the KV cache groups.
        num_blocks: number of blocks of the pool, as the scheduler counts them.
        order: the physical order, one of ORDERS.
        ranks: number of stripes of a page, which is the number of tensor-parallel ranks that hold different bytes.

    Raises:
        GeometryError: tensors, placements, order and number of blocks do not agree. The message names the layer, the
            value found and the value expected.
    """

    def __init__(
        self,
        caches: Mapping[str, TensorLike],
        placements: Sequence[VllmPlacement],
        groups: Sequence[VllmGroup],
        num_blocks: int,
        order: str,
        ranks: int = 1,
    ) -> None:
        if order not in ORDERS:
            raise GeometryError(f"KV cache order {order!r}; allowed are {', '.join(ORDERS)}")
        if num_blocks < 1:
            raise GeometryError(f"num_blocks is {num_blocks}: must be at least 1")
        if not groups:
            raise GeometryError("there are no KV cache groups")
        self._caches = caches
        self._num_blocks = num_blocks
        self._order = order
        self._places = self._place_layers(placements)
        self._layer_numbers: dict[str, int] = {}
        super().__init__([self._build(group, ranks) for group in groups])

    def layer_number(self, layer: str) -> int:
        """Returns the number of the layer in its group's view. A layer that shares the KV of another layer has the
        other layer's number.

        Raises:
            GeometryError: no group has this layer.
        """
        if layer not in self._layer_numbers:
            raise GeometryError(f"layer {layer!r} belongs to no KV cache group")
        return self._layer_numbers[layer]

    def _cache(self, layer: str) -> TensorLike:
        if layer not in self._caches:
            known = ", ".join(list(self._caches)[:4])
            raise GeometryError(
                f"layer {layer!r} has no KV tensor; there are {len(self._caches)}: {known}, ..."
            )
        return self._caches[layer]

    def _place_layers(self, placements: Sequence[VllmPlacement]) -> dict[str, _Place]:
        sizes = {placement.size for placement in placements}
        if len(sizes) != 1:
            raise GeometryError(f"the placements name allocations of {sorted(sizes)} bytes; one is needed")
        size = sizes.pop()
        places: dict[str, _Place] = {}
        bases: set[int] = set()
        for placement in placements:
            for index, layer in enumerate(placement.layers):
                tensor = self._cache(layer)
                bases.add(storage_base(tensor))
                held = storage_bytes(tensor)
                if held is not None and held < size:
                    raise GeometryError(
                        f"{layer}: its allocation has {held} bytes, its placement says {size}"
                    )
                offset = placement.offset + index * placement.layer_stride
                places[layer] = _Place(placement, index, storage_base(tensor) + offset)
        if len(bases) != 1:
            raise GeometryError(f"the layers lie in {len(bases)} allocations; one is needed")
        return places

    def _place_of(self, layer: str) -> _Place:
        if layer in self._places:
            return self._places[layer]
        address = self._cache(layer).data_ptr()
        for place in self._places.values():
            if place.base == address:
                return place
        raise GeometryError(f"{layer}: has no placement and shares no placed layer's KV")

    def _page_shape(self, layer: str, place: _Place) -> PageShape:
        """Checks that a layer's tensor agrees with its placement; returns the shape of one block of the layer.

        Raises:
            GeometryError: the tensor and the placement do not agree.
        """
        tensor, placement = self._cache(layer), place.placement
        check_tensor(layer, tensor, 4)
        blocks, heads, tokens, content = tensor.shape
        ratio, rest = divmod(blocks, self._num_blocks)
        if rest or ratio < 1 or placement.block_stride % ratio:
            raise GeometryError(
                f"{layer}: {blocks} kernel blocks in {self._num_blocks} blocks with a stride of "
                f"{placement.block_stride} bytes; both must be divisible"
            )
        if tensor.data_ptr() != place.base:
            raise GeometryError(
                f"{layer}: lies {tensor.data_ptr() - place.base} bytes from where its placement says "
                f"(offset {placement.offset} + {place.index} x {placement.layer_stride})"
            )
        shape = (len(placement.layers), blocks, heads, tokens, content * tensor.element_size())
        strides = strides_of_order(
            self._order, shape, placement.layer_stride, placement.block_stride // ratio
        )
        expected = (*strides[1:4], tensor.element_size())
        check_strides(layer, tuple(tensor.shape), byte_strides(tensor), expected)
        return PageShape(ratio, heads, tokens, shape[4], strides[1], strides[2], strides[3])

    def _build(self, group: VllmGroup, ranks: int) -> GroupLayout:
        if not group.layers:
            raise GeometryError("a KV cache group has no layers")
        runs, tokens = RunList(), 0
        numbers: dict[int, int] = {}
        for layer in group.layers:
            place = self._place_of(layer)
            page = self._page_shape(layer, place)
            number = numbers.setdefault(place.base, len(numbers))
            self._layer_numbers[layer] = number
            tokens = page.tokens
            for offset, size in runs_of_page(page):
                start = place.base + offset
                self._check_inside(layer, place, start, size)
                runs.add(start, place.placement.block_stride, size, number)
        view = runs.view(self._num_blocks, native_order=self._order[0] == "B")
        interior = group.interior or (
            Interior.KV_JOINED_NHD if self._order.endswith("NHC") else Interior.KV_JOINED_HND
        )
        return GroupLayout(view, FormatId.of_view(view, interior, tokens, ranks, group.owner))

    def _check_inside(self, layer: str, place: _Place, start: int, size: int) -> None:
        placement = place.placement
        first = place.base - placement.offset - place.index * placement.layer_stride
        end = start + (self._num_blocks - 1) * placement.block_stride + size
        if start < first or end > first + placement.size:
            raise GeometryError(
                f"{layer}: {self._num_blocks} blocks end at byte {end - first} "
                f"of an allocation of {placement.size}"
            )
