"""KV pools of mini engines, and the numbers expected in them. The number at a position depends on all tokens up to
it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.request import Request

from tests.unit.adapters.vllm_objects import BLOCK_TOKENS

LAYERS, HEADS, CONTENT = 2, 2, 8


def kv_config(blocks: int, layers: int = LAYERS, heads: int = HEADS, latent: bool = False) -> KVCacheConfig:
    """Makes a KV cache configuration with one group of full attention, with layout LBHNC in float32. With `latent`, it
    is an MLA group, which has one head and no V.
    """
    heads = 1 if latent else heads
    names = [f"layer.{i}" for i in range(layers)]
    page = heads * BLOCK_TOKENS * CONTENT * 4
    spec = (
        MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=CONTENT, dtype=torch.float32)
        if latent
        else FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=CONTENT // 2, dtype=torch.float32
        )
    )
    tensor = KVCacheTensor(
        size=layers * blocks * page, layers=names, layer_stride=blocks * page, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK_TOKENS,
    )


def make_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    names = config.kv_cache_groups[0].layer_names
    heads = config.kv_cache_groups[0].kv_cache_spec.num_kv_heads
    whole = torch.zeros(len(names), config.num_blocks, heads, BLOCK_TOKENS, CONTENT)
    return {name: whole[i] for i, name in enumerate(names)}


@dataclass(eq=False)
class Live:
    """A request in the engine.

    Attributes:
        ahead: number of tokens that the scheduler no longer counts as computed but the model runner still does.
    """

    request: Request
    blocks: list[KVCacheBlock] = field(default_factory=list)
    waiting_for_load: bool = False
    scheduled: bool = False
    ahead: int = 0


Part = tuple[Live, int, int]
"""A request, and a range [first, end) of its token positions."""


class MiniPools:
    """The pools of all ranks. `caches[rank]` maps layer names to the rank's tensors. Each group of `replicas` adjacent
    ranks has the same numbers.
    """

    def __init__(self, config: KVCacheConfig, ranks: int, replicas: int) -> None:
        self.replicas = replicas
        self.caches = [make_caches(config) for _ in range(ranks)]

    def expected(self, rank: int, layer: int, tokens: Sequence[int], position: int) -> float:
        """Returns the number that is expected at a position. The number depends on all tokens up to this position."""
        prefix = ",".join(map(str, tokens[: position + 1])) + f"/{rank // self.replicas}/{layer}"
        return float(zlib.crc32(prefix.encode()) % 100_003)

    def spoil(self) -> None:
        """Overwrites every block of all pools."""
        for caches in self.caches:
            for cache in caches.values():
                cache.fill_(-1.0)

    def write(self, rank: int, parts: Sequence[Part]) -> None:
        """Writes the KV that a forward pass computes. If earlier KV of the request is wrong, the written KV is wrong
        too, as in a real model.
        """
        for live, first, end in parts:
            spoiled = 0.5 if self.wrong(live, first, [rank]) else 0.0
            for layer, cache in enumerate(self.caches[rank].values()):
                for position in range(first, end):
                    block, slot = divmod(position, BLOCK_TOKENS)
                    value = self.expected(rank, layer, live.request.all_token_ids[:], position)
                    cache[live.blocks[block].block_id, :, slot, :] = value + spoiled

    def write_by_layer(self, rank: int, parts: Sequence[Part]) -> Iterator[str]:
        """Writes the same KV as `write`, layer by layer. Yields the name of each layer after the layer's numbers are
        written and before the numbers of later layers are written.
        """
        blocks: set[int] = set()
        for live, first, end in parts:
            part = live.blocks[first // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
            blocks.update(block.block_id for block in part)
        caches, mine = self.caches[rank], sorted(blocks)
        before = [cache[mine] for cache in caches.values()]
        self.write(rank, parts)
        after = [cache[mine] for cache in caches.values()]
        for cache, old in zip(caches.values(), before, strict=True):
            cache[mine] = old
        for (name, cache), new in zip(caches.items(), after, strict=True):
            cache[mine] = new
            yield name

    def wrong(self, live: Live, end: int, ranks: Sequence[int] | None = None) -> list[int]:
        """Returns the positions before `end` whose KV is wrong in any layer on any of `ranks` (None: on any rank)."""
        bad = set()
        for rank in range(len(self.caches)) if ranks is None else ranks:
            for layer, cache in enumerate(self.caches[rank].values()):
                for position in range(end):
                    block, slot = divmod(position, BLOCK_TOKENS)
                    value = self.expected(rank, layer, live.request.all_token_ids[:], position)
                    if not (cache[live.blocks[block].block_id, :, slot, :] == value).all():
                        bad.add(position)
        return sorted(bad)
