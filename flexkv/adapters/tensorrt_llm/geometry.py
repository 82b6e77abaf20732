"""Makes views of the engine's pool. Some versions of TensorRT-LLM pass the pool's tensor, others a description of its
layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.errors import GeometryError
from flexkv.layout.format_id import Interior
from flexkv.layout.trtllm import TrtllmBuffer, TrtllmHandler, TrtllmRegion

OWNER = "tensorrt-llm"
KV_ROLES = ("key", "value")

Item = TypeVar("Item")


def geometry_of_pool(pool: Any, arguments: EngineArguments) -> RankPool:
    """Describes the primary pool, a tensor of shape [blocks, layers, 1 or 2, elements of a block].

    Raises:
        GeometryError, ConfigError: the pool has a different shape, or contradicts the arguments.
    """
    if len(tuple(pool.shape)) != 4:
        raise GeometryError(
            f"the pool has shape {tuple(pool.shape)}; expected are [blocks, layers, 1 or 2, elements of a block]"
        )
    _, layers, kv_factor, _ = (int(size) for size in pool.shape)
    latent = kv_factor == 1
    replicas = arguments.ranks if latent else 1
    model = arguments.model_of(layers, latent)
    handler = TrtllmHandler.from_pool(pool, model, arguments.ranks // replicas)
    format_id = handler.format_id(0)
    return RankPool(
        handler.view(0), format_id, format_id.interior_tokens, (pool,), layers, arguments.heads, replicas
    )


def geometry_of_layout(layout: Any, arguments: EngineArguments) -> RankPool:
    """Describes a cache that is given as a `KvCacheLayout` with one layer group. The group may have any number of
    regions; block i consists of slot i of every region.

    Raises:
        GeometryError: the cache has several layer groups, a sliding window, or regions that a page cannot represent.
        ConfigError: the cache contradicts the arguments.
    """
    group = only_group(layout.groups)
    if group.window_size is not None:
        raise GeometryError(
            f"the cache's attention window is {group.window_size} tokens: blocks that it has passed have no page, "
            "so a prefix could not be restored; such models are not cached"
        )
    regions = tuple(group.regions) + tuple(getattr(group, "replicated_regions", ()))
    if not regions:
        raise GeometryError("the cache's layer group has no regions")
    plain = all(_is_plain(region) for region in regions)
    latent = plain and not any(buffer.role == "value" for region in regions for buffer in region.buffers)
    layers = len({buffer.layer_id for region in regions for buffer in region.buffers})
    arguments.model_of(layers, latent if plain else bool(arguments.latent))
    tokens = int(layout.tokens_per_block)
    ranks = arguments.ranks
    replicas = ranks if latent else 1
    handler = TrtllmHandler.from_regions(
        [_region(region, plain) for region in regions],
        tokens,
        (Interior.LATENT if latent else Interior.KV_SPLIT_HND) if plain else Interior.OPAQUE,
        ranks // replicas,
        "" if plain else OWNER,
    )
    owners = (regions[0].as_tensor(),)
    return RankPool(handler.view(0), handler.format_id(0), tokens, owners, layers, arguments.heads, replicas)


def only_group(by_group: Sequence[Item]) -> Item:
    """Returns the only item of a list that has one item per layer group.

    Raises:
        GeometryError: there is not exactly one layer group.
    """
    if len(by_group) != 1:
        raise GeometryError(
            f"the cache has {len(by_group)} layer groups; a page holds the blocks of 1. Models with several attention "
            "windows are not cached"
        )
    return by_group[0]


def _is_plain(region: Any) -> bool:
    """Whether the region consists of K and V buffers of equal size and nothing else."""
    return (
        all(buffer.role in KV_ROLES and buffer.expansion == 1 for buffer in region.buffers)
        and len(region.buffers) > 0
        and region.size % len(region.buffers) == 0
    )


def _region(region: Any, plain: bool) -> TrtllmRegion:
    # The engine gives no buffer sizes. Buffers of one role have equal sizes, and K is as long as V, so the region's
    # size is divided by the number of buffers.
    size = region.size // max(1, len(region.buffers))
    buffers = (
        tuple(
            TrtllmBuffer(int(buffer.layer_id), number * size, size)
            for number, buffer in enumerate(region.buffers)
        )
        if plain
        else ()
    )
    return TrtllmRegion(
        int(region.base), int(region.size), int(region.stride), int(region.num_slots), buffers
    )
