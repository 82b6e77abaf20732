"""The layout handler for TensorRT-LLM's KV pools, which are either one block-first tensor or regions of slots.

TrtllmHandler.from_pool(pool, TrtllmModel(kv_heads=8, head_size=128, tokens_per_block=32))
TrtllmHandler.from_regions([TrtllmRegion(base, size, stride, num_slots, buffers=...)], ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.group_table import GroupLayout, GroupTable
from flexkv.layout.run_list import RunList
from flexkv.layout.tensor import TensorLike, byte_strides, check_strides, check_tensor, dense_strides


@dataclass(frozen=True, slots=True)
class TrtllmModel:
    """The model's shape according to the engine's arguments. The handler checks that it agrees with the pool.

    Attributes:
        kv_heads: number of KV heads on this rank, the same in all layers; 1 for MLA; 0 if unknown.
        head_size: elements of K, or of V, of one head; for MLA, rank + rope; 0 if unknown.
        tokens_per_block: tokens per block of the pool; 0 if unknown.
        latent: whether the model uses MLA, so that the pool has kv_factor 1.
    """

    kv_heads: int = 0
    head_size: int = 0
    tokens_per_block: int = 0
    latent: bool = False


@dataclass(frozen=True, slots=True)
class TrtllmBuffer:
    """One layer's part of each slot of a region.

    Attributes:
        layer: number of the layer.
        offset: offset within the slot, in bytes.
        size: bytes.
    """

    layer: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TrtllmRegion:
    """A region of memory with one slot per block. Slot i has `size` bytes at address `base + i * stride`.

    Attributes:
        base: address of slot 0.
        size: bytes of a slot.
        stride: bytes from one slot to the next.
        num_slots: number of slots.
        buffers: the parts of a slot, in order and without gaps. If empty, the slot counts as one buffer of layer 0, so
            a wait for any layer waits for the complete slot.
    """

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[TrtllmBuffer, ...] = ()


class TrtllmHandler(GroupTable):
    """The layout of one rank's pool. Make it with `from_pool` or `from_regions`."""

    @classmethod
    def from_pool(cls, pool: TensorLike, model: TrtllmModel, ranks: int = 1) -> TrtllmHandler:
        """Returns the layout of a primary pool, which is TensorRT-LLM's pool in GPU memory.

        Args:
            pool: a C-contiguous tensor [num_blocks, layers, kv_factor, elements of K or V in a block].
            ranks: number of stripes of a page.

        Raises:
            GeometryError: `pool` does not have this shape, it disagrees with `model`, or the number of tokens per block
                is unknown.
        """
        check_tensor("pool", pool, 4)
        shape = tuple(int(size) for size in pool.shape)
        check_strides("pool", shape, byte_strides(pool), dense_strides(shape, pool.element_size()))
        num_blocks, layers, kv_factor, elements = shape
        allowed = 1 if model.latent else 2
        if kv_factor != allowed:
            raise GeometryError(
                f"pool: kv_factor is {kv_factor}; allowed is {allowed} (latent={model.latent})"
            )
        tokens = _tokens_per_block(elements, model)
        run_bytes = elements * pool.element_size()
        block_bytes = run_bytes * kv_factor * layers
        runs = RunList()
        for layer in range(layers):
            for kv in range(kv_factor):
                runs.add(
                    pool.data_ptr() + (layer * kv_factor + kv) * run_bytes, block_bytes, run_bytes, layer
                )
        view = runs.view(num_blocks)
        interior = Interior.LATENT if model.latent else Interior.KV_SPLIT_HND
        return cls([GroupLayout(view, FormatId.of_view(view, interior, tokens, ranks))])

    @classmethod
    def from_regions(
        cls,
        regions: Sequence[TrtllmRegion],
        tokens_per_block: int,
        interior: Interior,
        ranks: int = 1,
        owner: str = "",
    ) -> TrtllmHandler:
        """Returns the layout of a pool that consists of regions, with one layer group. Block i consists of slot i of
        every region.

        Args:
            interior: the meaning of the bytes of one layer of a block.
            ranks: number of stripes of a page.
            owner: name of the engine that can interpret an OPAQUE interior; otherwise empty.

        Raises:
            GeometryError: there are no regions, they have different numbers of slots, slots overlap, or the buffers of
                a region do not fill its slots exactly.
        """
        counts = sorted({region.num_slots for region in regions})
        if len(counts) != 1:
            raise GeometryError(
                f"the regions have {counts} slots; one count over at least one region is needed"
            )
        runs = RunList()
        for number, region in enumerate(regions):
            if region.stride < region.size:
                raise GeometryError(
                    f"region {number}: stride {region.stride} is less than its size {region.size}"
                )
            end = 0
            for buffer in region.buffers or (TrtllmBuffer(0, 0, region.size),):
                if buffer.offset != end or buffer.size < 1:
                    raise GeometryError(
                        f"region {number}: {buffer} must be positive and start at {end}, "
                        "where the one before ends"
                    )
                end += buffer.size
                runs.add(region.base + buffer.offset, region.stride, buffer.size, buffer.layer)
            if end != region.size:
                raise GeometryError(f"region {number}: its buffers end at {end}, its slots at {region.size}")
        view = runs.view(counts[0])
        return cls([GroupLayout(view, FormatId.of_view(view, interior, tokens_per_block, ranks, owner))])


def _tokens_per_block(elements: int, model: TrtllmModel) -> int:
    """Returns the number of tokens per block: computed from the pool's shape if the model's heads and head size are
    known; otherwise the model's `tokens_per_block`.

    Raises:
        GeometryError: the number is unknown, or pool and model contradict each other.
    """
    per_token = model.kv_heads * model.head_size
    tokens, rest = divmod(elements, per_token) if per_token else (model.tokens_per_block, 0)
    if not tokens or rest or elements % tokens or tokens != (model.tokens_per_block or tokens):
        raise GeometryError(
            f"pool: {elements} elements a block are not {model.tokens_per_block or 'whole'} tokens "
            f"of {per_token or 'unknown size'} ({model.kv_heads} heads x {model.head_size})"
        )
    return tokens
