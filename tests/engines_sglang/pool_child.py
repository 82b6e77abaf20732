"""Stores and loads pages of SGLang's own pool classes. `parts_child` runs this module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache import memory_pool

from flexkv.adapters.sglang.load_batches import LoadBatches, QueuedLoad
from flexkv.adapters.sglang.pools import view_of
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.config import load_config
from flexkv.errors import GeometryError
from flexkv.facts.ranks import UnitOwner

PAGE_TOKENS, TOKENS, LAYERS = 16, 160, 3
COMMON = {
    "size": TOKENS,
    "page_size": PAGE_TOKENS,
    "layer_num": LAYERS,
    "device": "cpu",
    "enable_memory_saver": False,
}
HEADS = {**COMMON, "head_num": 2, "head_dim": 64, "enable_alt_stream": False}
LATENT = {**COMMON, "kv_lora_rank": 32, "qk_rope_head_dim": 8}

POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha fp16": ("MHATokenToKVPool", HEADS | {"dtype": torch.float16}),
    "mha fp8": ("MHATokenToKVPool", HEADS | {"dtype": torch.float8_e4m3fn}),
    "mha other v": ("MHATokenToKVPool", HEADS | {"dtype": torch.bfloat16, "v_head_dim": 32}),
    "mla bf16": ("MLATokenToKVPool", LATENT | {"dtype": torch.bfloat16}),
    "mla fp8": ("MLATokenToKVPool", LATENT | {"dtype": torch.float8_e4m3fn}),
    "fp4": ("MHATokenToKVPoolFP4", HEADS | {"dtype": torch.bfloat16}),
}


def hashes_of(*names: str) -> list[str]:
    return [hashlib.sha256(name.encode()).hexdigest() for name in names]


def tensors_of(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)


def _shares_allocation(pool: Any) -> bool:
    """Whether K and V of a layer are in one allocation, with V after K."""
    if not hasattr(pool, "k_buffer"):
        return False
    k, v = pool.k_buffer[0].untyped_storage(), pool.v_buffer[0].untyped_storage()
    return bool(k.data_ptr() == v.data_ptr() and pool.v_buffer[0].storage_offset() > 0)


def page(pool: Any, number: int) -> list[bytes]:
    rows = slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
    return [tensor[rows].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors_of(pool)]


def make_cache(pool: Any) -> RankCache:
    return RankCache(
        load_config({"host.bytes": 4 << 20, "host.verify": True}, {}),
        view_of(pool, PAGE_TOKENS),
        UnitOwner("pool", b"p" * 32, "tp0"),
        stream_of=lambda device: 0,
    )


def round_trip(pool: Any) -> dict[str, Any]:
    """Stores pages 2 and 5, overwrites the pool, and loads their bytes into pages 7 and 3."""
    view, cache = view_of(pool, PAGE_TOKENS), make_cache(pool)
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).random_(0, 256)
    before = [page(pool, number) for number in (2, 5)]
    keys = cache.keys(hashes_of("a", "b"))
    cache.store("s", keys, np.array([2, 5], np.int32), lambda done: None, None)
    assert cache.quiesce(30)
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).fill_(255)
    spoiled = page(pool, 1)
    loads = LoadBatches(cache)
    assert cache.match("r", keys, 1.0) == 2
    index = loads.start({"r": QueuedLoad(keys, np.array([7, 3], np.int32))}, None)
    loads.set_consumer(index)
    for layer in range(view.layers):
        loads.wait_until(layer)
    arrived = loads.finish(index)
    same = [page(pool, number) for number in (7, 3)] == before
    others = all(page(pool, number) == spoiled for number in (0, 1, 2, 4, 5, 6, 8, 9))
    cache.close()
    return {
        "arrived": arrived,
        "same": same,
        "others untouched": others,
        "stored as": str(view.tensors[0].dtype),
        "shared": _shares_allocation(pool),
    }


def make_pool(name: str) -> Any:
    kind, arguments = POOLS[name]
    return getattr(memory_pool, kind)(**arguments)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in POOLS:
        try:
            yield name, round_trip(make_pool(name))
        except GeometryError as error:
            yield name, {"refused": str(error)}
