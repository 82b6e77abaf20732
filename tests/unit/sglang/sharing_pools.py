"""Pools of the three engines as torch tensors on the CPU, each with its engine's memory layout, and one rank's cache
that uses such a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.sglang.load_batches import LoadBatches, QueuedLoad
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.config import load_config
from flexkv.facts.keys import Keys
from flexkv.facts.ranks import UnitOwner
from flexkv.layout.format_id import Interior
from flexkv.layout.sglang import SglangHandler
from flexkv.layout.trtllm import TrtllmHandler, TrtllmModel
from flexkv.layout.vllm import VllmGroup, VllmHandler
from flexkv.weights.files import NAMED, WeightsContent

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 3, 10, 4, 2, 8
FLOAT = torch.float32
NAMESPACE = b"n" * 32


@dataclass(frozen=True)
class EnginePool:
    """The pool of one engine. `numbers(b)` returns block b as [layers, K and V, tokens, heads, head size]. It uses
    plain indexing only.
    """

    handler: Any
    whole: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    numbers: Callable[[int], torch.Tensor]


def sglang(dtype: torch.dtype = FLOAT, tokens: int = TOKENS) -> EnginePool:
    whole = torch.zeros(2, LAYERS, BLOCKS * tokens, HEADS, SIZE, dtype=dtype)
    k, v = list(whole[0]), list(whole[1])

    def numbers(block: int) -> torch.Tensor:
        return whole[:, :, block * tokens : (block + 1) * tokens].transpose(0, 1)

    return EnginePool(SglangHandler(tokens, k_buffers=k, v_buffers=v), whole, (*k, *v), numbers)


def trtllm() -> EnginePool:
    whole = torch.zeros(BLOCKS, LAYERS, 2, HEADS * TOKENS * SIZE)
    model = TrtllmModel(kv_heads=HEADS, head_size=SIZE, tokens_per_block=TOKENS)
    blocks = whole.view(BLOCKS, LAYERS, 2, HEADS, TOKENS, SIZE)
    return EnginePool(
        TrtllmHandler.from_pool(whole, model), whole, (whole,), lambda block: blocks[block].transpose(2, 3)
    )


def vllm(order: str, interior: Interior | None = None) -> EnginePool:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * SIZE}
    whole = torch.zeros([sizes[axis] for axis in order])
    # The axes of this view are [layers, blocks, heads, tokens, K and V], whatever their order in memory.
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    item = whole.element_size()
    placement = SimpleNamespace(
        size=whole.numel() * item,
        layers=names,
        layer_stride=logical.stride(0) * item,
        block_stride=logical.stride(1) * item,
        offset=0,
    )
    caches = {name: logical[layer] for layer, name in enumerate(names)}
    group = VllmGroup(tuple(names), interior=interior)

    def numbers(block: int) -> torch.Tensor:
        content = logical[:, block]
        if interior is Interior.K_TRANSPOSED:
            plain = content.reshape(LAYERS, HEADS, 2, TOKENS * SIZE)
            k = plain[:, :, 0].view(LAYERS, HEADS, SIZE, TOKENS).permute(0, 3, 1, 2)
            v = plain[:, :, 1].view(LAYERS, HEADS, TOKENS, SIZE).transpose(1, 2)
            return torch.stack([k, v], 1)
        return content.reshape(LAYERS, HEADS, TOKENS, 2, SIZE).permute(0, 3, 2, 1, 4)

    handler = VllmHandler(caches, [placement], [group], BLOCKS, order)
    return EnginePool(handler, whole, tuple(caches.values()), numbers)


POOLS: dict[str, Callable[[], EnginePool]] = {
    "sglang": sglang,
    "trtllm": trtllm,
    "vllm-BLHNC": lambda: vllm("BLHNC"),
    "vllm-LBHNC": lambda: vllm("LBHNC"),
    "vllm-LBNHC": lambda: vllm("LBNHC"),
    "vllm-cpu": lambda: vllm("LBHNC", Interior.K_TRANSPOSED),
}


class Engine:
    """A pool with random content, and one rank's cache that uses this pool and a disk folder."""

    def __init__(self, pool: EnginePool, disk: Path, unit: str, **settings: Any) -> None:
        self.pool = pool
        weights: WeightsContent = settings.pop("weights", NAMED)
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        wanted: dict[str, object] = {
            "host.bytes": 1 << 20,
            "keys.scheme": "common",
            "disk.folders": str(disk),
            "disk.bytes_per_folder": 1 << 20,
            "disk.compute_if_faster": False,
        }
        heads = settings.pop("heads", HEADS)
        pool.whole.copy_(torch.randn(pool.whole.shape))
        view, format_id = pool.handler.view(), pool.handler.format_id()
        self.cache = RankCache(
            load_config(wanted | settings, {}),
            RankPool(view, format_id, format_id.interior_tokens, pool.tensors, LAYERS, heads),
            UnitOwner("a model", NAMESPACE, unit, weights),
            stream_of=lambda device: 0,
        )
        self.loads = LoadBatches(self.cache)

    def store(self, hashes: list[str], blocks: list[int]) -> None:
        """Stores blocks, and waits until they are in host memory. They are on disk only after the cache has been
        closed.
        """
        self.cache.store("s", self.cache.keys(hashes), np.array(blocks, np.int32), lambda done: None, None)
        assert self.cache.quiesce(30)
        self.cache.manager.release("s")

    def find(self, hashes: list[str]) -> int:
        """Looks blocks up, and waits until those on disk are fetched. Returns the number of leading blocks that can be
        loaded.
        """
        found = self.cache.match("r", self.keys(hashes), 30.0)
        self.cache.manager.check_integrity()
        return found

    def keys(self, hashes: list[str]) -> Keys:
        return self.cache.keys(hashes)

    def load(self, hashes: list[str], blocks: list[int]) -> bool:
        """Loads blocks that a lookup has found. Returns whether all of them arrived."""
        index = self.loads.start({"r": QueuedLoad(self.keys(hashes), np.array(blocks, np.int32))}, None)
        self.loads.set_consumer(index)
        for layer in range(LAYERS):
            self.loads.wait_until(layer)
        return self.loads.finish(index)

    def close(self) -> None:
        self.cache.manager.check_integrity()
        self.cache.close()
